"""``gradsync bench hybrid``: our hybrid training against the plain way, in turns.

[Note: standing still]
Each style has processes of its own, all on this machine. Torch's RPC polls, and takes a good part
of a core in each idle process: so those of the plain way are stopped (SIGSTOP) while it is not
their turn. Ours sleep by themselves.
"""

from __future__ import annotations

import os
import queue
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, Self

from gradsync import hybrid
from gradsync.bench.contenders import Contender
from gradsync.bench.hybrid_styles import PATIENCE, Shape, play_ours, play_plain
from gradsync.bench.meeting import Stopped, turns
from gradsync.bench.result import Case

OURS: Final = "gradsync"
REFERENCE: Final = "reference"  # the plain way
BOTH: Final = "both"
STYLES: Final = (BOTH, OURS, REFERENCE)
POLL_SECONDS: Final = 0.2
LEAVE_SECONDS: Final = 30.0

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class HybridHeat:
    """One number of trainers and servers, for the styles that are raced.

    >>> shape = Shape(trainers=2, servers=4, embeddings=300, embedding_dim=16)
    >>> heat = HybridHeat(shape=shape, contenders=contenders("both"))
    >>> heat.name, heat.world, [each.label for each in heat.contenders]
    ('hybrid: 4 servers, 300 × 16 on each', 2, ['reference/gloo', 'gradsync/gradsync'])
    """

    shape: Shape
    contenders: tuple[Contender, ...]
    warm_up: int = 5  # epochs
    epochs: int = 10  # in a round
    rounds: int = 10

    @property
    def name(self) -> str:
        """What is raced: the model's name in the results."""
        shape = self.shape
        servers = "1 server" if shape.servers == 1 else f"{shape.servers} servers"
        return f"hybrid: {servers}, {shape.embeddings} × {shape.embedding_dim} on each"

    @property
    def world(self) -> int:
        """The trainers."""
        return self.shape.trainers

    @property
    def threads(self) -> int:
        """Of each process."""
        return self.shape.threads

    @property
    def backends(self) -> tuple[str, ...]:
        """Those of the contenders, each once."""
        return tuple(dict.fromkeys(each.backend for each in self.contenders if each.backend))


def contenders(style: str, backend: str = "gradsync") -> tuple[Contender, ...]:
    """The plain way first, if it takes part: the other is compared with it.

    >>> [each.label for each in contenders("gradsync", "gloo")]
    ['gradsync/gloo']
    """
    plain = Contender(implementation=REFERENCE, backend="gloo")
    ours = Contender(implementation=OURS, backend=backend)
    return {BOTH: (plain, ours), OURS: (ours,), REFERENCE: (plain,)}[style]


def hybrid_cases_of(heat: HybridHeat) -> list[Case]:
    """One case for each style, with nothing measured yet. A step of it is an epoch."""
    return [
        Case(
            model=heat.name,
            batch_size=heat.shape.examples,
            implementation=contender.implementation,
            backend=contender.backend,
            seed=heat.shape.seed,
            threads=heat.threads,
            ranks=tuple(range(heat.world)),
            parameters=heat.shape.parameters,
            complete=False,
        )
        for contender in heat.contenders
    ]


def run_hybrid_heat(heat: HybridHeat, is_asked_to_stop: Callable[[], bool], emit: Emit) -> None:
    """Run it, with processes that this one starts. Events are as those of ``worker.run_heat``."""
    with ExitStack() as stack:
        teams = []
        for index, contender in enumerate(heat.contenders):
            emit({"event": "building", "contender": index})
            teams.append(stack.enter_context(Team(contender, heat.shape)))
            teams[-1].take_turn(heat.warm_up)
        for number in range(heat.rounds):
            for index in turns(range(len(teams)), number):
                if is_asked_to_stop():
                    raise Stopped
                emit({"event": "turn", "contender": index, "round": number})
                seconds = teams[index].take_turn(heat.epochs)
                emit({"event": "measured", "contender": index, "round": number, "seconds": seconds})


class Team:
    """The processes of one style. [Note: standing still]"""

    def __init__(self, contender: Contender, shape: Shape) -> None:
        self._is_plain = contender.implementation == REFERENCE
        self._backend = contender.backend or "gloo"
        self._trainers = shape.trainers
        # The servers of the plain way are processes of the caller, as its trainers are.
        self._processes = shape.trainers + (shape.servers if self._is_plain else 0)
        self._folder = tempfile.TemporaryDirectory(prefix="gradsync-bench-")
        self._shape = replace(shape, meeting=str(Path(self._folder.name, "rpc")))
        self._commands = [get_context("forkserver").SimpleQueue() for _ in range(self._processes)]
        self._reports: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._pids: list[int] = []
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="bench-hybrid", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            while len(self._pids) < self._processes:
                self._pids.append(self._next_report()[1]["pid"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def _run(self) -> None:
        roles = hybrid.Roles(
            trainer=play_plain if self._is_plain else play_ours,
            trainers=self._processes,
            servers=1 if self._is_plain else self._shape.servers,
        )
        try:
            hybrid.run(
                roles,
                args=(self._shape, self._commands),
                backend=self._backend,
                timeout=PATIENCE,
                on_report=lambda *report: self._reports.put(report),
            )
            self._ended.set_result(None)
        except BaseException as error:
            self._ended.set_exception(error)

    def take_turn(self, epochs: int) -> list[list[float]]:
        """Run some epochs, alone; their seconds, by trainer."""
        self._signal(signal.SIGCONT)
        for each in self._commands[: self._trainers]:
            each.put(epochs)
        found: dict[str, list[float]] = {f"trainer{at}": [] for at in range(self._trainers)}
        missing = set(found)
        while missing:
            name, values = self._next_report()
            found[name] += values["seconds"]
            if not values["more"]:
                missing.remove(name)
        self._signal(signal.SIGSTOP)
        return list(found.values())

    def _next_report(self) -> tuple[str, dict[str, Any]]:
        while True:
            try:
                return self._reports.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self._ended.done():
                    self._ended.result()
                    raise RuntimeError("the trainers ended early, and did not say why") from None

    def _signal(self, number: int) -> None:
        if self._is_plain and not self._ended.done():
            for pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGCONT)
        for each in self._commands:
            each.put(0)
        self._thread.join(LEAVE_SECONDS)
        self._folder.cleanup()
