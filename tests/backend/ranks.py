"""Runs on groups of the gradsync backend, for several test files."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from gradsync.testing import WorkerPool

LIMIT = 60.0


def run(pool: WorkerPool, fn: Callable[..., object], ranks: int = 2, **options: object) -> list:
    return pool.run(fn, ranks=ranks, backend="gradsync", timeout=LIMIT, **options)


def raised(call: Callable[[], object], kind: type[BaseException] = Exception) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"nothing was raised, {kind.__name__} was expected")


def still_works(rank: int, world: int, group: dist.ProcessGroup | None = None) -> None:
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((3,), world * (world + 1) / 2))
