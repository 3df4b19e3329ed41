"""Who is in a group, and which of its ranks share a machine.

Ranks tell each other through the store that torch gives to every group. What comes from there is
checked before it is used: a store may be reached by others than us.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store

from gradsync.backend import _native
from gradsync.errors import DeadlineError, FaultError, PeerLostError

LONGEST_MESSAGE = 4096
LONGEST_HOST = 255
LONGEST_MACHINE = 1024
MAX_RANK = 2**31 - 1
MAX_PID = 2**22  # of the kernel, whatever is set
SLICE = timedelta(milliseconds=250)
GRACE_SECONDS = 0.5
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0005, 0.05  # seconds between two looks into the store


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank: ``rank`` in its group, ``name`` as the user knows it."""

    rank: int
    name: int
    machine: str
    host: str
    pid: int
    started: int  # with the pid it names the process for good

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"rank {self.name} (pid {self.pid} on {self.host})"


def myself(rank: int, name: int) -> Member:
    """This process, as a member of a group."""
    pid = os.getpid()
    return Member(
        rank=rank,
        name=name,
        machine=machine(),
        host=socket.gethostname(),
        pid=pid,
        started=_native.start_time(pid),
    )


def machine() -> str:
    """What is equal for two processes if, and only if, they can share memory.

    The boot names the machine for good, where host names repeat; processes that do not see each
    other's pids cannot watch over each other, those on different networks are meant to be apart,
    and other users must not be let in. ``GRADSYNC_MACHINE`` keeps processes apart that could share.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net")]
    return "/".join([boot, *spaces, str(os.geteuid()), os.environ.get("GRADSYNC_MACHINE", "")])


def exchange(store: Store, own: Member, size: int, watched: Sequence[Member] = ()) -> list[Member]:
    """Tell all ranks of a group who we are; who they are, by rank.

    ``watched`` are those of this machine that another group knows already.
    """
    store.set(f"member/{own.rank}", json.dumps(asdict(own)))
    messages = fetch(store, [f"member/{rank}" for rank in range(size)], watched)
    return [parse(message, rank) for rank, message in enumerate(messages)]


def fetch(store: Store, keys: Sequence[str], watched: Sequence[Member] = ()) -> list[bytes]:
    """Wait until the store has all of ``keys``, but for nobody of this machine who has ended.

    By asking again and again: stores complain loudly of every wait that is cut short.
    """
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    began = looked = time.monotonic()
    while not store.check(list(keys)):
        now = time.monotonic()
        if now - looked >= SLICE.total_seconds():
            looked = now
            check_alive(watched)
        if now - began > timeout.total_seconds():
            missing = [key for key in keys if not store.check([key])]
            raise DeadlineError(
                f"A group could not be made in time ({timeout}): the store still has no "
                f"{', '.join(missing)}. The number is that of a rank, which has not come, has "
                "ended, or has made groups in another order.",
                ranks=[int(key.rpartition("/")[2]) for key in missing],
            )
        time.sleep(min(max((now - began) / 8, SHORTEST_PAUSE), LONGEST_PAUSE))
    if store.has_extended_api():  # type: ignore[attr-defined]
        return list(store.multi_get(list(keys)))
    return [store.get(key) for key in keys]


def check_alive(watched: Sequence[Member], when: str = "while a group with it was made") -> None:
    """Raise if one of them, who are of this machine, has ended."""
    for member in watched:
        if not is_alive(member):
            raise loss_of(member, f"{member.label} has ended {when}.")


def without_store(what: str, own: Member, error: Exception, local: Sequence[Member]) -> FaultError:
    """What to raise if the store fails: as a rule it ends with the rank that holds it."""
    give_up = time.monotonic() + GRACE_SECONDS
    try:
        while time.monotonic() < give_up:  # its connections end shortly before a process does
            check_alive(local, f"while {what}")
            time.sleep(0.01)
    except PeerLostError as lost:
        return lost
    reason = (str(error).splitlines() or [repr(error)])[0]
    return FaultError(
        f"{own.label}: the store cannot be asked any more, while {what}: {reason}. The process "
        "that holds it, which is rank 0 unless a launcher does, has ended or cannot be reached: "
        "see its output."
    )


def loss_of(member: Member, text: str) -> PeerLostError:
    """The error that names ``member``."""
    return PeerLostError(text, rank=member.rank, host=member.host, pid=member.pid)


def is_alive(member: Member) -> bool:
    """Does the process of a member, which is one of this machine, still run?"""
    return _state(member) not in "ZX" and _native.start_time(member.pid) == member.started


def is_stopped(member: Member) -> bool:
    """Has somebody stopped its process (SIGSTOP, or a debugger)?"""
    return _state(member) in "Tt"


def _state(member: Member) -> str:
    """As the kernel says; that of what is no more is "X"."""
    try:
        stat = Path(f"/proc/{member.pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]


def parse(message: bytes, rank: int) -> Member:
    """Read what a rank has told of itself, and believe no more than can be."""
    try:
        if len(message) > LONGEST_MESSAGE:
            raise ValueError(f"{len(message)} bytes")
        values = json.loads(message)
        kinds = {field.name: field.type for field in fields(Member)}
        if not isinstance(values, dict) or values.keys() != kinds.keys():
            raise ValueError("other fields")
        for name, kind in kinds.items():
            if type(values[name]) is not kind:
                raise ValueError(f"{name} is {values[name]!r}")
        member = Member(**values)
        if member.rank != rank:
            raise ValueError(f"it says that it is rank {member.rank}")
        _check_bounds(member)
    except (ValueError, RecursionError) as error:
        raise FaultError(
            f"What the store holds for rank {rank} was not written by gradsync: {error}. Do all "
            "ranks run the same version, and does nobody else use the store?"
        ) from error
    return member


def _check_bounds(member: Member) -> None:
    for name, first, last in (
        ("name", 0, MAX_RANK),
        ("pid", 1, MAX_PID),
        ("started", 1, 2**63 - 1),
    ):
        if not first <= getattr(member, name) <= last:
            raise ValueError(f"{name} is {getattr(member, name)}")
    for name, longest in (("host", LONGEST_HOST), ("machine", LONGEST_MACHINE)):
        text = getattr(member, name)
        if len(text) > longest or not text.isprintable():
            raise ValueError(f"{name} is {text[:longest]!r}, of {len(text)} characters")


def by_machine(members: Sequence[Member]) -> list[list[Member]]:
    """The members of each machine, machines and members in the order of their ranks."""
    machines: dict[str, list[Member]] = {}
    for member in members:
        machines.setdefault(member.machine, []).append(member)
    return list(machines.values())
