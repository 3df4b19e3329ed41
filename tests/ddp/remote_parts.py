"""What tests of distributed autograd run in other processes: RPC finds it by its module's name.

Test functions travel by value, so they import this file inside their body.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc

import gradsync

_seeding = threading.Lock()  # several threads serve calls, and the seed is global


@contextmanager
def workers(rank: int, world: int) -> Iterator[None]:
    """RPC between the ranks of a test, under the names w0, w1 …

    It is started once in a process and never ended: torch's references to remote values hold on
    to the first agent for ever.
    """
    if not rpc._is_current_rpc_agent_set():
        _start(rank, world)
    dist.barrier()
    yield
    dist.barrier()


def _start(rank: int, world: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=os.environ["GRADSYNC_INIT_METHOD"], rpc_timeout=30
    )
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world, rpc_backend_options=options)


def layer(inputs: int, outputs: int, seed: int) -> nn.Linear:
    with _seeding:
        torch.manual_seed(seed)
        return nn.Linear(inputs, outputs)


class Table(nn.Module):
    """An embedding that takes what it is given, on whatever process it is."""

    def __init__(self, rows: int, width: int, sparse: bool = False) -> None:
        super().__init__()
        with _seeding:
            torch.manual_seed(3)
            self.rows = nn.Embedding(rows, width, sparse=sparse)

    def forward(self, words: Tensor) -> Tensor:
        return self.rows(words)


def replica(group_ranks: list[int], kind: str = "ours") -> nn.Module:
    """A DDP that lives where it is called, for callers elsewhere."""
    cls = (
        gradsync.DistributedDataParallel if kind == "ours" else nn.parallel.DistributedDataParallel
    )
    group = dist.new_group(group_ranks, use_local_synchronization=True)
    return cls(layer(4, 2, seed=5), process_group=group)


def call(rref: rpc.RRef, *args: Any) -> Any:
    return rref.local_value()(*args)


def gradients_of(rref: rpc.RRef, context: int) -> list[Tensor]:
    found = dist_autograd.get_gradients(context)
    return [found[p] for p in rref.local_value().parameters()]


def gradients(module: nn.Module, context: int) -> dict[str, Tensor | None]:
    """Those in a context, by the names of the module's parameters."""
    found = dist_autograd.get_gradients(context)
    return {name: found[p].clone() if p in found else None for name, p in module.named_parameters()}


def step(module: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor | None]:
    """The gradients of one backward under distributed autograd."""
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [loss()])
        return gradients(module, context)
