"""What Dynamo, the front end of ``torch.compile``, has to know of us.

[Note: Dynamo and our frames] A compiled program runs through our frames: the forward of the
wrapper, the hooks that autograd calls. Dynamo has to leave those as they are and compile what
they call, the user's module. So it gets our files as ones to skip, as it has torch's own.
``traced.py`` is the exception.

[Note: split graphs] A compiled backward is one node of autograd, and all its gradients come at
its end: nothing could be reduced meanwhile. So Dynamo splits the graph of a module that runs
inside a DDP about where its buckets end. It asks torch's class which DDP that is, and reads one
attribute of it.
"""

import functools
import pkgutil
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from gradsync import ddp as package

TRACED = "traced"


@dataclass(frozen=True)
class SplitSize:
    """All that Dynamo reads of a DDP: the bytes of parameters that make a graph."""

    bucket_bytes_cap: int


def split_size(bucket_bytes_cap: int) -> SplitSize:
    """For buckets of that size. Dynamo takes nothing below torch's first bucket."""
    least: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    return SplitSize(max(bucket_bytes_cap, least))


@functools.cache
def skip_our_frames() -> None:
    """See [Note: Dynamo and our frames]."""
    from torch._dynamo import trace_rules  # takes a second, and optimizers import it anyway

    for each in pkgutil.iter_modules(package.__path__):
        if each.name != TRACED:
            trace_rules.add(f"{package.__name__}.{each.name}")
    trace_rules.add("gradsync.hooks")  # called by our hooks, in the backward of a compiled step


class Active:
    """Stands in torch's class for good, and is true while a module of ours runs.

    To set an attribute of a class costs more than it seems: Python forgets all that it has learned
    of the class and its subclasses. So it is not done at every forward.
    """

    __slots__ = ("bucket_bytes_cap", "splits")

    def __init__(self) -> None:
        self.splits: SplitSize | None = None
        # Of the last module that ran: with several threads it may have ended before this is asked.
        self.bucket_bytes_cap = 0

    def __bool__(self) -> bool:
        return self.splits is not None


ACTIVE = Active()
_torchs_class: Any = TorchDDP


class CompiledFor:
    """Inside, graphs are split: see [Note: split graphs]."""

    __slots__ = ("_outer", "_splits", "_torchs")

    def __init__(self, splits: SplitSize) -> None:
        self._splits = splits

    def __enter__(self) -> None:
        ACTIVE.bucket_bytes_cap = self._splits.bucket_bytes_cap
        self._outer, ACTIVE.splits = ACTIVE.splits, self._splits
        self._torchs = _torchs_class._active_ddp_module
        if self._torchs is not ACTIVE:
            _torchs_class._active_ddp_module = ACTIVE

    def __exit__(self, *_error: object) -> None:
        ACTIVE.splits = self._outer
        if self._outer is not None:
            ACTIVE.bucket_bytes_cap = self._outer.bucket_bytes_cap
        if self._torchs is not ACTIVE and self._torchs is not None:  # a DDP of torch's, around us
            _torchs_class._active_ddp_module = self._torchs
