"""gradsync: data-parallel training for PyTorch.

    from gradsync import DistributedDataParallel as DDP

is the one line to change in a program that uses ``torch.nn.parallel.DistributedDataParallel``.
"""

from gradsync import hooks
from gradsync.backend import registration as _backend
from gradsync.backend.process_group import SharedMemoryGroup
from gradsync.backend.shared_memory import PersistentReduction
from gradsync.ddp.clock import StepTimes
from gradsync.ddp.mixed_precision import MixedPrecision
from gradsync.ddp.stats import Stats
from gradsync.ddp.wrapper import DistributedDataParallel
from gradsync.errors import (
    AbortedError,
    ArgumentError,
    CollectiveError,
    CollectiveMismatchError,
    DeadlineError,
    FaultError,
    GradsyncError,
    GraphChangedError,
    HookTypeError,
    ModelMismatchError,
    PeerLostError,
    PeerStepError,
    ReadyTwiceError,
    StateError,
    UnusedParametersError,
    UsageError,
)
from gradsync.patch import patch_torch, unpatch_torch
from gradsync.sync_batchnorm import SyncBatchNorm

DDP = DistributedDataParallel
_backend.register()

__version__ = "0.1.0"

__all__ = [
    "DDP",
    "AbortedError",
    "ArgumentError",
    "CollectiveError",
    "CollectiveMismatchError",
    "DeadlineError",
    "DistributedDataParallel",
    "FaultError",
    "GradsyncError",
    "GraphChangedError",
    "HookTypeError",
    "MixedPrecision",
    "ModelMismatchError",
    "PeerLostError",
    "PeerStepError",
    "PersistentReduction",
    "ReadyTwiceError",
    "SharedMemoryGroup",
    "StateError",
    "Stats",
    "StepTimes",
    "SyncBatchNorm",
    "UnusedParametersError",
    "UsageError",
    "hooks",
    "patch_torch",
    "unpatch_torch",
]
