"""Which server is slow: noticed by how long the trainer had to wait for it."""

import statistics
import time
import warnings
from collections import deque
from collections.abc import Iterable

_KEPT = 128  # waits of each server
_ENOUGH = 16  # to judge by
_QUIET = 30.0  # seconds between two warnings of one server
_TIMES = 4.0  # as long as for the others


class SlowServerWarning(UserWarning):
    """A server makes the trainer wait much longer than the others do.

    >>> issubclass(SlowServerWarning, UserWarning)
    True
    """


class SlowWatch:
    """Warns of a server whose 95th percentile is above ``threshold`` and far above the others'.

    What a server held back because the step of another trainer was not complete does not count.

    >>> watch = SlowWatch(["server0", "server1"], threshold=0.05)
    >>> watch.record("server0", 0.001)
    >>> watch.p95("server0")
    0.001
    """

    def __init__(self, servers: Iterable[str], *, threshold: float) -> None:
        self._threshold = threshold
        self._waits: dict[str, deque[float]] = {name: deque(maxlen=_KEPT) for name in servers}
        self._warned = {name: float("-inf") for name in self._waits}

    def record(self, server: str, seconds: float) -> None:
        """This long a wait for ``server``."""
        waits = self._waits[server]
        waits.append(seconds)
        if seconds > self._threshold and len(waits) >= _ENOUGH:
            self._judge(server)

    def p95(self, server: str) -> float:
        """The 95th percentile of the last waits, in seconds; 0 if there were none."""
        waits = sorted(self._waits[server])
        return waits[min(len(waits) - 1, int(0.95 * len(waits)))] if waits else 0.0

    def _judge(self, server: str) -> None:
        now, p95 = time.monotonic(), self.p95(server)
        others = [self.p95(name) for name in self._waits if name != server]
        usual = statistics.median(others) if others else 0.0
        if p95 <= max(self._threshold, _TIMES * usual) or now - self._warned[server] < _QUIET:
            return
        self._warned[server] = now
        compared = f"; the others' is {usual * 1e3:.1f} ms" if others else ""
        warnings.warn(
            f"{server} is slow: the 95th percentile of the last {len(self._waits[server])} waits "
            f"for it is {p95 * 1e3:.1f} ms{compared}.",
            SlowServerWarning,
            stacklevel=2,
        )
