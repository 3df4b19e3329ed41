"""Ranks of one machine that cannot share memory: the same promises as between machines."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import seccomp
import torch
import torch.distributed as dist
from forked import Nursery
from hosts import DEADLINE, apart, set_deadline, store_of_group
from operations import OPERATIONS, once_waiting, perform
from promptness import SECONDS, Delays
from torch import nn

import gradsync
from gradsync import AbortedError, DeadlineError, FaultError, PeerLostError, StateError

pytestmark = seccomp.needed
SOON = 1.0  # from a death to the error; see promptness.py
ALIKE = {name: make for name, make in OPERATIONS.items() if "symmetric" not in name}


@pytest.mark.parametrize("mode", ["sync", "wait", "future"])
def test_every_operation_gives_the_same_as_in_shared_memory(nursery: Nursery, mode: str) -> None:
    def run(rank: int, world: int) -> None:
        for make in ALIKE.values():
            perform(make(rank, world), mode)

    for ending in nursery.run(run, **apart(3)):
        ending.unwrap()


def test_a_rank_alone_needs_no_memory_to_share(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        group = dist.group.WORLD
        assert not group.shares_memory
        with pytest.raises(StateError, match="do not share memory"):
            group.symmetric_empty(3, torch.float32)
        tensor = torch.tensor([1.0, 2.0])
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            dist.all_reduce(tensor, op)
        dist.broadcast(tensor, 0)
        dist.barrier()
        assert tensor.tolist() == [1.0, 2.0]

    (ending,) = nursery.run(run, **apart(1))
    ending.unwrap()


def test_our_ddp_trains_as_on_gloo(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        weights = []
        for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(9, 300), nn.BatchNorm1d(300), nn.Linear(300, 2))
            ddp = gradsync.DistributedDataParallel(model, process_group=group)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                ddp(torch.randn(4, 9) + rank + step).square().mean().backward()
                optimizer.step()
            weights.append([parameter.detach() for parameter in ddp.parameters()])
        for ours, gloos in zip(*weights, strict=True):
            assert torch.equal(ours, gloos)

    for ending in nursery.run(run, **apart(2)):
        ending.unwrap()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("operation", ["all_reduce, large", "barrier, small", "all_gather, small"])
def test_a_killed_rank_is_named_by_all(
    nursery: Nursery, delays: Delays, operation: str, victim: int
) -> None:
    def run(rank: int, world: int) -> Any:
        assert not dist.group.WORLD.shares_memory
        call = OPERATIONS[operation](rank, world)
        call(False)
        if rank == victim:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError, match=rf"rank {victim} \(pid .* has ended") as caught:
            call(False)
        when = time.monotonic()
        ways: list[Callable[[], Any]] = [
            lambda: dist.all_reduce(torch.ones(3)),
            lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
            lambda: dist.all_reduce(torch.ones(3), async_op=True).get_future().wait(),
        ]
        for way in ways:
            with pytest.raises(PeerLostError, match=rf"rank {victim} \(pid .* has ended"):
                way()
        with pytest.raises(PeerLostError, match=rf"rank {victim} \(pid .* through gloo"):
            dist.recv(torch.ones(3), victim)
        return caught.value, when

    with nursery.start(run, **apart(3)) as under_way:
        endings = under_way.endings()
    for ending in endings:
        if ending.rank == victim:
            continue
        error, when = ending.unwrap()
        assert (error.rank, error.pid) == (victim, under_way.pids[victim])
        assert operation.split(",")[0] in str(error)
        delays.add(when - endings[victim].ended, operation)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_rank_is_named_by_all_at_the_deadline(nursery: Nursery, victim: int) -> None:
    def run(rank: int, world: int) -> Any:
        dist.barrier()
        set_deadline(DEADLINE)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=rf"rank {victim} \(pid ") as caught:
            dist.all_reduce(torch.ones(300_000))
        return caught.value, time.monotonic() - began

    for ending in nursery.run(run, expendable=[victim], **apart(3)):
        if ending.rank != victim:
            error, elapsed = ending.unwrap()
            assert error.ranks == (victim,)
            assert DEADLINE <= elapsed < SECONDS


def test_a_rank_that_never_calls_is_named_at_the_deadline(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> Any:
        store = store_of_group()
        dist.barrier()
        set_deadline(DEADLINE)
        if rank == 1:
            store.wait(["0", "2"], timedelta(seconds=20))
            return None
        with pytest.raises(DeadlineError) as caught:
            dist.all_reduce(torch.ones(10))
        store.set(str(rank), "")
        return caught.value.ranks

    assert [ending.unwrap() for ending in nursery.run(run, **apart(3))] == [(1,), None, (1,)]


@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_a_wait_ends_with_its_group_and_the_others_hear_of_it(nursery: Nursery, how: str) -> None:
    def run(rank: int, world: int) -> None:
        group = dist.new_group(backend="gradsync")
        store = store_of_group()
        dist.barrier()
        if rank == 1:
            store.wait(["ended"], timedelta(seconds=30))
            with pytest.raises(FaultError, match=r"rank 0 .*aborted the group"):
                dist.all_reduce(torch.ones(3), group=group)
            return
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        began = time.monotonic()
        once_waiting(group.abort if how == "abort" else group.shutdown)
        with pytest.raises(AbortedError):
            work.wait()
        assert time.monotonic() - began < SECONDS
        store.set("ended", "")

    for ending in nursery.run(run, **apart(2)):
        ending.unwrap()
