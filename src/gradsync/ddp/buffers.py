"""Module buffers: which there are, and making them those of one rank."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from gradsync.ddp.collectives import Broadcaster


def named_buffers(module: nn.Module, ignored: Collection[str]) -> dict[str, Tensor]:
    """The buffers of ``module`` that DDP looks after, by name."""
    return {name: b for name, b in module.named_buffers() if name not in ignored}


def list_buffers(module: nn.Module, ignored: Collection[str]) -> list[Tensor]:
    """The same without the names, and much faster.

    Programs may replace buffers at any time, so they are listed anew before each forward.
    """
    if ignored:
        return list(named_buffers(module, ignored).values())
    found: dict[Tensor, None] = {}
    seen: set[nn.Module] = set()
    stack = [module]
    while stack:
        submodule = stack.pop()
        if submodule not in seen:
            seen.add(submodule)
            for buffer in submodule._buffers.values():
                if buffer is not None:
                    found[buffer] = None
            stack.extend(child for child in submodule._modules.values() if child is not None)
    return list(found)


@dataclass(frozen=True)
class BufferHook:
    """A function of the user's that makes the buffers equal, in place of the broadcast."""

    hook: Callable[[Any, dict[str, Tensor]], Any]
    state: object
    before_forward: bool

    def run(self, buffers: dict[str, Tensor]) -> list[Any]:
        """Call it; what it returns has to be waited for at the end of the backward."""
        with torch.no_grad():
            return list(self.hook(self.state, buffers) or ())


class BufferSync:
    """Sets buffers to those of one rank, before each forward that asks for it."""

    def __init__(self) -> None:
        self._broadcaster = Broadcaster()

    def run(
        self,
        group: dist.ProcessGroup,
        buffers: list[Tensor],
        source: int,
        describe: Callable[[], str],
    ) -> None:
        """Overwrite ``buffers`` with those of rank ``source``.

        Autograd is not told: a graph of an earlier forward that has saved a buffer stays usable,
        so that two forwards may come before one backward.
        """
        with _unsafe_preserve_version_counter(tuple(buffers)):
            self._broadcaster.run(group, buffers, source, describe)
