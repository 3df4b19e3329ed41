"""Give the ranks of one machine the memory that they share, or agree that there is none."""

import json
import secrets
import warnings
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from gradsync.backend import _native
from gradsync.backend.members import Member
from gradsync.errors import FaultError

NONCE_BITS = 64


def attach(store: Store, own: Member, local: Sequence[Member]) -> _native.Context | None:
    """Map one segment on all ranks of this machine, ``local``; None if one of them cannot.

    The first of them makes the segment and tells where it is. Then every one tells how it went, and
    all draw the same conclusion from that.
    """
    place = f"segment/{local[0].rank}"
    context, problem = None, ""
    try:
        context = _map(store, place, own, local)
    except (OSError, ValueError) as error:
        problem = str(error) or type(error).__name__
        if own == local[0]:
            store.set(place, json.dumps({"problem": problem}))
    store.set(f"attached/{own.rank}", problem[:500])
    for member in local:
        answer = store.get(f"attached/{member.rank}").decode(errors="replace")
        if answer and context is not None:
            context.close()
            context = None
        if answer and not problem:
            problem = f"{member.label}: {answer}"
    if context is None:
        if own == local[0]:
            warnings.warn(
                f"gradsync cannot share memory between the ranks of {own.host} and uses gloo "
                f"between them, which is slower: {problem}.",
                stacklevel=2,
            )
        return None
    context.close_descriptor()
    return context


def _map(store: Store, place: str, own: Member, local: Sequence[Member]) -> _native.Context:
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
    pid, descriptor, size, nonces = _parse(store.get(place), local[0])
    segment = _native.Segment.open(len(local), pid, descriptor, size)
    return _native.Context(segment, rank, peers, nonces[0], nonces[1], is_founder=False)


def _parse(message: bytes, founder: Member) -> tuple[int, int, int, list[int]]:
    """Where the segment is, by its founder; it must be the process that it said it is."""
    try:
        ticket = json.loads(message)
        if "problem" in ticket:
            raise OSError(f"{founder.label}: {ticket['problem']}")
        nonces = [int(nonce) for nonce in ticket["nonces"]]
        pid, descriptor, size = (int(ticket[key]) for key in ("pid", "descriptor", "bytes"))
        if pid != founder.pid or len(nonces) != 2 or min(nonces) < 0:
            raise ValueError(f"pid {pid}")
        if max(descriptor, size, *nonces) >= 2**NONCE_BITS or min(descriptor, size) < 0:
            raise ValueError("numbers out of range")
    except (TypeError, KeyError, ValueError) as error:
        raise FaultError(
            f"What the store holds for the segment of {founder.label} was not written by gradsync: "
            f"{error!r}."
        ) from error
    return pid, descriptor, size, nonces
