"""What tests of distributed autograd share: workers that keep their RPC, a model, a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from gradsync.testing import WorkerPool

T = TypeVar("T")

LIMIT = 90.0
RANKS = 3


class RpcPool:
    """Three workers that keep their RPC from test to test; after a failure three new ones."""

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None

    def run(self, fn: Callable[..., T]) -> list[T]:
        self._pool = self._pool or WorkerPool(max_ranks=RANKS, preload=["torch._dynamo"])
        try:
            return self._pool.run(fn, ranks=RANKS, timeout=LIMIT)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


@pytest.fixture(scope="module")
def pool(nothing_left_behind: None) -> Iterator[RpcPool]:
    workers = RpcPool()
    yield workers
    workers.close()


def mlp(width: int = 4, hidden: int = 8) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, 2))


def assert_close(left: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> None:
    """For two steps of one module: in between its buckets change, and the order of the sums."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name])
