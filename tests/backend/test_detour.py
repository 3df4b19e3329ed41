"""What goes through gloo: the same promises as for what goes through shared memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import Nursery
from operations import once_waiting, perform
from promptness import SECONDS, Delays

from gradsync import (
    AbortedError,
    CollectiveMismatchError,
    DeadlineError,
    FaultError,
    PeerLostError,
)
from gradsync.backend import _native

SOON = 1.0  # from a death to the error; see promptness.py
DEADLINE = 1.5
MAX = dist.ReduceOp.MAX


def flags(count: int = 5) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bool)


def rows(rank: int) -> torch.Tensor:
    return torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (4,))


def reduce_flags(later: bool) -> Any:
    return dist.all_reduce(flags(), MAX, async_op=later)


@pytest.mark.parametrize("mode", ["sync", "wait", "future"])
def test_bits_and_sparse_tensors_are_reduced(nursery: Nursery, mode: str) -> None:
    def run(rank: int, world: int) -> None:
        bits = torch.tensor([rank == 0, False])
        sparse = rows(rank)
        for _ in range(3):  # in order with what goes through shared memory
            perform(lambda later: dist.all_reduce(bits, MAX, async_op=later), mode)
            dense = torch.ones(3)
            dist.all_reduce(dense)
            assert dense.eq(world).all()
        perform(lambda later: dist.all_reduce(sparse, async_op=later), mode)
        assert bits.tolist() == [True, False]
        assert sparse.to_dense().tolist() == [1, 1, 0, 4]

    for ending in nursery.run(run):
        ending.unwrap()


def test_many_are_under_way_at_once_and_from_several_groups(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        groups = [dist.new_group(backend="gradsync") for _ in range(2)]
        tensors = [torch.tensor([rank == at % world, False]) for at in range(12)]
        works = [
            dist.all_reduce(tensor, MAX, group=groups[at % 2], async_op=True)
            for at, tensor in enumerate(tensors)
        ]
        dist.barrier(groups[0])
        for work in reversed(works):
            work.wait()
            assert work.is_completed()
        assert all(tensor.tolist() == [True, False] for tensor in tensors)
        for group in groups:
            dist.destroy_process_group(group)
        names = [thread.name for thread in threading.enumerate()]
        assert "gradsync-detour" not in names

    for ending in nursery.run(run):
        ending.unwrap()


@pytest.mark.parametrize(
    ("other", "call"),
    [
        ("all_reduce(max, 5 x int8)", lambda: dist.all_reduce(flags().char(), MAX)),
        ("all_reduce(max, 6 x bool) through gloo", lambda: dist.all_reduce(flags(6), MAX)),
        ("all_reduce(min, 5 x bool) through gloo",
         lambda: dist.all_reduce(flags(), dist.ReduceOp.MIN)),
        ("barrier", dist.barrier),
    ],
    ids=["dtype", "size", "op", "kind"],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_call_something_else_are_shown_and_the_group_can_be_used_on(
    nursery: Nursery, other: str, call: Callable[[], Any], ranks: int
) -> None:
    def run(rank: int, world: int) -> str:
        dist.barrier()
        with pytest.raises(CollectiveMismatchError) as caught:
            call() if rank == 1 else dist.all_reduce(flags(), MAX)
        bits = torch.tensor([rank == 1])
        dist.all_reduce(bits, MAX)
        assert bits.item()
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.eq(world).all()
        return str(caught.value)

    endings = nursery.run(run, ranks)
    for ending in endings:
        text = ending.unwrap()
        assert text.count("all_reduce(max, 5 x bool) through gloo") == ranks - 1
        assert f": {other}" in text
        assert "rank 0 (pid" in text
        assert "rank 1 (pid" in text


def test_what_gloo_does_not_take_is_refused_on_all_ranks_and_the_group_lives(
    nursery: Nursery,
) -> None:
    def run(rank: int, world: int) -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="sparse") as caught:
                dist.all_reduce(rows(rank), MAX)
            assert not isinstance(caught.value, FaultError)
        reduce_flags(False)
        dist.barrier()

    for ending in nursery.run(run):
        ending.unwrap()


@pytest.mark.parametrize("mode", ["sync", "wait", "future"])
@pytest.mark.parametrize("has_met", [False, True], ids=["the first", "a later one"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_is_named(
    nursery: Nursery, delays: Delays, mode: str, has_met: bool, ranks: int
) -> None:
    def run(rank: int, world: int) -> Any:
        if has_met:
            reduce_flags(False)
        dist.barrier()
        before = dist.group.WORLD._get_sequence_number_for_group()
        if rank == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError) as caught:
            perform(reduce_flags, mode)
        return caught.value, time.monotonic(), before

    with nursery.start(run, ranks) as going:
        endings = going.endings()
    for ending in endings:
        if ending.rank == 1:
            continue
        error, when, before = ending.unwrap()
        assert (error.rank, error.pid) == (1, going.pids[1])
        assert f"rank 1 (pid {going.pids[1]} on " in str(error)
        assert f"collective {before + 1}, all_reduce(max, 5 x bool)" in str(error)
        delays.add(when - endings[1].ended, "detour")


def test_a_rank_killed_inside_gloo_is_named(nursery: Nursery, delays: Delays) -> None:
    def run(rank: int, world: int) -> Any:
        reduce_flags(False)
        dist.barrier()
        if rank == 1:  # it has met the others when it is at gloo
            dist.group.WORLD._engines._made["gloo"] = Killer()
        with pytest.raises(PeerLostError) as caught:
            reduce_flags(False)
        return caught.value, time.monotonic()

    class Killer:
        def allreduce(self, *_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    endings = nursery.run(run, 3)
    for ending in (endings[0], endings[2]):
        error, when = ending.unwrap()
        assert error.rank == 1
        assert "all_reduce(max, 5 x bool)" in str(error)
        delays.add(when - endings[1].ended, "inside")


def test_a_rank_killed_while_gloo_is_set_up_is_named(nursery: Nursery, delays: Delays) -> None:
    def run(rank: int, world: int) -> Any:
        dist.barrier()
        if rank == 1:
            group = dist.group.WORLD
            group._engines._make = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError) as caught:
            reduce_flags(False)
        return caught.value, time.monotonic()

    survivor, victim = nursery.run(run)
    error, when = survivor.unwrap()
    assert error.rank == 1
    delays.add(when - victim.ended, "set up")


def test_who_waits_elsewhere_is_told_who_was_lost_inside_gloo(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> Any:
        reduce_flags(False)
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            while dist.group.WORLD._context.states()[0][0] == _native.State.PRESENT:
                time.sleep(0.01)
        with pytest.raises(PeerLostError) as caught:
            dist.barrier() if rank == 1 else reduce_flags(False)
        return caught.value.rank

    first, second, _ = nursery.run(run, 3)
    assert (first.unwrap(), second.unwrap()) == (2, 2)


@pytest.mark.parametrize("where", ["before", "inside"])
def test_a_stopped_rank_is_named_at_the_deadline(nursery: Nursery, where: str) -> None:
    class Stopper:
        def __init__(self, engine: Any) -> None:
            self.engine = engine  # whose connections are to stay

        def allreduce(self, *_: Any) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60)  # this thread may run on for a moment

    def run(rank: int, world: int) -> Any:
        reduce_flags(False)
        dist.barrier()
        dist.group.WORLD.set_timeout(timedelta(seconds=DEADLINE))
        if rank == 1 and where == "before":
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1:
            made = dist.group.WORLD._engines._made
            made["gloo"] = Stopper(made["gloo"])
        began = time.monotonic()
        with pytest.raises(DeadlineError) as caught:
            reduce_flags(False)
        return caught.value, time.monotonic() - began

    endings = nursery.run(run, 3, expendable=[1])
    for ending in (endings[0], endings[2]):
        error, elapsed = ending.unwrap()
        assert DEADLINE * 0.9 <= elapsed < SECONDS
        assert "rank 1 (pid " in str(error)
        if where == "before":
            assert error.ranks == (1,)


@pytest.mark.parametrize("how", ["abort", "destroy", "interrupt"])
def test_what_waits_for_gloo_ends_with_its_group(nursery: Nursery, how: str) -> None:
    def run(rank: int, world: int) -> None:
        reduce_flags(False)
        store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        if rank == 1:
            store.wait(["ended"], timedelta(seconds=30))
            with pytest.raises(FaultError, match="rank 0 "):
                reduce_flags(False)
            return
        began = time.monotonic()
        if how == "interrupt":
            once_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                reduce_flags(False)
        else:
            work = reduce_flags(True)
            time.sleep(0.2)
            dist.group.WORLD.abort() if how == "abort" else dist.destroy_process_group()
            with pytest.raises(AbortedError):
                work.wait()
        assert time.monotonic() - began < SECONDS
        store.set("ended", "")

    for ending in nursery.run(run):
        ending.unwrap()
