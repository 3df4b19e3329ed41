"""The results of a run as one plain struct. files.py writes and reads it as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, Final

from gradsync.bench.stats import median, percentile

SCHEMA: Final = "gradsync.bench"
SCHEMA_VERSION: Final = 1

BENCH: Final = "bench"
BENCH_COMM: Final = "bench-comm"
BENCH_HYBRID: Final = "bench-hybrid"

RUNNING: Final = "running"  # the file of a run that goes on, or was killed
COMPLETE: Final = "complete"
INTERRUPTED: Final = "interrupted"

NO_DDP: Final = "none"
TORCH: Final = "torch"
PERCENTS: Final = (50, 75, 90, 95)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The mean step of one rank, in seconds; the optimizer's part is not in it.

    The forward begins at 0 and the backward follows it. Communication ends ``exposed`` seconds
    after the backward has computed its last gradient.

    >>> times = Timeline(rank=0, forward=1.0, backward=2.0, communication=1.5, exposed=0.5)
    >>> times.compute, times.communication_began, times.ended
    (3.0, 2.0, 3.5)
    """

    rank: int
    forward: float
    backward: float
    communication: float
    exposed: float

    @property
    def compute(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward

    @property
    def ended(self) -> float:
        """When the last gradient had arrived."""
        return self.compute + self.exposed

    @property
    def communication_began(self) -> float:
        """When the first bucket was launched."""
        return self.ended - self.communication


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload under one implementation on so many ranks: what was set, and what was measured.

    >>> case = Case(
    ...     model="mlp", batch_size=8, ranks=(0, 1), implementation="gradsync", backend="gloo",
    ...     measurements=(1.0, 2.0, 3.0, 3.0, 2.0, 1.0), steps_by_round=(2, 1),
    ... )
    >>> case.by_rank()
    ((1.0, 2.0, 3.0), (3.0, 2.0, 1.0))
    >>> case.by_round()
    ((1.0, 2.0, 3.0, 2.0), (3.0, 1.0))
    >>> case.seconds(50), case.examples_per_second(50)
    (2.0, 8.0)
    """

    # What was set. The fields of a series come first, see `Case.series`.
    model: str
    batch_size: int  # of one rank
    implementation: str  # none, torch, torch-tuned, gradsync, gradsync-tuned
    backend: str | None = None  # of the process group; None without DDP
    dtype: str = "float32"
    comm_hook: str | None = None
    bucket_cap_mb: float | None = None  # None without DDP
    seed: int | None = None
    threads: int | None = None  # of each rank
    ranks: tuple[int, ...]

    # What was measured.
    measurements: tuple[float, ...] = ()  # seconds of each step: all of the first rank, then on
    steps_by_round: tuple[int, ...] = ()  # of each rank; empty: no rounds (torch's files)
    steps_by_rank: tuple[int, ...] = ()  # empty: all have the same; who has fewer lacks the last
    parameters: int | None = None  # elements
    peak_memory: tuple[int, ...] = ()  # bytes, one value a rank, beyond what was there before
    timelines: tuple[Timeline, ...] = ()  # one a rank, where the implementation tells
    complete: bool = True  # False: stopped before its last round
    error: str | None = None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def series(self) -> tuple[Any, ...]:
        """All settings but the ranks: what one curve of a plot has in common."""
        return tuple(getattr(self, name) for name in SERIES)

    @property
    def label(self) -> str:
        """Short, for people: ``gradsync/gloo``."""
        parts = [self.implementation, self.backend, self.comm_hook]
        return "/".join(part for part in parts if part)

    @property
    def exposed(self) -> float | None:
        """Communication that was not hidden behind computing: seconds a step, mean of the ranks."""
        if not self.timelines:
            return None
        return sum(timeline.exposed for timeline in self.timelines) / len(self.timelines)

    def seconds(self, percent: float) -> float:
        """A percentile of the seconds of a step, over all ranks."""
        return percentile(self.measurements, percent)

    def examples_per_second(self, percent: float = 50) -> float:
        """Of all ranks together. torch's scripts print those of one rank: divide by ``world``."""
        return self.batch_size * self.world / self.seconds(percent)

    def by_rank(self) -> tuple[tuple[float, ...], ...]:
        """The measurements of each rank, in the order of the steps."""
        even = (len(self.measurements) // max(self.world, 1),) * self.world
        ends = list(accumulate(self.steps_by_rank or even))
        return tuple(
            self.measurements[start:end] for start, end in zip([0, *ends], ends, strict=False)
        )

    def by_round(self) -> tuple[tuple[float, ...], ...]:
        """The measurements of each round, all ranks; without rounds, those of each step."""
        ranks = self.by_rank()
        steps = max((len(rank) for rank in ranks), default=0)
        ends = list(accumulate(self.steps_by_round)) or list(range(1, steps + 1))
        return tuple(
            tuple(value for rank in ranks for value in rank[start:end])
            for start, end in zip([0, *ends], ends, strict=False)
        )


@dataclass(frozen=True, kw_only=True)
class CommCase:
    """One collective of one size on one backend. Bandwidths are as nccl-tests define them.

    >>> case = CommCase(
    ...     collective="all_reduce", bytes=1000, backend="gloo", world=4, seconds=(1e-6,)
    ... )
    >>> case.algbw, case.busbw  # GB a second
    (1.0, 1.5)
    """

    collective: str
    bytes: int  # as nccl-tests count them: of the larger of input and output
    backend: str
    world: int
    dtype: str = "float32"
    seconds: tuple[float, ...] = ()  # of one call on the slowest rank, one value a round
    repetitions: int | None = None  # calls in a round
    correct: bool | None = None  # was the result checked, and right?
    complete: bool = True
    error: str | None = None

    @property
    def algbw(self) -> float:
        """Bytes / median time, in GB a second."""
        return self.bytes / median(self.seconds) / 1e9

    @property
    def busbw(self) -> float:
        """What a link has to carry: algbw times the collective's factor."""
        return self.algbw * bus_factor(self.collective, self.world)

    @property
    def label(self) -> str:
        """Short, for people: ``all_reduce/gloo``."""
        return f"{self.collective}/{self.backend}"

    def by_round(self) -> tuple[tuple[float, ...], ...]:
        """One value a round, as blocks for the statistics."""
        return tuple((value,) for value in self.seconds)


@dataclass(kw_only=True)
class Result:
    """All that one run has to say; ``files.write`` and ``files.read`` are its file.

    >>> case = Case(model="mlp", batch_size=8, ranks=(0, 1), implementation="torch", error="lost")
    >>> [case.label for case in Result(cases=[case]).failed]
    ['torch']
    """

    kind: str = BENCH  # bench, bench-comm, bench-hybrid; torch's files are bench
    schema_version: int | None = SCHEMA_VERSION  # None: written by torch's benchmark.py
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    command: str = ""
    status: str = COMPLETE  # running, complete, interrupted
    pytorch_version: str | None = None
    cuda_version: str | None = None
    distributed_backend: str | None = None  # as in torch's files; several: with commas
    bucket_size: float | None = None  # MB, as in torch's files
    header: dict[str, Any] = field(default_factory=dict)  # facts about the machine, see machine.py
    notes: list[str] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    comm_cases: list[CommCase] = field(default_factory=list)

    @property
    def failed(self) -> list[Case | CommCase]:
        """The cases with an error, whether they measured something before or not."""
        every: list[Case | CommCase] = [*self.cases, *self.comm_cases]
        return [case for case in every if case.error is not None]


SERIES: Final = (
    "model", "batch_size", "implementation", "backend", "dtype", "comm_hook", "bucket_cap_mb",
    "seed", "threads",
)  # fmt: skip


def bus_factor(collective: str, world: int) -> float:
    """busbw / algbw, as nccl-tests' PERFORMANCE.md has it.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    share = (world - 1) / world
    if collective == "all_reduce":
        return 2 * share
    return share if collective in ("all_gather", "reduce_scatter", "all_to_all") else 1.0
