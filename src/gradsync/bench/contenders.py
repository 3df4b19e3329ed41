"""Who takes turns: how each implementation wraps a model, and the one step that all of them run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.bench.result import NO_DDP, TORCH, Timeline
from gradsync.bench.workloads import Benchmark

TUNED: Final = {"gradient_as_bucket_view": True, "static_graph": True, "batched_grad_copy": True}
IMPLEMENTATIONS: Final[dict[str, tuple[type[Any] | None, dict[str, Any]]]] = {
    TORCH: (torch.nn.parallel.DistributedDataParallel, {}),
    "torch-tuned": (torch.nn.parallel.DistributedDataParallel, TUNED),
    "gradsync": (gradsync.DistributedDataParallel, {}),
    "gradsync-tuned": (gradsync.DistributedDataParallel, TUNED),
    NO_DDP: (None, {}),
}
DEFAULT: Final = ("torch", "torch-tuned", "gradsync", NO_DDP)
DTYPES: Final = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
BATCHES: Final = 4  # they come round again

Batch = tuple[tuple[Any, ...], Any]  # inputs, target


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An implementation on a backend.

    >>> Contender(implementation="gradsync", backend="gloo").label
    'gradsync/gloo'
    """

    implementation: str
    backend: str | None = None  # None: no DDP

    @property
    def label(self) -> str:
        """Short, for people."""
        return (
            self.implementation if self.backend is None else f"{self.implementation}/{self.backend}"
        )

    def wrap(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        *,
        bucket_cap_mb: float | None = None,
        comm_hook: str | None = None,
    ) -> nn.Module:
        """The model under this implementation; hooks are gradsync's on both classes."""
        ddp, options = IMPLEMENTATIONS[self.implementation]
        if ddp is None:
            return model
        known = signature(ddp.__init__).parameters  # an older torch has fewer options
        options = {name: value for name, value in options.items() if name in known}
        device = next(model.parameters()).device
        wrapped: Any = ddp(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=group,
            bucket_cap_mb=bucket_cap_mb,
            **options,
        )
        if comm_hook is not None:
            hook = gradsync.hooks.by_name(comm_hook, process_group=group)
            wrapped.register_comm_hook(None, hook)
        module: nn.Module = wrapped
        return module


def make_batches(benchmark: Benchmark, dtype: torch.dtype, seed: int) -> list[Batch]:
    """This rank's data: the same for all contenders."""
    torch.manual_seed(seed)
    return [
        (
            tuple(_cast(each, dtype) for each in benchmark.generate_inputs()),
            _cast(benchmark.generate_target(), dtype),
        )
        for _ in range(BATCHES)
    ]


class Training:
    """One contender's own model, optimizer and place in the cycle of batches.

    ``model`` is the module itself, ``wrapped`` what is called.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        wrap: Callable[[nn.Module], nn.Module],
        batches: Sequence[Batch],
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.model = benchmark.create_model().to(dtype)
        self.wrapped = wrap(self.model)
        self.optimizer = benchmark.create_optimizer(self.wrapped)
        self.loss = benchmark.loss
        self.next_batch: Callable[[], Batch] = itertools.cycle(batches).__next__
        is_cuda = next(self.model.parameters()).is_cuda
        self.synchronize: Callable[[], None] | None = torch.cuda.synchronize if is_cuda else None

    def run(self, steps: int) -> list[float]:
        """So many steps; the seconds that each took.

        Beyond the bare loop a step reads the clock once and appends to a list, nothing else:
        tests/bench/test_contenders.py counts.
        """
        wrapped, loss, next_batch = self.wrapped, self.loss, self.next_batch
        zero_grad, step, synchronize = (
            self.optimizer.zero_grad,
            self.optimizer.step,
            self.synchronize,
        )
        now = time.perf_counter
        stamps = [now()]
        for _ in range(steps):
            inputs, target = next_batch()
            zero_grad(set_to_none=True)
            loss(wrapped(*inputs), target).backward()
            step()
            if synchronize is not None:
                synchronize()
            stamps.append(now())
        return [end - start for start, end in itertools.pairwise(stamps)]

    def watch(self, rank: int, steps: int) -> Timeline | None:
        """So many steps, taken apart: the mean of what the implementation says of each."""
        seen = [each for _ in range(steps) if (each := self._watch_step()) is not None]
        if not seen:
            return None
        forward, backward, communication, exposed = (
            sum(column) / len(seen) for column in zip(*seen, strict=True)
        )
        return Timeline(
            rank=rank,
            forward=forward,
            backward=backward,
            communication=communication,
            exposed=exposed,
        )

    def _watch_step(self) -> tuple[float, float, float, float] | None:
        if isinstance(self.wrapped, gradsync.DistributedDataParallel):
            self.run(1)
            last = self.wrapped.stats().last
            return last.forward, last.backward, last.communication, last.exposed
        if isinstance(self.wrapped, torch.nn.parallel.DistributedDataParallel):
            return self._watch_torch()
        inputs, target = self.next_batch()
        self.optimizer.zero_grad(set_to_none=True)
        began = time.perf_counter()
        loss = self.loss(self.wrapped(*inputs), target)
        between = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        self.optimizer.step()
        return between - began, ended - between, 0.0, 0.0

    def _watch_torch(self) -> tuple[float, float, float, float] | None:
        """From torch's own logging data, which it samples; here at each step. Nanoseconds."""
        ddp: Any = self.wrapped
        ddp._set_ddp_runtime_logging_sample_rate(1)
        self.run(1)
        # The data are those of the step before, and come with the next forward.
        data = ddp._get_ddp_logging_data()
        keys = ("forward_compute_time", "backward_compute_time", "backward_comm_time")
        values = [data.get(key) for key in (*keys, "backward_compute_comm_overlap_time")]
        if any(value is None for value in values):
            return None
        forward, backward, communication, overlap = (max(int(value), 0) / 1e9 for value in values)
        return forward, backward, communication, max(communication - overlap, 0.0)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_floating else value
