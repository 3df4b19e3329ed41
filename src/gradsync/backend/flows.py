"""gloo's part: how its connections are made, its operations waited for, its errors explained.

[Note: flows]
gloo cannot be told to give up a collective. Who waits for one does so in slices, and looks
meanwhile whether it can still complete. One that is not waited for any more keeps what it works on.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from gradsync.backend.engines import Engines
from gradsync.backend.members import Member, check_alive, is_alive, is_stopped, loss_of
from gradsync.backend.notices import first_line
from gradsync.errors import DeadlineError, FaultError, GradsyncError, PeerLostError

SLICE = timedelta(milliseconds=100)
GRACE_SECONDS = 0.5  # for the end of a process to be seen, after that of its connections
# Words of what gloo says if other ranks have to do with it.
NETWORK = ("gloo/transport", "connection", "socket", "timed out", "timeout")


class Clock:
    """How long an operation may still take. It begins when the operation is issued."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """In seconds, and never nothing: what looks once more finds what is already there."""
        return max(self._deadline - time.monotonic(), 0.001)

    @property
    def timeout(self) -> timedelta:
        """The same, for gloo."""
        return timedelta(seconds=self.left)

    @property
    def late(self) -> float:
        """For how many seconds the deadline has passed."""
        return time.monotonic() - self._deadline


def connect(engines: Engines, local: Sequence[Member]) -> None:
    """Make gloo's engine now: it waits for all ranks, but for none of this machine that ends."""
    try:
        engines.gloo(partial(check_alive, local))
    except GradsyncError:
        raise
    except RuntimeError as error:
        raise explained("a group with gloo that is made", error, local) from error


def await_flow(flow: dist.Work, look: Callable[[], None], clock: Clock) -> None:
    """Wait for a collective of gloo's; ``look`` is called meanwhile, and may raise."""
    while True:
        began = time.monotonic()
        try:
            flow.wait(SLICE)
            return
        except RuntimeError:
            # Of gloo's, if it comes before the slice is over: not all works say that they have
            # completed when they have failed.
            if time.monotonic() - began < 0.9 * SLICE.total_seconds():
                raise
        if flow.is_completed():
            flow.wait()  # raises what went wrong
            return
        look()
        if clock.late > GRACE_SECONDS:
            raise TimeoutError("gloo timed out, and does not say so")


class Flow:
    """A message of gloo's under way, that nothing is known of but what gloo says.

    ``other`` is with whom, if that is known. It is not waited for in slices, as gloo ends all of a
    group if a wait for a message ends. ``done`` is not known either: who waits says for how long.
    """

    def __init__(
        self,
        name: str,
        work: Any,
        neighbours: Sequence[Member],
        clock: Clock,
        other: Member | None,
    ) -> None:
        self._name = name
        self._clock = clock
        self._work = work
        self._neighbours = neighbours
        self._other = other
        self._is_over = False

    @classmethod
    def begin(
        cls,
        name: str,
        call: Callable[[], Any],
        neighbours: Sequence[Member],
        clock: Clock,
        other: Member | None,
    ) -> "Flow":
        """Begin what ``call`` begins, and raise what users know if it fails already."""
        try:
            return cls(name, call(), neighbours, clock, other)
        except RuntimeError as error:
            raise explained(name, error, neighbours, other) from error

    @property
    def done(self) -> bool:
        """Would ``wait`` return at once? gloo does not say so of all that would."""
        return self._is_over or bool(self._work.is_completed())

    @property
    def source(self) -> int:
        """Whose message was received."""
        return int(self._work._source_rank())

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for it, for no longer than ``timeout``, and raise what went wrong."""
        left = self._clock.timeout
        try:
            self._work.wait(left if timeout is None else min(timeout, left))
        except RuntimeError as error:
            raise explained(self._name, error, self._neighbours, self._other) from error
        finally:
            self._is_over = True


def explained(
    name: str, error: Exception, neighbours: Sequence[Member], other: Member | None = None
) -> Exception:
    """What gloo has said, as users know it. What has nothing to do with others stays as it is."""
    reason = first_line(error)
    if not is_of_network(reason):
        return error
    suspects = [each for each in neighbours if other is None or each == other]
    patience = time.monotonic() + GRACE_SECONDS
    while True:
        for member in suspects:
            if not is_alive(member):
                return lost(member, name, reason)
        if is_late(reason) or time.monotonic() > patience:
            break
        time.sleep(0.02)
    stopped = [member for member in suspects if is_stopped(member)]
    if is_late(reason) or stopped:  # who gives up first closes its connections to the others
        who = "".join(f" {member.label} is stopped." for member in stopped)
        return DeadlineError(
            f"{name}: the deadline has passed, in the network: {reason}.{who}",
            ranks=[member.rank for member in stopped],
        )
    if other is not None:
        return lost(other, name, reason, how="has closed its connection")
    return FaultError(f"{name} failed in the network: {reason}")


def lost(member: Member, name: str, reason: str, *, how: str = "has ended") -> PeerLostError:
    """``member`` is not there any more, and ``name`` needed it."""
    end = f": {reason}" if reason else "."
    return loss_of(member, f"{member.label} {how} while {name}, waited for it{end}")


def is_of_network(reason: str) -> bool:
    """Is it about other ranks, and not about arguments?"""
    lower = reason.lower()
    return any(word in lower for word in NETWORK)


def is_late(reason: str) -> bool:
    """Is it about time?"""
    return "timed out" in reason.lower() or "timeout" in reason.lower()
