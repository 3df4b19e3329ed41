"""Hybrid training in the two styles that ``gradsync bench hybrid`` races.

The model is that of torch's own benchmark of DDP with parameter servers: on each server a table of
``embeddings`` × ``embedding_dim``, looked up with the same indices, and a linear layer on all of
their outputs, under DDP. An epoch is ten batches.

Ours is `gradsync.hybrid`. The plain way is what torch's script does by hand: a batch asks one
server after the other by RPC and waits for each, distributed autograd takes the gradients back,
and ``DistributedOptimizer`` steps everywhere.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed import rpc
from torch.nn.parallel.distributed import DistributedDataParallel

import gradsync
from gradsync import hybrid
from gradsync.hybrid.rpc import rpc_name, start_rpc, stop_rpc

CLASSES: Final = 8
BATCHES: Final = 10  # an epoch
BAGS: Final = 7  # of a batch as torch's script draws it, on average
LR: Final = 0.05
PATIENCE: Final = 600.0  # seconds: the other style may take a long turn
_DIE_WITH_PARENT: Final = 1  # prctl's PR_SET_PDEATHSIG
_PIECE: Final = 500  # times in one report

Batch = tuple[Tensor, Tensor, Tensor]  # indices, offsets, target


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What both styles train, and where the plain one meets.

    >>> Shape(trainers=2, servers=4, embeddings=300, embedding_dim=16).width
    64
    """

    trainers: int
    servers: int
    embeddings: int
    embedding_dim: int
    batch_size: int | None = None  # bags; None: as torch's script draws them
    seed: int = 0
    threads: int = 1
    meeting: str = ""  # a file

    @property
    def width(self) -> int:
        """Of all tables together."""
        return self.servers * self.embedding_dim

    @property
    def examples(self) -> int:
        """Of an epoch of one trainer, on average."""
        return BATCHES * (BAGS if self.batch_size is None else self.batch_size)

    @property
    def parameters(self) -> int:
        """Elements on the servers and of the linear layer."""
        return self.width * self.embeddings + (self.width + 1) * CLASSES


def batches(numbers: random.Random, embeddings: int, size: int | None = None) -> Iterator[Batch]:
    """An epoch: bags of 1 to 10 indices, each with a class.

    A batch has ``size`` bags, or as many as 20 to 50 indices make.

    >>> len(list(batches(random.Random(0), 300)))
    10
    """
    generator = torch.Generator().manual_seed(numbers.randrange(2**31))
    for _ in range(BATCHES):
        lengths: list[int] = []
        if size is None:
            count = numbers.randint(20, 50)
            while (left := count - sum(lengths)) > 0:
                lengths.append(min(left, numbers.randint(1, 10)))
        else:
            lengths = [numbers.randint(1, 10) for _ in range(size)]
        ends = torch.tensor(lengths).cumsum(0)
        indices = torch.randint(0, embeddings, (int(ends[-1]),), generator=generator)
        target = torch.randint(0, CLASSES, (len(lengths),), generator=generator)
        yield indices, ends - torch.tensor(lengths), target


# ------------------------------------------------------------------------- processes


def play_ours(cluster: hybrid.Cluster, shape: Shape, commands: list[SimpleQueue[int]]) -> None:
    """A trainer of ours."""
    _prepare(cluster, shape)
    _take_turns(cluster, commands[cluster.rank], Ours(cluster, shape).epoch, dist.group.WORLD)


def play_plain(cluster: hybrid.Cluster, shape: Shape, commands: list[SimpleQueue[int]]) -> None:
    """A trainer of the plain way, or a server: those are the last ranks."""
    _prepare(cluster, shape)
    # torch's optimizer uses what torch deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    group = dist.new_group(list(range(shape.trainers)), backend="gloo")
    world = shape.trainers + shape.servers
    at = cluster.rank - shape.trainers
    name = f"trainer{cluster.rank}" if at < 0 else f"server{at}"
    start_rpc(name, cluster.rank, world, FileStore(shape.meeting, world), timeout=PATIENCE)
    if at < 0:
        _take_turns(cluster, commands[cluster.rank], Plain(cluster, shape, group).epoch, group)
    else:
        commands[cluster.rank].get()  # the end
    stop_rpc(timeout=PATIENCE)


