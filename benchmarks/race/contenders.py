"""Who races: how each contender wraps a model, and the one training step that all of them run."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from race.hooks import HOOKS
from race.workloads import LEARNING_RATE, Batch, Workload

TUNED = {"gradient_as_bucket_view": True, "static_graph": True, "batched_grad_copy": True}
VIEWS = {"gradient_as_bucket_view": True}


@dataclass(frozen=True, kw_only=True)
class Contender:
    name: str
    module: str | None = None  # where its DistributedDataParallel lives; None: no DDP
    options: dict[str, Any] = field(default_factory=dict)
    backend: str | None = None  # of its process group; None: the launch's own
    hook: Callable[[], tuple[object, Any]] | None = None  # makes the state and the hook
    rival: str | None = None  # whom to compare it with; None: the better variant of torch

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.module is None:
            return model
        ddp = importlib.import_module(self.module).DistributedDataParallel
        group = None if self.backend is None else _group(self.backend)
        wrapped: nn.Module = ddp(model, process_group=group, **self.options)
        if self.hook is not None:
            wrapped.register_comm_hook(*self.hook())
        return wrapped

    def why_absent(self) -> str | None:
        """Why it cannot race here, or None when it can."""
        if self.module is None:
            return None
        try:
            importlib.import_module(self.module).DistributedDataParallel  # noqa: B018
        except (ImportError, AttributeError) as error:
            return f"{self.name} does not race: {error}"
        return None


@functools.cache
def _group(backend: str) -> dist.ProcessGroup:
    importlib.import_module("gradsync")  # makes its backend known
    return dist.new_group(backend=backend)


def hook_contenders() -> list[Contender]:
    """Torch's hooks on torch's class; ours on torch's class, where only the hook differs, and
    on gradsync's, which is what a user gets.
    """
    contenders = [
        Contender(
            name=f"torch-{pair.torch_name}",
            module="torch.nn.parallel",
            options=pair.torch_options,
            hook=pair.torchs,
        )
        for pair in HOOKS
        if pair.torchs is not None
    ]
    for pair in HOOKS:
        for suffix, module in (("@torch", "torch.nn.parallel"), ("", "gradsync")):
            contenders.append(
                Contender(
                    name=f"gradsync-{pair.name}{suffix}",
                    module=module,
                    hook=pair.ours,
                    rival=f"torch-{pair.torch_name}",
                )
            )
    return contenders


CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(name="local"),
        Contender(name="torch", module="torch.nn.parallel"),
        Contender(name="torch-tuned", module="torch.nn.parallel", options=TUNED),
        Contender(name="gradsync", module="gradsync"),
        Contender(name="gradsync-tuned", module="gradsync", options=TUNED),
        Contender(name="gradsync-shm", module="gradsync", backend="gradsync"),
        Contender(name="gradsync-shm-tuned", module="gradsync", options=TUNED, backend="gradsync"),
        Contender(name="torch-views", module="torch.nn.parallel", options=VIEWS),
        Contender(name="gradsync-views", module="gradsync", options=VIEWS),
        *hook_contenders(),
    )
}
RACERS = ("local", "torch", "torch-tuned", "gradsync", "gradsync-tuned")
SHARED_MEMORY_RACERS = (
    "local", "torch", "torch-tuned", "gradsync-shm", "gradsync-shm-tuned",
)  # fmt: skip
MEMORY_RACERS = ("local", "torch-views", "gradsync-views")
HOOK_RACERS = ("local", *(contender.name for contender in hook_contenders()))


class Training:
    """One contender's own model, optimizer and place in the cycle of batches."""

    def __init__(self, contender: Contender, workload: Workload, batches: list[Batch]) -> None:
        self.contender = contender
        self.model = contender.wrap(workload.model())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self._next_batch: Callable[[], Batch] = itertools.cycle(batches).__next__

    def run(self, steps: int) -> None:
        for _ in range(steps):
            inputs, targets = self._next_batch()
            self.optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(self.model(inputs), targets).backward()
            self.optimizer.step()
