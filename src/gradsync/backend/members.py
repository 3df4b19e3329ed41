"""Who is in a group, and which of its ranks share a machine.

Ranks tell each other through the store that torch gives to every group. What comes from there is
checked before it is used: a store may be reached by others than us.
"""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from torch._C._distributed_c10d import Store

from gradsync.backend import _native
from gradsync.errors import FaultError

LONGEST_MESSAGE = 4096


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


def exchange(store: Store, own: Member, size: int) -> list[Member]:
    """Tell all ranks of a group who we are; who they are, by rank."""
    store.set(f"member/{own.rank}", json.dumps(asdict(own)))
    return [parse(store.get(f"member/{rank}"), rank) for rank in range(size)]


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
        if member.rank != rank or member.pid <= 0 or member.started < 0:
            raise ValueError(f"rank {member.rank}, pid {member.pid}")
    except ValueError as error:
        raise FaultError(
            f"What the store holds for rank {rank} was not written by gradsync: {error}. Do all "
            "ranks run the same version, and does nobody else use the store?"
        ) from error
    return member


def by_machine(members: Sequence[Member]) -> list[list[Member]]:
    """The members of each machine, machines and members in the order of their ranks."""
    machines: dict[str, list[Member]] = {}
    for member in members:
        machines.setdefault(member.machine, []).append(member)
    return list(machines.values())
