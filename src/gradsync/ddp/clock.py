"""When the phases of a step began and ended.

The clock always runs: it is read a handful of times a step, about a microsecond in all, whatever
the size of the model.
"""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Seconds that the phases of a step took on this rank.

    ``forward`` is that of all forwards since the last step. ``communication`` is from the launch of
    the first bucket to the arrival of the last; ``exposed`` is that part of it for which the
    backward had nothing left to compute.

    >>> StepTimes(communication=3.0, exposed=1.0).overlapped
    2.0
    """

    forward: float = 0.0
    backward: float = 0.0  # computing
    communication: float = 0.0
    exposed: float = 0.0

    @property
    def overlapped(self) -> float:
        """Communication that was hidden behind the computing."""
        return self.communication - self.exposed


@dataclass(frozen=True)
class Sample:
    """The clock at the beginning of a forward: for torch's logging data."""

    iteration: int
    marks: dict[str, float]
    last: StepTimes
    mean: StepTimes


class StepClock:
    """Takes the times of one step after the other; all marks are of ``time.perf_counter``."""

    def __init__(self) -> None:
        self.forward_began = 0.0
        self.forward_ended = 0.0
        self.backward_began = 0.0
        self.launched = 0.0  # the first bucket
        self.computed = 0.0  # the last gradient
        self.reduced = 0.0  # the last bucket
        self.steps = 0
        self.sample_rate = 100  # every so many steps, after the first ten
        self.sample = Sample(0, {}, StepTimes(), StepTimes())
        # Forward, backward, communication, exposed: made into StepTimes when asked for.
        self._last = (0.0, 0.0, 0.0, 0.0)
        self._sums = (0.0, 0.0, 0.0, 0.0)
        self._earlier_forwards = 0.0  # seconds; a step may have several

    now = staticmethod(time.perf_counter)

    @property
    def last(self) -> StepTimes:
        """Of the last step."""
        return StepTimes(*self._last)

    @property
    def mean(self) -> StepTimes:
        """Over all steps so far."""
        return StepTimes(*(total / max(self.steps, 1) for total in self._sums))

    def begin_forward(self) -> None:
        """A forward begins whose gradients will be reduced."""
        if self.steps <= 10 or self.steps % self.sample_rate == 0:
            marks = {
                "forward_compute_time_start": self.forward_began,
                "backward_compute_time_start": self.backward_began,
                "backward_comm_time_start": self.launched,
                "backward_compute_time_end": self.computed,
                "backward_comm_time_end": self.reduced,
            }
            self.sample = Sample(self.steps, marks, self.last, self.mean)
        self._earlier_forwards += self.forward_ended - self.forward_began
        self.forward_began = self.forward_ended = self.now()

    def begin_backward(self) -> None:
        """A backward begins that will be reduced."""
        self.launched = 0.0
        self.backward_began = self.now()

    def launch(self) -> None:
        """A bucket is launched: the first one counts."""
        if not self.launched:
            self.launched = self.now()

    def end_step(self) -> None:
        """A step was reduced: add it up."""
        self.launched = launched = self.launched or self.computed
        forward = self._earlier_forwards + self.forward_ended - self.forward_began
        backward = self.computed - self.backward_began
        communication = self.reduced - launched
        exposed = self.reduced - (self.computed if self.computed > launched else launched)
        self._last = (forward, backward, communication, exposed)
        sums = self._sums
        self._sums = (
            sums[0] + forward, sums[1] + backward, sums[2] + communication, sums[3] + exposed,
        )  # fmt: skip
        self._earlier_forwards, self.forward_ended = 0.0, self.forward_began
        self.steps += 1
