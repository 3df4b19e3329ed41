"""Tools to test distributed training: worker processes, parity checks, counters, faults."""

from gradsync.testing.outcome import Outcome, RankFailure, WorkerError
from gradsync.testing.pool import WorkerPool

__all__ = [
    "Outcome",
    "RankFailure",
    "WorkerError",
    "WorkerPool",
]
