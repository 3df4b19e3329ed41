"""What machines tell each other when something goes wrong: by the store, as flows may be cut.

[Note: alarm]
Whoever notices trouble raises an alarm. One rank a machine, its leader, looks for it a few times a
second, answers how far its machine has come, and looks for the reason. So a leader that finds its
flow cut learns which machines still answer, and all machines learn the first reason that anybody
gave.

[Note: after]
A rank may end while its machine computes, and others wait for the machine. Its leader sees that
too, and posts it with the number of the collective that it has come to. It concerns those who are
further than that: what comes before is complete there.
"""

import atexit
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from gradsync.backend.members import LONGEST_MESSAGE, MAX_RANK
from gradsync.backend.notices import Told, decode, encode, first_line

PERIOD_SECONDS = 0.2  # between two looks
GRACE_SECONDS = 0.45  # for an answer
LONGEST_GRACE_SECONDS = 2.0  # for one, as long as several are missing


@dataclass(frozen=True)
class Answer:
    """How far a machine has come: to which collective, and which ranks of it have not."""

    number: int
    missing: tuple[int, ...] = ()


class Owner(Protocol):
    """Whose board it is. All of it is called on a thread of the board's."""

    def missing(self) -> list[int]:
        """Who of this machine has not come to the collective under way."""

    def look_after_neighbours(self) -> tuple[Told, int] | None:
        """Somebody who has ended, and after which collective. Asked a few times a second."""

    def drop_everything(self, notice: Told) -> None:
        """A leader has heard of something that concerns it."""


_OPEN: "weakref.WeakSet[Board]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that comes back from the store when the interpreter has gone ends the process."""
    for board in list(_OPEN):
        board.close()


class Board:
    """One group's notices. Every call returns soon, also if the store does not."""

    def __init__(self, store: Store, machine: int, owner: Owner, *, is_leader: bool) -> None:
        self.progress = 0  # the number of the collective that this rank has come to
        self._machine = machine
        self._is_leader = is_leader
        self._owner: Owner | None = owner  # until it is closed
        self._given = store
        self._store: Store | None = None
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._heard: Told | None = None
        self._heard_of_idle: tuple[Told, int] | None = None  # [Note: after]
        self._trouble = ""
        if is_leader:
            self._start()
            _OPEN.add(self)

    @property
    def notice(self) -> Told | None:
        """What has been heard, if it concerns what this rank has come to."""
        if self._heard is None and self._heard_of_idle is not None:
            told, after = self._heard_of_idle
            return told if self.progress > after else None
        return self._heard

    @property
    def trouble(self) -> str:
        """Why the store cannot be asked, or nothing."""
        return self._trouble

    def post(self, error: Told) -> bool:
        """Tell the other machines, unless somebody was first. Does the store have a reason now?"""

        def write(store: Store) -> bool:
            _write(store, "notice", encode(error))
            return True

        return self._ask(write, GRACE_SECONDS) is True

    def read(self, seconds: float = GRACE_SECONDS) -> Told | None:
        """What has been posted; waits for it for a while."""
        deadline = time.monotonic() + seconds
        while self.notice is None and not self._trouble and time.monotonic() < deadline:
            self._ask(self._hear, deadline - time.monotonic())
            if self.notice is None:
                time.sleep(0.02)
        return self.notice

    def roll_call(self, machines: int) -> dict[int, Answer | None]:
        """Raise the alarm: how far each other machine has come, None for one without an answer.

        Empty, if somebody posts a reason meanwhile, or the store fails.
        """

        def ring(store: Store) -> None:
            if self._is_leader:
                self._answer(store)
            store.set("alarm", "1")

        others = [machine for machine in range(machines) if machine != self._machine]
        deadline = time.monotonic() + LONGEST_GRACE_SECONDS
        self._ask(ring, GRACE_SECONDS)
        while True:
            if self.read() is not None or self._trouble:
                return {}
            answers: dict[int, Answer | None] = self._ask(
                lambda store: {each: _collect(store, each) for each in others}, GRACE_SECONDS
            ) or dict.fromkeys(others)
            # A machine that is only slow must not be taken for one that is gone.
            is_clear = sum(answer is None for answer in answers.values()) < 2
            if is_clear or time.monotonic() > deadline:
                return answers

    def close(self) -> None:
        """End the thread, if the store lets it."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(1.0)
        self._owner = None

    # ---------------------------------------------------------------- the thread

    def _ask(self, question: Callable[[Store], Any], seconds: float) -> Any:
        """The answer, or None if there is none in time."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._start()
        self._calls.put(lambda: answers.put(question(self._connected())))
        with suppress(queue.Empty):
            return answers.get(timeout=max(seconds, 0.01))
        return None

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="gradsync-board", daemon=True
                )
                self._thread.start()

    def _connected(self) -> Store:
        """A connection of our own: the given one may be waiting for something else."""
        if self._store is None:
            clone = getattr(self._given, "clone", None)
            self._store = self._given if clone is None else clone()
            assert self._store is not None
        return self._store

    def _run(self) -> None:
        is_over = not self._is_leader
        while True:
            call: Callable[[], object] | None = self._listen
            if is_over or self._trouble:
                call = self._calls.get()
            else:
                with suppress(queue.Empty):
                    call = self._calls.get(timeout=PERIOD_SECONDS)
            if call is None:
                return
            try:
                call()
                if not is_over and self.notice is not None:
                    is_over = True
                    if self._owner is not None:
                        self._owner.drop_everything(self.notice)
            except Exception as error:  # its host has died, for one
                self._trouble = self._trouble or first_line(error)

    def _listen(self) -> None:
        store = self._connected()
        if self.notice is None and self._heard_of_idle is None and self._owner is not None:
            found = self._owner.look_after_neighbours()
            if found is not None:
                told, after = found
                _write(store, "idle", f"{after}:{encode(told)}")
        if not store.check(["alarm"]):
            return
        self._answer(store)
        deadline = time.monotonic() + PERIOD_SECONDS
        while self.notice is None and time.monotonic() < deadline:
            self._hear(store)
            # Our own rank may want to ask meanwhile.
            with suppress(queue.Empty):
                call = self._calls.get(timeout=0.02)
                if call is None:
                    self._calls.put(None)
                    break
                call()

    def _answer(self, store: Store) -> None:
        missing = [] if self._owner is None else self._owner.missing()
        answer = {"number": self.progress, "missing": missing}
        store.set(f"here/{self._machine}", json.dumps(answer))

    def _hear(self, store: Store) -> None:
        if self._heard is None and store.check(["notice"]):
            self._heard = decode(store.get("notice"))
        if self._heard_of_idle is None and store.check(["idle"]):
            after, _, notice = store.get("idle").partition(b":")
            is_number = after.isdigit() and len(after) < 20
            self._heard_of_idle = decode(notice), int(after) if is_number else 0


def _write(store: Store, key: str, message: str) -> None:
    store.compare_set(key, "", message)
    store.set("alarm", "1")


def _collect(store: Store, machine: int) -> Answer | None:
    """What a machine has answered; what it cannot have answered is none."""
    key = f"here/{machine}"
    if not store.check([key]):
        return None
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        values = json.loads(store.get(key)[:LONGEST_MESSAGE])
        number, missing = values["number"], values["missing"]
        if type(number) is int and all(type(rank) is int for rank in missing):
            return Answer(number, tuple(rank for rank in missing if 0 <= rank <= MAX_RANK))
    return None
