"""Train a small convolutional network on handwritten digits with gradsync's DDP.

    torchrun --standalone --nproc-per-node 2 examples/digits.py

The 1,797 images of 8x8 pixels come with scikit-learn, so nothing is downloaded. Without
torchrun the same script trains in one process.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, NoReturn

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gradsync import DistributedDataParallel


@dataclass
class Reached:
    """How far training has come; what is shown live, at the end and on Ctrl-C."""

    epoch: int = 0
    steps: int = 0
    examples: int = 0  # over all ranks
    seconds: float = 0.0  # of training, without evaluation
    loss: float = float("nan")
    accuracy: float = float("nan")

    @property
    def rate(self) -> float:
        return self.examples / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f}  test accuracy {self.accuracy:7.2%}  "
            f"{self.rate:7,.0f} examples/s"
        )


def main(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training set.")] = 12,
    batch_size: Annotated[int, typer.Option(min=2, help="Examples a step on each rank.")] = 32,
    lr: Annotated[float, typer.Option(min=1e-6, help="Peak learning rate.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Of the split, the weights and the shuffling.")] = 0,
    target_accuracy: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Exit with 1 if the test accuracy is lower.")
    ] = 0.95,
) -> None:
    """Train on handwritten digits with gradsync's DistributedDataParallel.

    Start it with torchrun, one process a rank, or alone for a single process.
    """
    console = Console(highlight=False, soft_wrap=True)
    reached = Reached()
    try:
        with process_group():
            rank, world = dist.get_rank(), dist.get_world_size()
            console.quiet = rank != 0
            train_set, test_set = digits(seed)
            check_batch_size(batch_size, len(train_set) // world)
            introduce(console, train_set, test_set)

            torch.manual_seed(seed + rank)  # DDP makes the replicas equal, not the seed
            model = DistributedDataParallel(network())
            with progress(console, epochs) as update:
                for _ in train(model, train_set, test_set, reached, epochs, batch_size, lr, seed):
                    update(reached)
            weights = gather_digests(model)
            summarise(console, reached, weights)
    except KeyboardInterrupt:
        stop(console, reached)

    if len(set(weights)) != 1:
        fail(console, "the ranks hold different weights")
    if reached.accuracy < target_accuracy:
        fail(
            console,
            f"test accuracy {reached.accuracy:.2%} is below the target of {target_accuracy:.2%}: "
            "train longer (--epochs) or with another --lr",
        )


@contextmanager
def process_group() -> Iterator[None]:
    """The group that torchrun describes in the environment, or a group of one."""
    timeout = timedelta(seconds=60)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo", timeout=timeout)
    else:
        dist.init_process_group(
            "gloo", timeout=timeout, store=dist.HashStore(), rank=0, world_size=1
        )
    yield
    # A thread of gloo's may still hold tensors of the last collective. If it let them go while
    # Python ends, the process would abort. While it waits here, that thread gets Python's lock.
    dist.barrier()
    dist.destroy_process_group()


def digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set; the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)
    train_x, test_x = (
        torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for x in split[:2]
    )
    train_y, test_y = (torch.tensor(y, dtype=torch.long) for y in split[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(
    model: nn.Module,
    train_set: TensorDataset,
    test_set: TensorDataset,
    reached: Reached,
    epochs: int,
    batch_size: int,
    lr: float,
    seed: int,
) -> Iterator[None]:
    """Train, and yield after each epoch with ``reached`` brought up to date."""
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(train_set, seed=seed)
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, epochs * len(loader))
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.05)

    for epoch in range(1, epochs + 1):
        sampler.set_epoch(epoch)
        model.train()
        begin = time.perf_counter()
        losses = []
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
            reached.steps += 1
            reached.examples += len(images) * dist.get_world_size()
        reached.seconds += time.perf_counter() - begin
        reached.epoch = epoch
        mean_loss = torch.stack(losses).mean()
        dist.all_reduce(mean_loss)
        reached.loss = mean_loss.item() / dist.get_world_size()
        reached.accuracy = evaluate(model, test_set)
        yield


@torch.no_grad()
def evaluate(model: nn.Module, test_set: TensorDataset) -> float:
    """Accuracy over the whole test set, of which each rank takes its share.

    The forward goes through DDP, which first gives every rank the BatchNorm statistics of
    rank 0: the ranks evaluate, and keep, one and the same network.
    """
    model.eval()
    images, labels = (t[dist.get_rank() :: dist.get_world_size()] for t in test_set.tensors)
    correct = (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(correct)
    return correct.item() / len(test_set)


def gather_digests(model: nn.Module) -> list[str]:
    """The SHA-256 of the state dict (weights and buffers, bit by bit) of every rank."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return digests


# --------------------------------------------------------------------------------------
# What the user sees


def check_batch_size(batch_size: int, shard: int) -> None:
    if batch_size > shard:
        raise typer.BadParameter(
            f"{batch_size} is more than the {shard} training examples that each rank has",
            param_hint="--batch-size",
        )


def introduce(console: Console, train_set: TensorDataset, test_set: TensorDataset) -> None:
    world = dist.get_world_size()
    how = f"{world} processes" if world > 1 else "one process"
    if not dist.is_torchelastic_launched():
        how += " (not started by torchrun: no gradients to exchange)"
    console.print(
        f"Handwritten digits: {len(train_set)} to train on, {len(test_set)} to test, {how}"
    )


@contextmanager
def progress(console: Console, epochs: int) -> Iterator[Callable[[Reached], None]]:
    """A live line on a terminal, a plain line an epoch elsewhere."""
    if not console.is_terminal:
        yield lambda reached: console.print(f"epoch {reached.epoch:2d}/{epochs}  {reached}")
        return
    columns = (
        TextColumn("epoch {task.completed:2.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=console.quiet) as bar:
        task = bar.add_task("first epoch", total=epochs)
        yield lambda reached: bar.update(task, completed=reached.epoch, description=str(reached))


def summarise(console: Console, reached: Reached, digests: list[str]) -> None:
    table = Table(title="gradsync: digits", show_header=False, title_justify="left")
    table.add_row("test accuracy", f"{reached.accuracy:.2%}")
    table.add_row("world size", f"{len(digests)}")
    table.add_row("steps", f"{reached.steps:,}")
    table.add_row("examples per second", f"{reached.rate:,.0f}")
    equal = len(set(digests)) == 1
    ranks = f"{len(digests)} rank" + "s" * (len(digests) > 1)
    table.add_row("weights", f"identical on {ranks}" if equal else "DIFFERENT")
    console.print(table)
    console.print("SHA-256 of the state dict, bit by bit:")
    for rank, digest in enumerate(digests):
        console.print(f"rank {rank}  {digest}")


def stop(console: Console, reached: Reached) -> NoReturn:
    """After Ctrl-C: say what was reached and leave, without waiting for the other ranks."""
    done = f"epoch {reached.epoch}, {reached}" if reached.epoch else "no epoch finished"
    console.print(f"\nInterrupted after {reached.steps} steps: {done}")
    sys.stdout.flush()
    os._exit(130)


def fail(console: Console, message: str) -> NoReturn:
    console.print(f"[bold red]FAILED:[/] {message}")
    raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
