"""Gradient compression: communication hooks for ``DistributedDataParallel``.

A hook is an object that is callable and holds its own state::

    hook = gradsync.hooks.Int8()
    ddp.register_comm_hook(None, hook)

They work on gradsync's class and on torch's. What each one costs and saves: docs/hooks.md.
"""

from gradsync.hooks.base import Hook, Round
from gradsync.hooks.cast import BF16, FP16
from gradsync.hooks.int8 import Int8
from gradsync.hooks.power_sgd import PowerSGD
from gradsync.hooks.registry import by_name, names
from gradsync.hooks.topk import TopK

__all__ = ["BF16", "FP16", "Hook", "Int8", "PowerSGD", "Round", "TopK", "by_name", "names"]
