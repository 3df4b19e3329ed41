"""Trainers for tests with real processes: the children import them from here."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gradsync
from gradsync import hybrid
from gradsync.hybrid import Cluster

ROWS, COLUMNS, BATCH = 50, 4, 8


def dense() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(COLUMNS, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, ROWS, (BATCH, 3), generator=generator)
    return ids, torch.rand((BATCH, 1), generator=generator)


def make_table(**options: Any) -> hybrid.RemoteEmbeddingBag:
    optimizer = hybrid.Adagrad(lr=0.1)
    return hybrid.RemoteEmbeddingBag(
        ROWS, COLUMNS, name="t", mode="sum", optimizer=optimizer, **options
    )


def whole(table: hybrid.RemoteEmbeddingBag) -> Tensor:
    with torch.no_grad():
        return table(torch.arange(ROWS)[:, None])


def train(cluster: Cluster, steps: int, ahead: bool = False) -> dict[str, Any]:
    """Train; returns what this trainer then sees of the model."""
    table, ddp = make_table(), gradsync.DistributedDataParallel(dense())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    lookup = table.prefetch(batch(0, cluster.rank)[0])
    for step in range(steps):
        ids, target = batch(step, cluster.rank)
        optimizer.zero_grad()
        rows = table(lookup if ahead else ids)
        if step + 1 < steps:
            lookup = table.prefetch(batch(step + 1, cluster.rank)[0], ahead=1)
        loss = F.mse_loss(ddp(rows), target)
        loss.backward()
        optimizer.step()
        table.step()
        cluster.report(step=step, loss=loss.item())
    state = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    return {"table": whole(table), "version": table._versions["server0"], **state}


def train_alone(steps: int, trainers: int, weight: Tensor) -> dict[str, Tensor]:
    """The same in one process, on the joined batches."""
    table = nn.EmbeddingBag.from_pretrained(weight.clone(), freeze=False, mode="sum")
    model = dense()
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.Adagrad(table.parameters(), lr=0.1),
    ]
    for step in range(steps):
        for rank in range(trainers):
            ids, target = batch(step, rank)
            (F.mse_loss(model(table(ids)), target) / trainers).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"table": table.weight.detach(), **model.state_dict()}


def train_until_it_fails(cluster: Cluster) -> None:
    table, ddp = make_table(), gradsync.DistributedDataParallel(dense())
    for step in range(100_000):
        ids, target = batch(step, cluster.rank)
        F.mse_loss(ddp(table(ids)), target).backward()
        table.step()
        cluster.report(step=step)


def train_and_die(cluster: Cluster, dies: int, after: int) -> None:
    table = make_table()
    for step in range(100_000):
        table(batch(step, cluster.rank)[0]).sum().backward()
        if cluster.rank == dies and step == after:
            os.kill(os.getpid(), signal.SIGKILL)
        table.step()


def uneven(cluster: Cluster) -> int:
    """Trainer 1 has fewer batches; the other one goes on without it."""
    table = make_table()
    for step in range(5 - 3 * cluster.rank):
        table(batch(step, cluster.rank)[0]).sum().backward()
        table.step()
    cluster.leave()
    return table._versions["server0"]


def wrong_index(cluster: Cluster) -> None:
    make_table()(torch.tensor([[ROWS]]))


def unpicklable(cluster: Cluster) -> Any:
    return lambda: None


def look(cluster: Cluster) -> tuple[Tensor, int]:
    table = make_table()
    return whole(table), table._versions["server0"]


def run_and_sleep(pipe: Any) -> None:
    """A process with a server and a trainer that does not end; tells the pids of both."""
    with hybrid.start_servers(1) as servers:
        hybrid.run(
            hybrid.Roles(trainer=sleep),
            servers=servers,
            on_report=lambda _, values: pipe.send([servers.pids["server0"], values["pid"]]),
        )


def sleep(cluster: Cluster) -> None:
    cluster.report(pid=os.getpid())
    time.sleep(600)


def watch(cluster: Cluster) -> None:
    """A master that waits until a table is there, and asks once more when all is trained."""
    from gradsync.hybrid.transport import Message

    while not cluster.ask_all({"server0": Message("describe")})["server0"].values["tables"]:
        time.sleep(0.05)
    time.sleep(1.0)  # if they take longer, this asks too early: it proves less, and does not fail
    assert cluster.ask_all({"server0": Message("describe")})["server0"].values["tables"]


def group_size(cluster: Cluster) -> int:
    return dist.get_world_size()
