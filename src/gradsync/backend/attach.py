"""Give the ranks of one machine the memory that they share, or agree that there is none.

[Note: alone] Ranks of a machine that cannot share memory are in a place each, as if they were on
machines of their own: what is between machines keeps its promises between them too.
"""

import json
import secrets
import warnings
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from gradsync.backend import _native
from gradsync.backend.members import LONGEST_MESSAGE, Member, check_alive, fetch
from gradsync.errors import FaultError, PeerLostError

NONCE_BITS = 64
LONGEST_PROBLEM = 500


def attach(store: Store, own: Member, local: Sequence[Member]) -> _native.Context | None:
    """Map one segment on all ranks of this machine, ``local``; None if one of them cannot.

    The first of them makes the segment and tells where it is. Then every one tells how it went, and
    all draw the same conclusion from that: a system that does not let them share memory is put up
    with, a message that was not written by us is an error.
    """
    place = f"segment/{local[0].rank}"
    context, problem, is_fault = None, "", False
    try:
        context = _map(store, place, own, local)
    except PeerLostError:
        raise
    except (FaultError, _native.InvalidError) as error:
        problem, is_fault = str(error), True
    except OSError as error:
        problem = str(error) or type(error).__name__
    if problem and own == local[0]:
        store.set(place, json.dumps({"problem": problem[:LONGEST_PROBLEM]}))
    answer = {"problem": problem[:LONGEST_PROBLEM], "is_fault": is_fault}
    store.set(f"attached/{own.rank}", json.dumps(answer))
    try:
        answers = fetch(store, [f"attached/{member.rank}" for member in local], local)
        problems = [
            (member, *_parse_answer(message, member))
            for member, message in zip(local, answers, strict=True)
        ]
    except Exception:
        if context is not None:
            context.close()
        raise
    problems = [entry for entry in problems if entry[1]]
    if not problems:
        assert context is not None
        context.close_descriptor()
        return context
    if context is not None:
        context.close()
    check_alive(local)  # a process that has ended can be neither watched nor asked for its memory
    # One that was told by another of its problem is not the first to have one.
    member, text, _ = min(problems, key=lambda entry: entry[1].startswith("rank "))
    reason = text if text.startswith("rank ") else f"{member.label}: {text}"
    if any(entry[2] for entry in problems):
        raise FaultError(f"The ranks of {own.host} cannot share memory. {reason}")
    if own == local[0]:
        warnings.warn(
            f"gradsync cannot share memory between the ranks of {own.host} and uses gloo "
            f"between them, which is slower: {reason}.",
            stacklevel=2,
        )
    return None


def alone(own: Member) -> _native.Context:
    """A group of this rank only, in memory that nobody else needs to map: [Note: alone]."""
    peer = (own.pid, own.started, own.label, own.rank, own.host)
    return _native.Context(_native.Segment.alone(), 0, [peer], 0, 0, is_founder=True)


def settle(
    store: Store, own: Member, machines: Sequence[Sequence[Member]], *, shares: bool
) -> list[list[Member]]:
    """Which ranks are in one place, on all machines. ``shares``: they share memory on this one."""
    neighbours = next(machine for machine in machines if own in machine)
    if own == neighbours[0]:
        store.set(f"machine/{own.rank}", "shares" if shares else "alone")
    answers = fetch(store, [f"machine/{machine[0].rank}" for machine in machines], neighbours)
    places: list[list[Member]] = []
    for machine, answer in zip(machines, answers, strict=True):
        if answer not in (b"alone", b"shares"):
            raise FaultError(
                f"What the store holds for {machine[0].host} was not written by gradsync. Do all "
                "ranks run the same version, and does nobody else use the store?"
            )
        places += [list(machine)] if answer == b"shares" else [[member] for member in machine]
    return places


def _map(store: Store, place: str, own: Member, local: Sequence[Member]) -> _native.Context:
    if len(local) > _native.MAX_RANKS:
        raise OSError(f"they are {len(local)}, and no more than {_native.MAX_RANKS} can")
    peers = [(each.pid, each.started, each.label, each.rank, each.host) for each in local]
    rank = local.index(own)
    if rank == 0:
        segment = _native.Segment.create(len(local))
        nonces = [secrets.randbits(NONCE_BITS) for _ in range(2)]
        context = _native.Context(segment, 0, peers, nonces[0], nonces[1], is_founder=True)
        pid, descriptor, size = context.ticket()
        ticket = {"pid": pid, "descriptor": descriptor, "bytes": size, "nonces": nonces}
        store.set(place, json.dumps(ticket))
        return context
    (message,) = fetch(store, [place], local[:1])
    pid, descriptor, size, nonces = _parse(message, local[0])
    segment = _native.Segment.open(len(local), pid, descriptor, size)
    return _native.Context(segment, rank, peers, nonces[0], nonces[1], is_founder=False)


def _parse(message: bytes, founder: Member) -> tuple[int, int, int, list[int]]:
    """Where the segment is, by its founder; it must be the process that it said it is."""
    try:
        ticket = _object(message)
        if isinstance(ticket.get("problem"), str):
            raise OSError(f"{founder.label}: {ticket['problem']}")
        nonces = ticket["nonces"]
        if not isinstance(nonces, list) or len(nonces) != 2:
            raise ValueError("other nonces")
        pid, descriptor, size = (ticket[key] for key in ("pid", "descriptor", "bytes"))
        for number in (pid, descriptor, size, *nonces):
            if type(number) is not int or not 0 <= number < 2**NONCE_BITS:
                raise ValueError(f"{str(number)[:40]} is out of range")
        if pid != founder.pid:
            raise ValueError(f"it names process {pid}")
        if descriptor >= 2**31 or size >= 2**63:
            raise ValueError(f"descriptor {descriptor} of {size} bytes is out of range")
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise FaultError(
            f"What the store holds for the segment of {founder.label} was not written by "
            f"gradsync: {error!r}."
        ) from error
    return pid, descriptor, size, nonces


def _parse_answer(message: bytes, member: Member) -> tuple[str, bool]:
    """How it went on another rank: the problem, if any, and whether it is a fault."""
    try:
        answer = _object(message)
        problem, is_fault = answer["problem"], answer["is_fault"]
        if not isinstance(problem, str) or not isinstance(is_fault, bool):
            raise ValueError("other types")
    except (TypeError, KeyError, ValueError, RecursionError):
        return f"{member.label}: its answer in the store was not written by gradsync", True
    return problem, is_fault


def _object(message: bytes) -> dict[str, Any]:
    if len(message) > LONGEST_MESSAGE:
        raise ValueError(f"{len(message)} bytes")
    values = json.loads(message)
    if not isinstance(values, dict):
        raise ValueError("no object")
    return values
