"""A pool of real processes for tests of distributed code.

Importing torch takes seconds, a run on a warm worker milliseconds. So workers are started
once, on first use of their rank, and used again; one whose state is in doubt is killed and
replaced on next use, so that a failed test cannot poison the following one.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar, overload

from gradsync.testing import transfer
from gradsync.testing.outcome import Outcome, RankFailure
from gradsync.testing.process import WorkerProcess
from gradsync.testing.protocol import Request
from gradsync.testing.supervise import Supervisor

T = TypeVar("T")

_CLOSE_PATIENCE = 5.0


class WorkerPool:
    """Up to ``max_ranks`` worker processes that run functions as the ranks of a group.

    ``grace`` is how long, in seconds, ranks may go on after another rank has failed; the
    clean-up after a run may take that long too, and 30 s at least. ``start_timeout`` limits the
    start of the workers; it does not count towards a run's ``timeout``. ``preload`` names modules
    that a worker imports then, so that what takes long counts towards no time-out of a run. Needs
    Linux.

    >>> def total(rank, world):
    ...     import torch
    ...     import torch.distributed as dist
    ...     tensor = torch.tensor([float(rank)])
    ...     dist.all_reduce(tensor)
    ...     return tensor.item()
    >>> with WorkerPool(max_ranks=2) as pool:
    ...     pool.run(total, ranks=2)
    [1.0, 1.0]
    """

    def __init__(
        self,
        max_ranks: int = 4,
        *,
        grace: float = 3.0,
        start_timeout: float = 120.0,
        preload: Sequence[str] = (),
    ) -> None:
        if max_ranks < 1:
            raise ValueError(f"max_ranks must be at least 1, not {max_ranks}")
        if isinstance(preload, str):
            raise TypeError(f"preload is a sequence of names of modules, not one: {preload!r}")
        self.max_ranks = max_ranks
        self.grace = grace
        self.start_timeout = start_timeout
        self.preload = tuple(preload)
        self._workers: dict[int, WorkerProcess] = {}
        self._directory: Path | None = None
        self._run_ids = count()
        self._busy = threading.Lock()
        self._closed = False
        self._owner = os.getpid()
        _open_pools.add(self)

    @overload
    def run(
        self,
        fn: Callable[..., T],
        *,
        ranks: int = ...,
        args: tuple[Any, ...] = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float = ...,
        group_timeout: float = ...,
        backend: str | None = ...,
        env: Mapping[str, str | None] | None = ...,
        grace: float | None = ...,
        return_exceptions: Literal[False] = ...,
    ) -> list[T]: ...

    @overload
    def run(
        self,
        fn: Callable[..., T],
        *,
        ranks: int = ...,
        args: tuple[Any, ...] = ...,
        kwargs: Mapping[str, Any] | None = ...,
        timeout: float = ...,
        group_timeout: float = ...,
        backend: str | None = ...,
        env: Mapping[str, str | None] | None = ...,
        grace: float | None = ...,
        return_exceptions: Literal[True],
    ) -> list[Outcome[T]]: ...

    def run(
        self,
        fn: Callable[..., T],
        *,
        ranks: int = 2,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
        group_timeout: float = 30.0,
        backend: str | None = "gloo",
        env: Mapping[str, str | None] | None = None,
        grace: float | None = None,
        return_exceptions: bool = False,
    ) -> list[T] | list[Outcome[T]]:
        """Call ``fn(rank, world, *args, **kwargs)`` on each rank; return the values by rank.

        Each run has a fresh default process group of ``backend`` with the time-out
        ``group_timeout``, destroyed afterwards; none with ``backend=None``. A function may
        start groups and RPC of its own: torchrun's variables are set for ``env://``, and
        ``GRADSYNC_INIT_METHOD`` holds a ``file://`` address that is fresh in each run.
        ``env`` is for this run alone; None unsets a variable.

        Raises `RankFailure` if a rank raises, dies or is still running after ``timeout``
        seconds, or ``grace`` seconds after another rank failed. With ``return_exceptions``
        it does not raise and waits for all ranks until ``timeout``: returns an `Outcome` by
        rank. A rank that has failed keeps its process group for ``grace`` seconds so that
        its peers fail for their own reasons, then lets go of it.
        """
        if not 1 <= ranks <= self.max_ranks:
            raise ValueError(
                f"ranks={ranks}, but this pool has 1 to {self.max_ranks}: "
                f"make it with WorkerPool(max_ranks={ranks}) if that is meant"
            )
        call = transfer.dump_call((fn, args, dict(kwargs or {})))
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this WorkerPool is in a run already: use one pool a thread")
        try:
            outcomes = self._run(
                call,
                ranks,
                timeout=timeout,
                group_timeout=group_timeout,
                backend=backend,
                env=dict(env or {}),
                grace=self.grace if grace is None else grace,
                patient=return_exceptions,
            )
        except BaseException:
            self._kill_all()  # interrupted half-way: no worker's state is known
            raise
        finally:
            self._busy.release()
        if return_exceptions:
            return outcomes
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if errors:
            failure = RankFailure(errors, world=ranks)
            raise failure from failure.first.exception
        return [outcome.unwrap() for outcome in outcomes]

    def close(self) -> None:
        """End all workers and remove the pool's files; safe to call again."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        for worker in self._workers.values():
            worker.close()
        deadline = time.monotonic() + _CLOSE_PATIENCE
        for worker in self._workers.values():
            worker.kill(patience=max(0.0, deadline - time.monotonic()))
        self._workers.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def pids(self) -> dict[int, int]:
        """The process id of each rank that has a worker."""
        return {rank: worker.pid for rank, worker in sorted(self._workers.items())}

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a WorkerPool cannot be sent to its workers: do not use it in `fn`")

    def _run(
        self,
        call: bytes,
        ranks: int,
        *,
        timeout: float,
        group_timeout: float,
        backend: str | None,
        env: dict[str, str | None],
        grace: float,
        patient: bool,
    ) -> list[Outcome[Any]]:
        directory = self._ensure_open()
        workers = self._ensure_workers(ranks)
        files = directory / f"run{next(self._run_ids)}"
        files.mkdir()
        call_file = files / "call"
        call_file.write_bytes(call)
        reports = {rank: files / f"report{rank}" for rank in range(ranks)}
        port = _free_port()
        try:
            for rank, worker in enumerate(workers):
                worker.forget_output()
                request = Request(
                    rank=rank,
                    world=ranks,
                    call=call_file,
                    report=reports[rank],
                    store=files / "store",
                    backend=backend,
                    group_timeout=group_timeout,
                    port=port,
                    env=env,
                    search_path=_search_path(),
                    directory=os.getcwd(),
                )
                worker.send(request)
            return Supervisor(
                workers,
                reports,
                timeout=timeout,
                grace=grace,
                patient=patient,
                retire=self._retire,
            ).outcomes()
        finally:
            shutil.rmtree(files, ignore_errors=True)

    def _ensure_open(self) -> Path:
        if self._closed:
            raise RuntimeError("this WorkerPool is closed: make a new one")
        if os.getpid() != self._owner:
            raise RuntimeError("this WorkerPool belongs to the process it was made in")
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="gradsync-pool-"))
        return self._directory

    def _ensure_workers(self, ranks: int) -> list[WorkerProcess]:
        """Start what is missing, all at once, and wait until all have imported torch."""
        directory = self._ensure_open()
        for rank in range(ranks):
            worker = self._workers.get(rank)
            if worker is not None and not worker.alive:
                worker.kill()
            if worker is None or not worker.alive:
                self._workers[rank] = WorkerProcess(rank, directory, self.preload)
        deadline = time.monotonic() + self.start_timeout
        workers = [self._workers[rank] for rank in range(ranks)]
        while new := [worker for worker in workers if not worker.greeted]:
            for worker in new:
                _greet(worker)
            if time.monotonic() > deadline:
                late = [worker.rank for worker in new if not worker.greeted]
                raise RuntimeError(
                    f"workers of ranks {late} did not start within {self.start_timeout:g} s; "
                    "make the pool with a larger start_timeout if the machine is busy"
                )
            wait([worker.connection for worker in new if not worker.greeted], 0.2)
        return workers

    def _retire(self, worker: WorkerProcess) -> None:
        if self._workers.get(worker.rank) is worker:
            del self._workers[worker.rank]

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()


def _greet(worker: WorkerProcess) -> None:
    try:
        worker.greeted = worker.receive() is not None
    except EOFError:
        ending = worker.kill(patience=1.0)
        raise RuntimeError(
            f"the worker of rank {worker.rank} {ending} before it could start; "
            f"its output:\n{worker.output()}"
        ) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _search_path() -> tuple[str, ...]:
    root = str(transfer.source_root())
    entries = [os.path.abspath(entry) for entry in sys.path]
    return tuple(entries if root in entries else [root, *entries])


_open_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_open_pools):
        pool.close()
