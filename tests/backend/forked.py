"""Ranks forked from a process that has imported torch: to kill one costs milliseconds.

The ranks of `gradsync.testing.WorkerPool` are dear to replace, and tests of faults use up ranks
by the hundred. A `Nursery` is one process without threads that forks the ranks of a run. They meet
in a file and end with the nursery, which ends with us.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore

import gradsync
from gradsync.testing import transfer

PR_SET_PDEATHSIG = 1
STACK_SIGNAL = signal.SIGUSR2
LIMIT = 60.0  # of a run; a test has 120


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a rank ended: with a value, with an error, or by a signal. Times are monotonic."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    text: str = ""  # the error's traceback
    output: str = ""
    reported: float | None = None
    ended: float | None = None
    code: int | None = None
    hung: bool = False

    def unwrap(self) -> Any:
        assert self.reported is not None, f"rank {self.rank} ended early: {self}\n{self.output}"
        if self.error is not None:
            raise AssertionError(f"rank {self.rank}: {self.text}\n{self.output}") from self.error
        return self.value


class Nursery:
    """Forks ranks and tells how they ended. One run at a time."""

    def __init__(self) -> None:
        self._control, theirs = multiprocessing.Pipe()
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(transfer.source_root())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us
            )
        assert self._receive(120) == "ready"

    def run(self, fn: Callable[..., Any], ranks: int = 2, **options: Any) -> list[Ending]:
        """Call ``fn(rank, world, *args)`` on every rank and wait for all; see `start`."""
        with self.start(fn, ranks, **options) as run:
            return run.endings()

    @contextmanager
    def start(
        self,
        fn: Callable[..., Any],
        ranks: int = 2,
        *,
        args: Sequence[Any] = (),
        backend: str | None = "gradsync",
        group_timeout: float = 20.0,
        env: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
        expendable: Sequence[int] = (),
        timeout: float = LIMIT,
        prepare: Callable[[int], None] | None = None,
    ) -> Iterator[Run]:
        """Fork the ranks; at the end of the block they are gone.

        ``env`` is for all ranks, or one for each. ``prepare(rank)`` is called before the group is
        made. Ranks that are ``expendable`` are killed when the others have ended.
        """
        with tempfile.TemporaryDirectory(prefix="gradsync-forked-") as directory:
            each = [env] * ranks if isinstance(env, Mapping) or not env else env
            order = {
                "call": transfer.dump_call((fn, tuple(args), prepare)),
                "directory": directory,
                "ranks": ranks,
                "backend": backend,
                "group_timeout": group_timeout,
                "env": [dict(one) for one in each],
                "expendable": list(expendable),
                "timeout": timeout,
                "path": list(sys.path),
            }
            self._control.send(order)
            run = Run(self._receive(10), self._receive, timeout)
            try:
                yield run
            finally:
                run.endings()

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def _receive(self, patience: float) -> Any:
        assert self._control.poll(patience), "the nursery does not answer"
        return self._control.recv()


class Run:
    """Ranks under way."""

    def __init__(self, pids: list[int], receive: Callable[[float], Any], timeout: float) -> None:
        self.pids = pids
        self._receive = receive
        self._timeout = timeout
        self._endings: list[Ending] | None = None

    def endings(self) -> list[Ending]:
        if self._endings is None:
            raw = self._receive(self._timeout + 20)
            self._endings = [_read(rank, facts) for rank, facts in enumerate(raw)]
        return self._endings


def _read(rank: int, facts: dict[str, Any]) -> Ending:
    report = facts.pop("report")
    known = {} if report is None else pickle.loads(report)
    payload = known.pop("payload", None)
    if payload is not None:
        known["value" if known.pop("ok") else "error"] = transfer.load(payload)
    return Ending(rank=rank, **known, **facts)


# ---------------------------------------------------------------- in the nursery


def serve(control: Connection) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    importlib.import_module("pytest")  # or every rank would, for the functions of tests
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    gc.collect()
    gc.freeze()
    control.send("ready")
    while True:
        try:
            order = control.recv()
        except EOFError:
            return
        _Brood(order, control).raise_()


class _Brood:
    def __init__(self, order: dict[str, Any], control: Connection) -> None:
        self._order = order
        self._control = control
        self._directory = Path(order["directory"])
        self._released, self._release = os.pipe()
        self._done = [os.pipe() for _ in range(order["ranks"])]
        self._facts: list[dict[str, Any]] = []

    def raise_(self) -> None:
        pids = [self._fork(rank) for rank in range(self._order["ranks"])]
        os.close(self._released)
        for _, theirs in self._done:
            os.close(theirs)
        self._control.send(pids)
        self._facts = [{"hung": False, "ended": None, "code": None} for _ in pids]
        self._watch(pids)
        os.close(self._release)
        for ours, _ in self._done:
            os.close(ours)
        for rank, pid in enumerate(pids):
            self._end(rank, pid)
        self._control.send(self._facts)

    def _fork(self, rank: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                os.close(self._release)
                for index, (ours, theirs) in enumerate(self._done):
                    os.close(ours)
                    if index != rank:
                        os.close(theirs)
                self._control.close()
                _be_rank(rank, self._order, self._done[rank][1], self._released)
            finally:
                os._exit(1)
        return pid

    def _watch(self, pids: list[int]) -> None:
        """Until all ranks that matter have reported or ended, or time is up."""
        deadline = time.monotonic() + self._order["timeout"]
        lives = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
        reports = {ours: rank for rank, (ours, _) in enumerate(self._done)}
        missing = set(range(len(pids))) - set(self._order["expendable"])
        while missing and time.monotonic() < deadline:
            left = max(0.0, deadline - time.monotonic())
            for ready in select.select([*lives, *reports], [], [], left)[0]:
                if ready in lives:
                    rank = lives.pop(ready)
                    os.close(ready)
                    self._facts[rank]["ended"] = time.monotonic()
                    missing.discard(rank)
                else:
                    # Closed, by the rank itself or by its end. Only what it wrote is a report.
                    rank = reports.pop(ready)
                    if (self._directory / f"report{rank}").exists():
                        missing.discard(rank)
        for rank in missing:
            self._facts[rank]["hung"] = True
            os.kill(pids[rank], STACK_SIGNAL)
        if missing:
            time.sleep(0.5)  # to write their stacks
        for descriptor in lives:
            os.close(descriptor)

    def _end(self, rank: int, pid: int) -> None:
        report = self._directory / f"report{rank}"
        if report.exists() and not self._facts[rank]["hung"]:
            give_up = time.monotonic() + 5.0
            while time.monotonic() < give_up:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    break
                time.sleep(0.001)
            else:
                found = 0
        else:
            found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        self._facts[rank]["code"] = os.waitstatus_to_exitcode(status)
        self._facts[rank]["report"] = report.read_bytes() if report.exists() else None
        output = self._directory / f"out{rank}"  # which a rank killed at once has not made
        self._facts[rank]["output"] = output.read_text(errors="replace") if output.exists() else ""


def _be_rank(rank: int, order: dict[str, Any], done: int, released: int) -> None:
    die_with_parent()
    directory = Path(order["directory"])
    output = os.open(directory / f"out{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(order["env"][rank])
    sys.path[:] = order["path"]
    report: dict[str, Any] = {"ok": True, "payload": None, "text": ""}
    try:
        fn, args, prepare = transfer.load(order["call"])
        if prepare is not None:
            prepare(rank)
        world = order["ranks"]
        if order["backend"] is not None:
            join(order["backend"], directory / "store", rank, world, order["group_timeout"])
        report["payload"] = transfer.dump_result(fn(rank, world, *args))
    except BaseException as error:
        report["ok"] = False
        report["text"] = traceback.format_exc()
        report["payload"] = transfer.dump_result(_plain(error))
    report["reported"] = time.monotonic()
    target = directory / f"report{rank}"
    target.with_suffix(".part").write_bytes(pickle.dumps(report))
    target.with_suffix(".part").rename(target)
    os.close(done)
    os.read(released, 1)  # so that nobody takes our end for a fault
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _plain(error: BaseException) -> BaseException:
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def join(backend: str, path: Path, rank: int, world: int, seconds: float) -> None:
    timeout = timedelta(seconds=seconds)
    store = FileStore(str(path), world)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def state_of(pid: int) -> str:
    """As the kernel says: "T" is stopped; a process that has ended is "Z" until it is reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    assert gradsync.__file__ is not None
    sys.path[0] = sys.argv[2]
    serve(Connection(int(sys.argv[1])))
