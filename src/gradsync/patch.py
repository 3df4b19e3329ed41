"""Put gradsync in torch's place, for programs that cannot be changed."""

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
    Store,
    _ProcessGroupWrapper,
)

from gradsync.backend.registration import GlooGroup
from gradsync.ddp.wrapper import DistributedDataParallel

_TORCH_CLASS = torch.nn.parallel.distributed.DistributedDataParallel
_TORCH_WRAPPER = c10d._create_process_group_wrapper
_PUBLIC = ("torch.nn.parallel", "torch.nn.parallel.distributed")


def patch_torch(*, backend: bool = False) -> None:
    """Make ``torch.nn.parallel.DistributedDataParallel`` ours, and gloo too with ``backend``.

    Call it before the program's own imports: a module of torch's that has imported the class
    by name is changed too, one of the program's is not. Calling it twice is fine.

    >>> import torch, gradsync
    >>> gradsync.patch_torch()
    >>> torch.nn.parallel.DistributedDataParallel is gradsync.DistributedDataParallel
    True
    >>> gradsync.unpatch_torch()

    With ``backend`` a process group that is made from then on through ``init_process_group`` or
    ``new_group`` with gloo, by name or by default, exchanges its tensors through shared memory. To
    the program it is still a gloo group: ``get_backend`` says so, ``monitored_barrier`` works.

    >>> import torch.distributed as dist
    >>> gradsync.patch_torch(backend=True)
    >>> group = dist.new_group(backend="gloo")
    >>> isinstance(group, gradsync.SharedMemoryGroup), dist.get_backend(group)
    (True, 'gloo')
    >>> gradsync.unpatch_torch()

    CUDA tensors go where the program sends them: ``cpu:gloo,cuda:nccl`` still means NCCL for them.
    """
    _replace(_TORCH_CLASS, DistributedDataParallel)
    if backend:
        _set_gloo(GlooGroup, _wrap_with_real_gloo)


def unpatch_torch() -> None:
    """Undo ``patch_torch``; does nothing if it was not called. Groups stay what they are.

    >>> import torch, gradsync
    >>> gradsync.patch_torch()
    >>> gradsync.unpatch_torch()
    >>> torch.nn.parallel.DistributedDataParallel is gradsync.DistributedDataParallel
    False
    """
    _replace(DistributedDataParallel, _TORCH_CLASS)
    _set_gloo(ProcessGroupGloo, _TORCH_WRAPPER)


def _replace(old: type, new: type) -> None:
    for name, module in list(sys.modules.items()):
        if name == "torch" or name.startswith("torch."):
            for key, value in list(vars(module).items()):
                if value is old:
                    setattr(module, key, new)
    for name in _PUBLIC:
        sys.modules[name].DistributedDataParallel = new  # type: ignore[attr-defined]


def _set_gloo(gloo: Any, wrapper: Any) -> None:
    """Where torch looks when it makes a group; ``torch.distributed.ProcessGroupGloo`` stays."""
    c10d.ProcessGroupGloo = gloo  # type: ignore[misc]
    c10d._create_process_group_wrapper = wrapper


def _wrap_with_real_gloo(
    wrapped_pg: Any,
    store_prefix: str,
    store: Store,
    rank: int,
    world_size: int,
    timeout: timedelta = c10d.default_pg_timeout,
) -> Any:
    """As torch's, which TORCH_DISTRIBUTED_DEBUG=DETAIL calls: it takes no group but gloo's."""
    own = PrefixStore(f"{c10d.PG_WRAPPER_STORE_PREFIX}:{store_prefix}", store)
    helper = ProcessGroupGloo(own, rank, world_size, timeout=timeout)
    return _ProcessGroupWrapper(wrapped_pg, helper)
