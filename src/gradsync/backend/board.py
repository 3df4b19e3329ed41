"""What machines tell each other when something goes wrong: by the store, as flows may be cut.

[Note: alarm]
Whoever notices trouble raises an alarm. One rank a machine, its leader, looks for it a few times a
second, answers with the number of the collective that it has come to, and looks for the reason. So
a leader that finds its flow cut learns which machines still answer, and all machines learn the
first reason that anybody gave.
"""

import json
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import Store

from gradsync.errors import AbortedError, DeadlineError, FaultError, PeerLostError

PERIOD_SECONDS = 0.2  # between two looks
GRACE_SECONDS = 0.45  # for an answer
LONGEST_MESSAGE = 8192
KINDS = {kind.__name__: kind for kind in (AbortedError, DeadlineError, FaultError, PeerLostError)}


class Board:
    """One group's notices. Every call returns soon, also if the store does not."""

    def __init__(self, store: Store, machine: int, *, is_leader: bool) -> None:
        self.progress = 0  # the number of the collective that this rank has come to
        self._machine = machine
        self._is_leader = is_leader
        self._given = store
        self._store: Store | None = None
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._notice: FaultError | None = None
        self._trouble = ""
        if is_leader:
            self._start()

    @property
    def notice(self) -> FaultError | None:
        """What a leader has heard."""
        return self._notice

    @property
    def trouble(self) -> str:
        """Why the store cannot be asked, or nothing."""
        return self._trouble

    def post(self, error: FaultError) -> None:
        """Tell the other machines, unless somebody was first."""
        message = json.dumps(
            {
                "kind": type(error).__name__,
                "text": str(error)[: LONGEST_MESSAGE // 2],
                "rank": getattr(error, "rank", None),
                "host": getattr(error, "host", None),
                "pid": getattr(error, "pid", None),
                "ranks": list(getattr(error, "ranks", ())),
            }
        )

        def write(store: Store) -> None:
            store.compare_set("notice", "", message)
            store.set("alarm", "1")

        self._ask(write, GRACE_SECONDS)

    def read(self, seconds: float = GRACE_SECONDS) -> FaultError | None:
        """What has been posted; waits for it for a while."""
        deadline = time.monotonic() + seconds
        while self._notice is None and not self._trouble and time.monotonic() < deadline:
            self._notice = self._ask(_look, deadline - time.monotonic())
            if self._notice is None:
                time.sleep(0.02)
        return self._notice

    def roll_call(self, machines: int) -> dict[int, int | None]:
        """Raise the alarm: how far each other machine has come, None for one without an answer.

        Empty, if somebody posts a reason meanwhile, or the store fails.
        """

        def ring(store: Store) -> None:
            store.set(f"here/{self._machine}", str(self.progress))
            store.set("alarm", "1")

        self._ask(ring, GRACE_SECONDS)
        if self.read() is not None or self._trouble:
            return {}

        def collect(store: Store) -> dict[int, int | None]:
            others = [machine for machine in range(machines) if machine != self._machine]
            return {
                each: int(store.get(f"here/{each}")) if store.check([f"here/{each}"]) else None
                for each in others
            }

        return self._ask(collect, GRACE_SECONDS) or {}

    def close(self) -> None:
        """End the thread, if the store lets it."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(1.0)

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
        is_alarmed = False
        while True:
            call: Callable[[], object] | None = self._listen
            if is_alarmed or self._trouble or not self._is_leader:
                call = self._calls.get()
            else:
                with suppress(queue.Empty):
                    call = self._calls.get(timeout=PERIOD_SECONDS)
            if call is None:
                return
            try:
                result = call()
                is_alarmed = is_alarmed or (call == self._listen and bool(result))
            except Exception as error:  # its host has died, for one
                self._trouble = self._trouble or (str(error).splitlines() or [repr(error)])[0]

    def _listen(self) -> bool:
        store = self._connected()
        if not store.check(["alarm"]):
            return False
        store.set(f"here/{self._machine}", str(self.progress))
        deadline = time.monotonic() + 4 * GRACE_SECONDS
        while self._notice is None and time.monotonic() < deadline:
            self._notice = _look(store)
            # Our own rank may want to ask meanwhile.
            with suppress(queue.Empty):
                call = self._calls.get(timeout=0.02)
                if call is None:
                    self._calls.put(None)
                    break
                call()
        return True


def _look(store: Store) -> FaultError | None:
    return _parse(store.get("notice")) if store.check(["notice"]) else None


def _parse(message: bytes) -> FaultError:
    """Believe no more than can be: a store may be reached by others than us."""
    with suppress(ValueError, TypeError, AttributeError):
        values = json.loads(message[:LONGEST_MESSAGE])
        kind = KINDS.get(values.get("kind"), FaultError)
        text = str(values.get("text"))
        if kind is PeerLostError:
            rank, host, pid = (values.get(key) for key in ("rank", "host", "pid"))
            if (rank is None or isinstance(rank, int)) and (pid is None or isinstance(pid, int)):
                return PeerLostError(text, rank=rank, host=host and str(host), pid=pid)
        if kind is DeadlineError:
            return DeadlineError(text, ranks=[int(rank) for rank in values.get("ranks", ())])
        return kind(text)
    return FaultError("Another machine has given up, and left a notice that cannot be read.")
