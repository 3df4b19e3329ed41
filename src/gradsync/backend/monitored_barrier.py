"""A barrier that names the ranks that have not come, and breaks nothing if some have not.

Ranks meet in the store: slower than shared memory, but a rank that stays away disturbs nobody.
The words are gloo's, which programs may look for. A rank of this machine that has ended is lost,
and not awaited.

[Note: verdict]
How a barrier went is written down once, by whoever is first: rank 0 when all have come or its time
is up, any rank when it finds that one of its machine has ended. All raise what stands there, on
every machine. Rank 0 then stays a moment for the others to read it: the store may end with it.
"""

import functools
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gradsync.backend.members import SLICE, Member, check_alive, is_alive, without_store
from gradsync.backend.notices import Told, decode, encode
from gradsync.errors import (
    AbortedError,
    DeadlineError,
    GradsyncError,
    PeerLostError,
    StateError,
)

PASSED = b"passed"
SHORTEST_PAUSE = 0.0005  # seconds between two looks into the store
LONGEST_PAUSE = 0.1
LOOK = SLICE.total_seconds()  # between two looks whether the others live
GRACE = 2 * LOOK  # for the verdict of a rank 0 whose time began later


class MonitoredBarrier:
    """All ranks tell rank 0 that they are there; rank 0 tells them how it went.

    ``members`` may be all of the group, or those of this machine alone: these we can see live, the
    others we can only name.
    """

    def __init__(self, store: Store, rank: int, size: int, members: Sequence[Member]) -> None:
        own = next(member for member in members if member.rank == rank)
        self._own = own
        self._store = store
        self._rank = rank
        self._size = size
        self._labels = {member.rank: member.label for member in members}
        self._local = [each for each in members if each.machine == own.machine and each != own]
        self._lock = threading.Lock()
        self._round = 0
        self._is_closed = False

    def __call__(self, timeout: timedelta, *, wait_all_ranks: bool) -> None:
        """Return when all ranks are here; raise after ``timeout``, or as soon as one has ended.

        Threads take turns, and the time of each begins with its turn.
        """
        with self._lock:
            if self._is_closed:
                raise StateError("The process group has been destroyed.")
            self._round += 1
            try:
                if self._rank == 0:
                    verdict = self._lead(timeout, wait_all_ranks)
                else:
                    verdict = self._follow(timeout)
            except GradsyncError:
                raise
            except RuntimeError as error:
                what = f"{self._name} waited for it"
                raise without_store(what, self._own, error, self._local) from error
        if verdict != PASSED:
            raise self._told(decode(verdict))

    def close(self) -> None:
        """Let nobody wait any more, nor begin to."""
        self._is_closed = True

    def _lead(self, timeout: timedelta, wait_all_ranks: bool) -> bytes:
        others = range(1, self._size)
        finding = PASSED.decode()
        try:
            if not self._comes([self._key(rank) for rank in others], timeout.total_seconds()):
                missing = [rank for rank in others if not self._has_come(rank)]
                if missing:
                    finding = encode(self._late(missing, timeout, wait_all_ranks))
        except PeerLostError as error:
            finding = encode(error)
        verdict = self._settle(finding)
        with suppress(RuntimeError):  # whatever becomes of the store now, the verdict stands
            self._let_read()
        if verdict == PASSED:
            self._forget(self._round - 1)  # which all ranks are past
        return verdict

    def _late(
        self, missing: Sequence[int], timeout: timedelta, wait_all_ranks: bool
    ) -> DeadlineError:
        within = f"{timeout / timedelta(milliseconds=1):.0f} ms"
        problem = f"Rank {missing[0]} failed to pass monitoredBarrier in {within}"
        if timeout <= timedelta(0):
            problem = f"Rank 0 timed out in monitoredBarrier after {within}"
        elif wait_all_ranks:
            ranks = ", ".join(map(str, missing))
            problem = f"Ranks {ranks} failed to pass monitoredBarrier in {within}"
        who = ", ".join(map(self._label, missing))
        return DeadlineError(f"[Rank 0]: {problem}. Not arrived: {who}.", ranks=missing)

    def _follow(self, timeout: timedelta) -> bytes:
        self._store.set(self._key(self._rank), "here")
        try:
            if not self._comes([self._key("verdict")], timeout.total_seconds() + GRACE):
                raise self._told(
                    DeadlineError(f"Rank 0 has not answered in time: {self._label(0)}.", ranks=[0])
                )
            verdict = self._store.get(self._key("verdict"))
        except PeerLostError as error:
            verdict = self._settle(encode(error))
        with suppress(RuntimeError):  # rank 0 does not stay for long
            self._store.add(self._key("read"), 1)
        return verdict

    def _comes(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until the store has all of ``keys``, or a verdict."""
        began = now = time.monotonic()
        looked = began
        while True:
            is_late = now - began >= seconds
            all_alive = True
            if is_late or now - looked >= LOOK:
                all_alive, looked = all(map(is_alive, self._local)), now
            # Only then the store: who has ended may have come before.
            if self._store.check(list(keys)) or self._store.check([self._key("verdict")]):
                return True
            if not all_alive:
                check_alive(self._local, f"before it passed {self._name}")
            if is_late:
                return False
            if self._is_closed:
                raise AbortedError(f"{self._name} on rank {self._rank}: the group was closed.")
            pause = min(max((now - began) / 8, SHORTEST_PAUSE), LONGEST_PAUSE)
            time.sleep(min(pause, began + seconds - now))
            now = time.monotonic()

    def _has_come(self, rank: int) -> bool:
        return bool(self._store.check([self._key(rank)]))

    def _settle(self, finding: str) -> bytes:
        """Let it be the verdict, unless there is one; what the verdict is: [Note: verdict]."""
        verdict: bytes = self._store.compare_set(self._key("verdict"), "", finding)
        return verdict

    def _let_read(self) -> None:
        come = sum(map(self._has_come, range(1, self._size)))
        give_up = time.monotonic() + LOOK
        while self._store.add(self._key("read"), 0) < come and time.monotonic() < give_up:
            time.sleep(0.002)

    def _forget(self, round_: int) -> None:
        for name in ("verdict", "read", *range(1, self._size)):
            with suppress(Exception):  # not every store can forget
                self._store.delete_key(self._key(name, round_))

    def _told(self, error: Told) -> Told:
        """An error of rank 0, as it is raised here."""
        if self._rank == 0 or not isinstance(error, DeadlineError):
            return error
        return DeadlineError(
            f"[Rank {self._rank}]: Rank {self._rank} successfully reached monitoredBarrier, "
            "but received errors while waiting for send/recv from rank 0. Please check rank 0 "
            f"logs for faulty rank.\nOriginal exception:\n{error}",
            ranks=error.ranks,
        )

    @property
    def _name(self) -> str:
        return f"monitored_barrier {self._round}"

    def _label(self, rank: int) -> str:
        return self._labels.get(rank, f"rank {rank} of the group")

    def _key(self, name: object, round_: int | None = None) -> str:
        return f"monitored/{self._round if round_ is None else round_}/{name}"


def serve(ours: type[dist.ProcessGroup]) -> None:
    """Let ``torch.distributed.monitored_barrier`` take groups of type ``ours``.

    It refuses all but gloo's, which still go to torch's. ``unpatch_torch`` does not undo it, since
    groups of ours are there without a patch too. Who has imported the function by name before keeps
    torch's.
    """
    torchs = dist.monitored_barrier

    @functools.wraps(torchs)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        chosen: Any = dist.group.WORLD if group is None else group
        is_ours = isinstance(chosen, ours)
        if is_ours and isinstance(timeout, int | float):
            timeout = timedelta(seconds=timeout)
        barrier = chosen.monitored_barrier if is_ours else functools.partial(torchs, group)
        barrier(timeout, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier
