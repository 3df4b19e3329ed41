"""Put gradsync in torch's place, for programs that cannot be changed."""

import sys

import torch

from gradsync.ddp.wrapper import DistributedDataParallel

_TORCH_CLASS = torch.nn.parallel.distributed.DistributedDataParallel
_PUBLIC = ("torch.nn.parallel", "torch.nn.parallel.distributed")


def patch_torch() -> None:
    """Make ``torch.nn.parallel.DistributedDataParallel`` ours.

    Call it before the program's own imports: a module of torch's that has imported the class
    by name is changed too, one of the program's is not. Calling it twice is fine.

    >>> import torch, gradsync
    >>> gradsync.patch_torch()
    >>> torch.nn.parallel.DistributedDataParallel is gradsync.DistributedDataParallel
    True
    >>> gradsync.unpatch_torch()
    """
    _replace(_TORCH_CLASS, DistributedDataParallel)


def unpatch_torch() -> None:
    """Undo ``patch_torch``; does nothing if it was not called.

    >>> import torch, gradsync
    >>> gradsync.patch_torch()
    >>> gradsync.unpatch_torch()
    >>> torch.nn.parallel.DistributedDataParallel is gradsync.DistributedDataParallel
    False
    """
    _replace(DistributedDataParallel, _TORCH_CLASS)


def _replace(old: type, new: type) -> None:
    for name, module in list(sys.modules.items()):
        if name == "torch" or name.startswith("torch."):
            for key, value in list(vars(module).items()):
                if value is old:
                    setattr(module, key, new)
    for name in _PUBLIC:
        sys.modules[name].DistributedDataParallel = new  # type: ignore[attr-defined]