def _prepare(cluster: hybrid.Cluster, shape: Shape) -> None:
    torch.set_num_threads(shape.threads)
    # One that has been stopped cannot see that its parent is gone: the kernel ends it.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    cluster.report(pid=os.getpid())


def _take_turns(
    cluster: hybrid.Cluster, commands: SimpleQueue[int], epoch: Callable[[], None], group: Any
) -> None:
    """Train as many epochs as asked for, until it is none, and report the time of each."""
    while count := commands.get():
        epoch()  # not timed: what it needs comes back into the caches
        dist.barrier(group)
        seconds = [_time(epoch) for _ in range(count)]
        for start in range(0, count, _PIECE):
            piece = seconds[start : start + _PIECE]
            cluster.report(seconds=piece, more=start + _PIECE < count)


def _time(epoch: Callable[[], None]) -> float:
    start = time.perf_counter()
    epoch()
    return time.perf_counter() - start


# ------------------------------------------------------------------------- the two styles


class Ours:
    """`gradsync.hybrid`: rows are asked for ahead, servers step while DDP reduces."""

    def __init__(self, cluster: hybrid.Cluster, shape: Shape) -> None:
        self._numbers = _numbers(cluster, shape)
        self._shape = shape
        self._table = hybrid.RemoteEmbeddingBag(
            shape.embeddings,
            shape.width,
            name="benchmark",
            mode="sum",
            sharding="column",
            optimizer=hybrid.SGD(lr=LR),
            step_in_backward=True,
            seed=shape.seed,
            cluster=cluster,
        )
        torch.manual_seed(shape.seed)
        self._dense = gradsync.DistributedDataParallel(nn.Linear(shape.width, CLASSES))
        self._optimizer = torch.optim.SGD(self._dense.parameters(), lr=LR)
        self._criterion = nn.CrossEntropyLoss()

    def epoch(self) -> None:
        """Train on ten batches."""
        table, optimizer = self._table, self._optimizer
        todo = list(batches(self._numbers, self._shape.embeddings, self._shape.batch_size))
        lookup = table.prefetch(todo[0][0])
        for at, (_, offsets, target) in enumerate(todo):
            output = self._dense(table(lookup, offsets))
            if at + 1 < len(todo):
                lookup = table.prefetch(todo[at + 1][0], ahead=1)
            optimizer.zero_grad()
            self._criterion(output, target).backward()
            optimizer.step()


class Plain:
    """RPC by hand, as in torch's script."""

    def __init__(self, cluster: hybrid.Cluster, shape: Shape, group: Any) -> None:
        self._numbers = _numbers(cluster, shape)
        self._shape = shape
        self._tables = [
            rpc.remote(
                rpc_name(f"server{at}"),
                nn.EmbeddingBag,
                args=(shape.embeddings, shape.embedding_dim),
                kwargs={"mode": "sum"},
            )
            for at in range(shape.servers)
        ]
        torch.manual_seed(shape.seed)
        dense = nn.Linear(shape.width, CLASSES)
        self._dense = DistributedDataParallel(dense, process_group=group)
        parameters = [
            reference
            for table in self._tables
            for reference in rpc.rpc_sync(table.owner(), _parameters, args=(table,))
        ]
        parameters += [rpc.RRef(each) for each in self._dense.parameters()]
        from torch.distributed.optim import DistributedOptimizer  # takes long, warns of TorchScript

        self._optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=LR)
        self._criterion = nn.CrossEntropyLoss()

    def epoch(self) -> None:
        """Train on ten batches."""
        for batch in batches(self._numbers, self._shape.embeddings, self._shape.batch_size):
            self._step(*batch)

    def _step(self, indices: Tensor, offsets: Tensor, target: Tensor) -> None:
        with dist_autograd.context() as context:
            rows = [table.rpc_sync().forward(indices, offsets) for table in self._tables]
            loss = self._criterion(self._dense(torch.cat(rows, dim=1)), target)
            dist_autograd.backward(context, [loss])  # type: ignore[attr-defined]
            self._optimizer.step(context)


def _numbers(cluster: hybrid.Cluster, shape: Shape) -> random.Random:
    return random.Random(1000 * shape.seed + cluster.rank)


def _parameters(table: Any) -> list[Any]:
    return [rpc.RRef(each) for each in table.local_value().parameters()]
