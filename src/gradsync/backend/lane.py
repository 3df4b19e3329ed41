"""Operations that take several steps: in the order of their issue, on a thread of their own."""

import atexit
import os
import queue
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

import torch.distributed as dist

from gradsync.backend._native import State
from gradsync.backend.engines import Engines, is_gloo_used, keep_all
from gradsync.backend.flows import Clock, await_flow, is_of_network, lost
from gradsync.backend.members import Member, is_alive
from gradsync.backend.shared_memory import SharedMemory
from gradsync.backend.work import translate
from gradsync.errors import (
    AbortedError,
    FaultError,
    GradsyncError,
    PeerLostError,
    StateError,
)

Call = Callable[[Any], dist.Work]  # of an engine
LONGEST_GOODBYE = 1.0  # seconds
PAUSE_SECONDS = 0.05  # for gloo's threads to let go of the last tensors, which are Python's
_OPEN: "weakref.WeakSet[Lane]" = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """A thread that comes back from gloo when the interpreter has gone ends the process.

    So what all ranks have begun may come to its end, and what does not is ended. Who has nothing
    to do is left alone: a program's own handlers may follow.
    """
    deadline = time.monotonic() + LONGEST_GOODBYE
    is_all_done = True
    for lane in list(_OPEN):
        with suppress(Exception):
            is_all_done &= lane.comes_to_an_end(deadline)
    if not is_all_done:
        keep_all()
    if is_gloo_used():
        time.sleep(PAUSE_SECONDS)


def check_process(owner: int) -> None:
    """Raise in a child after a fork: it has the memory of a group, but none of its threads."""
    if os.getpid() != owner:
        raise StateError(
            "This process was forked from a rank of the group, and is none itself: it cannot use "
            "the group."
        )


class Task:
    """An operation under way on the thread of a lane."""

    def __init__(self, number: int, name: str, run: Callable[[], None]) -> None:
        self.number = number
        self.name = f"collective {number}, {name}"
        self.run = run
        self._ended = threading.Event()
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Has it ended, well or not?"""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait for it, and raise what went wrong."""
        while not self._ended.wait(0.1):  # in slices, so that Ctrl-C gets through
            pass
        if self._error is not None:
            # Another one each time: what is raised keeps those who wait, and they keep us.
            raise _another(self._error)

    def end(self, error: Exception | None) -> None:
        """Let those who wait go on; lets go of what it needed."""
        if isinstance(error, GradsyncError):
            error.__traceback__ = None  # says no more, and keeps the group for as long as the error
        self._error = error
        self.run = _nothing
        self._ended.set()


def _nothing() -> None:
    pass


def _another(error: Exception) -> Exception:
    try:
        made = copy(error)
    except Exception:  # of a class that cannot be copied
        return error
    made.__cause__ = error.__cause__
    return made


class Refused(Exception):
    """gloo does not take its arguments, which are alike on all ranks: nothing else is wrong."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Lane:
    """Runs tasks, one after the other, for ranks that share ``memory`` with ``neighbours``."""

    def __init__(self, name: str, memory: SharedMemory, neighbours: Sequence[Member]) -> None:
        self.memory = memory
        self.neighbours = neighbours  # and ourselves
        self._process = os.getpid()
        self.issued = self.ended = 0
        self.broken: Exception | None = None  # why nothing works any more
        self.stop: AbortedError | None = None
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        _OPEN.add(self)

    def start(self, prepare: Callable[[], Task]) -> Task:
        """Queue what ``prepare`` returns; it is called at once, by one thread after the other."""
        check_process(self._process)
        with self._lock:
            self.issued += 1
            if self._is_closed:
                task = Task(self.issued, "", _nothing)
                task.end(AbortedError("The group has been closed."))
                return task
            task = prepare()
            self._tasks.put(task)
        return task

    def through_gloo(self, call: Call, engines: Engines, clock: Clock) -> None:
        """Run ``call`` with gloo. All ranks have agreed on it."""
        engine = engines.gloo(partial(self.look, needs_neighbours=True))
        try:
            self.await_flow(call(engine), clock)
        except (RuntimeError, ValueError, TypeError) as error:
            if isinstance(error, GradsyncError) or is_of_network(str(error)):
                raise
            raise Refused(error) from error

    def await_flow(self, flow: dist.Work, clock: Clock, *, needs_neighbours: bool = False) -> None:
        """Wait for the network, and for news."""
        await_flow(flow, partial(self.look, needs_neighbours=needs_neighbours), clock)

    def look(self, *, needs_neighbours: bool) -> None:
        """Raise if what is under way can no longer complete."""
        if self.stop is not None:
            raise self.stop
        gone = self.gone()
        if gone is not None and not isinstance(gone, PeerLostError):  # who leaves may have done all
            raise gone
        if needs_neighbours:
            for member in self.neighbours:
                if not is_alive(member):
                    raise lost(member, "the group", "")

    def gone(self) -> FaultError | None:
        """What a neighbour says who has given up, aborted or left the group."""
        states = self.memory.context.states()
        for member, (state, reason) in zip(self.neighbours, states, strict=True):
            if state is State.FAILED and reason:
                return FaultError(f"{member.label} gave up: {reason}")
            if state is State.ABORTED:
                return AbortedError(f"{member.label} aborted the group.")
            if state is State.LEFT:
                return lost(member, "the group", "", how="has left the group")
        return None

    def give_up(self, error: Exception) -> None:
        """Let nobody on this machine wait for us, and say why."""
        rank = error.rank if isinstance(error, PeerLostError) else None
        blamed = [at for at, each in enumerate(self.neighbours) if each.rank == rank]
        self.memory.context.fail(str(error), blamed[0] if blamed else None)

    @abstractmethod
    def explain(self, task: Task, error: Exception) -> Exception:
        """What to tell the user of a task that has failed; tells the other ranks."""

    def begin(self, task: Task) -> None:
        """The thread has come to ``task``; raise if it cannot even begin."""
        if self.stop is not None:
            raise self.stop

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            error = self.broken
            if error is None:
                try:
                    self.begin(task)
                    task.run()
                except Refused as refused:
                    error = refused.error
                except Exception as problem:
                    error = self._explained(task, translate(problem))
            self.ended += 1  # first: who waits may close the group at once
            task.end(error)
            del task, error

    def _explained(self, task: Task, error: Exception) -> Exception:
        try:
            return self.explain(task, error)
        except Exception as problem:  # whatever it is, nobody must wait for ever
            problem.__cause__ = error
            self.broken = problem
            self.memory.context.fail(ascii(problem))
            return problem

    def comes_to_an_end(self, deadline: float) -> bool:
        """Wait until nothing is under way, but not for long: then it fails. Does it go well?"""
        if self._process != os.getpid() or self.ended == self.issued:
            return True
        while self.ended < self.issued and self.stop is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if self.ended == self.issued:
            return True
        self.memory.context.abort()
        with suppress(Exception):  # no thread can be started any more, to tell others
            self.abort()
        give_up = time.monotonic() + LONGEST_GOODBYE
        while self.ended < self.issued and time.monotonic() < give_up:
            time.sleep(0.005)
        return False

    def abort(self) -> None:
        """Make what is under way fail."""
        if self.stop is None:
            self.stop = AbortedError("The group was aborted.")

    def close(self) -> None:
        """End the thread. What is still under way fails."""
        with self._lock:
            self._is_closed = True
            is_busy = self.ended < self.issued
            self._tasks.put(None)
        if is_busy and self.broken is None:
            self.memory.context.abort()
            self.abort()
        if self._thread is not threading.current_thread():  # the collector may call from anywhere
            self._thread.join()
