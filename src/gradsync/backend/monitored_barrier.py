"""A barrier that names the ranks that have not come, and breaks nothing if some have not.

Ranks meet in the store: slower than shared memory, but a rank that stays away disturbs nobody.
The words are gloo's, which programs may look for. A rank of this machine that has ended is lost,
and not awaited.
"""

import functools
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gradsync.backend.members import SLICE, Member, check_alive, is_alive
from gradsync.errors import DeadlineError, PeerLostError

WHAT = "monitored_barrier"


class MonitoredBarrier:
    """All ranks tell rank 0 that they are there; rank 0 tells them how it went.

    ``local`` are the members on this machine, of which we can see whether they live.
    """

    def __init__(self, store: Store, rank: int, size: int, local: Sequence[Member]) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._local = local
        self._round = 0

    def __call__(self, timeout: timedelta, *, wait_all_ranks: bool) -> None:
        """Return when all ranks are here; raise after ``timeout``, or at the first one missing."""
        self._round += 1
        if self._rank == 0:
            self._lead(timeout, wait_all_ranks)
        else:
            self._follow(timeout)

    def _lead(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        try:
            problem = self._find_missing(timeout, wait_all_ranks)
        except PeerLostError as error:
            self._store.set(self._key("verdict"), str(error))
            raise
        self._store.set(self._key("verdict"), problem)
        if problem:
            raise DeadlineError(problem)
        for name in ("verdict", *range(1, self._size)):  # all ranks are past the round before
            with suppress(Exception):  # not every store can forget
                self._store.delete_key(self._key(name, self._round - 1))

    def _find_missing(self, timeout: timedelta, wait_all_ranks: bool) -> str:
        deadline = time.monotonic() + timeout.total_seconds()
        within = f"{timeout / timedelta(milliseconds=1):.0f} ms"
        missing = []
        for rank in range(1, self._size):
            if timeout <= timedelta(0):
                return f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {within}."
            if self._arrives(str(rank), deadline):
                continue
            missing.append(str(rank))
            if not wait_all_ranks:
                return f"[Rank 0]: Rank {rank} failed to pass monitoredBarrier in {within}."
        if missing:
            ranks = ", ".join(missing)
            return f"[Rank 0]: Ranks {ranks} failed to pass monitoredBarrier in {within}."
        return ""

    def _follow(self, timeout: timedelta) -> None:
        self._store.set(self._key(self._rank), "here")
        problem = "Rank 0 has not answered in time."
        if self._arrives("verdict", time.monotonic() + timeout.total_seconds()):
            problem = self._store.get(self._key("verdict")).decode(errors="replace")
        if problem:
            check_alive(self._local, f"before it passed {WHAT}")
            raise DeadlineError(
                f"[Rank {self._rank}]: Rank {self._rank} successfully reached monitoredBarrier, "
                "but received errors while waiting for send/recv from rank 0. Please check rank 0 "
                f"logs for faulty rank.\nOriginal exception:\n{problem}"
            )

    def _arrives(self, name: str, deadline: float) -> bool:
        key = self._key(name)
        while True:
            left = timedelta(seconds=deadline - time.monotonic())
            if left > timedelta(0):
                with suppress(RuntimeError):  # what stores raise at a time-out
                    self._store.wait([key], min(SLICE, left))
                    return True
            all_alive = all(map(is_alive, self._local))
            if self._store.check([key]):  # who has ended may have come before
                return True
            if left <= timedelta(0):
                return False
            if not all_alive:
                check_alive(self._local, f"before it passed {WHAT}")

    def _key(self, name: object, round_: int | None = None) -> str:
        return f"monitored/{self._round if round_ is None else round_}/{name}"


def serve(ours: type[dist.ProcessGroup]) -> None:
    """Let ``torch.distributed.monitored_barrier`` take groups of type ``ours``: it refuses all but gloo's.

    Who has imported the function by name before keeps torch's.
    """
    torchs = dist.monitored_barrier

    @functools.wraps(torchs)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        chosen = dist.group.WORLD if group is None else group
        if not isinstance(chosen, ours):
            return torchs(group, timeout, wait_all_ranks)
        if isinstance(timeout, int | float):
            timeout = timedelta(seconds=timeout)
        return chosen.monitored_barrier(timeout, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier
