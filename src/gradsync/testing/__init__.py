"""Tools to test distributed training: worker processes, parity checks, counters, faults."""

from gradsync.testing.counters import Collective, CollectiveCounter, count_collectives
from gradsync.testing.faults import Fault, FaultHandle, InjectedFault, fail_at
from gradsync.testing.outcome import Outcome, RankFailure, WorkerError
from gradsync.testing.parity import ParityTraces, assert_traces_equal, check_parity
from gradsync.testing.pool import WorkerPool
from gradsync.testing.scenario import (
    Scenario,
    Trace,
    mse_loss,
    sgd_with_momentum,
    train,
    train_single,
)

__all__ = [
    "Collective",
    "CollectiveCounter",
    "Fault",
    "FaultHandle",
    "InjectedFault",
    "Outcome",
    "ParityTraces",
    "RankFailure",
    "Scenario",
    "Trace",
    "WorkerError",
    "WorkerPool",
    "assert_traces_equal",
    "check_parity",
    "count_collectives",
    "fail_at",
    "mse_loss",
    "sgd_with_momentum",
    "train",
    "train_single",
]
