"""Hybrid training the plain way, to be raced against: torch's RPC, written by hand.

It is what torch's own benchmark of DDP with parameter servers does: each server has an embedding
table, a batch asks one server after the other and waits for each, distributed autograd takes the
gradients back, and ``DistributedOptimizer`` steps everywhere. Nothing else in gradsync uses this.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed import rpc
from torch.nn.parallel.distributed import DistributedDataParallel

from gradsync.hybrid.rpc import rpc_name, start_rpc, stop_rpc


def server_name(at: int) -> str:
    """Under which a server of the plain way is known to RPC.

    >>> server_name(1)
    'plain1'
    """
    return f"plain{at}"


def serve(at: int, rank: int, world: int, init_method: str) -> None:
    """A server's life: it ends with the trainers.

    >>> callable(serve)
    True
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)
    start_rpc(server_name(at), rank, world, _store(init_method, world))
    stop_rpc(timeout=600.0)


class PlainTrainer:
    """A model whose tables are on ``servers`` servers, and its optimizer.

    >>> callable(PlainTrainer)
    True
    """

    def __init__(
        self, servers: int, embeddings: int, dim: int, classes: int, lr: float, group: Any
    ) -> None:
        self._tables = [
            rpc.remote(
                rpc_name(server_name(at)),
                nn.EmbeddingBag,
                args=(embeddings, dim),
                kwargs={"mode": "sum"},
            )
            for at in range(servers)
        ]
        self._dense = DistributedDataParallel(
            nn.Linear(servers * dim, classes), process_group=group
        )
        parameters = [
            reference
            for table in self._tables
            for reference in rpc.rpc_sync(table.owner(), _parameters, args=(table,))
        ]
        parameters += [rpc.RRef(each) for each in self._dense.parameters()]
        from torch.distributed.optim import DistributedOptimizer  # takes long, warns of TorchScript

        self._optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=lr)
        self._criterion = nn.CrossEntropyLoss()

    def step(self, indices: Tensor, offsets: Tensor, target: Tensor) -> None:
        """Train on one batch."""
        with dist_autograd.context() as context:
            rows = [table.rpc_sync().forward(indices, offsets) for table in self._tables]
            loss = self._criterion(self._dense(torch.cat(rows, dim=1)), target)
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]
            self._optimizer.step(context)


def join(rank: int, world: int, init_method: str) -> None:
    """Start RPC in a trainer.

    >>> callable(join)
    True
    """
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's optimizer uses what it deprecates
    start_rpc(f"plain-trainer{rank}", rank, world, _store(init_method, world))


def leave() -> None:
    """End RPC; all trainers have to.

    >>> callable(leave)
    True
    """
    dist.barrier()
    stop_rpc(timeout=600.0)


def _store(init_method: str, world: int) -> FileStore:
    return FileStore(init_method.removeprefix("file://"), world)


def _parameters(table: Any) -> list[Any]:
    return [rpc.RRef(each) for each in table.local_value().parameters()]
