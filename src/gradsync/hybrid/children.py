"""Processes on this machine, as their parent sees them: started, listened to, ended.

The child's side is ``process``.
"""

import multiprocessing
import pickle
import secrets
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from gradsync.errors import FaultError
from gradsync.hybrid import process
from gradsync.hybrid.process import Outcome
from gradsync.hybrid.sockets import Address

START_SECONDS = 120.0  # for a process to begin
_GRACE = 5.0  # seconds for the other trainers to fail for reasons of their own


class Servers:
    """Servers in processes of their own; made by ``start_servers``.

    >>> from gradsync import hybrid
    >>> with hybrid.start_servers(1) as servers:
    ...     list(servers.addresses)
    ['server0']
    """

    def __init__(self, processes: dict[str, BaseProcess], pipes: dict[str, Connection]) -> None:
        self._processes, self._pipes = processes, pipes
        self.addresses: dict[str, Address] = {}
        for name, pipe in pipes.items():
            if not pipe.poll(START_SECONDS):
                self.close()
                raise FaultError(f"{name} did not start within {START_SECONDS:g} s.")
            try:
                self.addresses[name] = pipe.recv()
            except EOFError:
                self.close()
                raise FaultError(f"{name} ended before it could serve.") from None

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each server."""
        return {name: address.pid for name, address in self.addresses.items()}

    def close(self) -> None:
        """End the servers."""
        for pipe in self._pipes.values():
            pipe.close()
        deadline = time.monotonic() + 5.0
        for each in self._processes.values():
            _end(each, deadline)

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_servers(servers: int = 1, *, start_method: str = "forkserver") -> Servers:
    """Start servers that several runs can use, one after the other.

    They keep their tables when trainers end, well or not: the next ``run(…, servers=…)`` finds
    them as they were left.

    >>> from gradsync import hybrid
    >>> with hybrid.start_servers(1) as servers:
    ...     hybrid.run(hybrid.Roles(trainer=hybrid.rank_of), servers=servers)
    [0]
    """
    context = process_context(start_method)
    token = secrets.token_hex(16)
    processes, pipes = {}, {}
    for at in range(servers):
        name = f"server{at}"
        pipes[name], processes[name] = start(context, name, process.serve, name, token)
    return Servers(processes, pipes)


def process_context(start_method: str = "forkserver") -> BaseContext:
    """How processes are started.

    >>> process_context("spawn").get_start_method()
    'spawn'
    """
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        # Importing torch takes seconds, and so does what a DDP needs of it: once is enough.
        context.set_forkserver_preload(["gradsync.hybrid", "torch._dynamo"])
    return context


def start(
    context: BaseContext, name: str, target: Callable[..., None], *args: Any
) -> tuple[Connection, BaseProcess]:
    """Let a child call ``target`` with ``args`` and its end of a pipe; ours is returned."""
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(*args, theirs), name=name)  # type: ignore[attr-defined]
    child.start()
    theirs.close()
    return ours, child


def collect(pipes: dict[str, Connection], processes: dict[str, BaseProcess]) -> dict[str, Outcome]:
    """What became of the trainers; after the first failure the others have a short time."""
    outcomes: dict[str, Outcome] = {}
    by_pipe = {pipe: name for name, pipe in pipes.items()}
    deadline: float | None = None
    while len(outcomes) < len(pipes):
        open_pipes = [pipe for pipe, name in by_pipe.items() if name not in outcomes]
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(open_pipes, left)
        if not ready:
            for pipe in open_pipes:
                name = by_pipe[pipe]
                processes[name].terminate()
                text = f"{name} was still running {_GRACE:g} s after the first failure, and ended."
                outcomes[name] = Outcome(text=text)
        for ended in ready:
            assert isinstance(ended, Connection)
            name = by_pipe[ended]
            outcomes[name] = _outcome(name, ended, processes[name])
            if outcomes[name].failed and deadline is None:
                deadline = time.monotonic() + _GRACE
    return {name: outcomes[name] for name in pipes}


def _outcome(name: str, pipe: Connection, child: BaseProcess) -> Outcome:
    try:
        found = pickle.loads(pipe.recv_bytes())
    except EOFError:
        child.join(5.0)
        return Outcome(text=f"{name} died with exit code {child.exitcode}.")
    assert isinstance(found, Outcome)
    return found


def end_all(children: dict[str, BaseProcess]) -> None:
    """End those that still run."""
    for each in children.values():
        _end(each, time.monotonic())


def _end(child: BaseProcess, deadline: float) -> None:
    child.join(max(0.0, deadline - time.monotonic()))
    if child.is_alive():
        child.terminate()
        child.join(2.0)
    if child.is_alive():
        child.kill()
        child.join(5.0)
