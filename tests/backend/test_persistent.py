"""An all-reduce that is prepared once and run many times."""

from __future__ import annotations

import gc
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from forked import Nursery
from promptness import check_best_of_three
from ranks import raised, run, still_works

from gradsync import (
    AbortedError,
    ArgumentError,
    CollectiveMismatchError,
    DeadlineError,
    PeerLostError,
    StateError,
)
from gradsync.testing import WorkerPool

SIZES = (1, 3_000, 20_000, 300_000)  # small, of a few pieces, of many


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_run_reduces_what_is_in_the_tensor_then(pool: WorkerPool, ranks: int) -> None:
    def body(rank: int, world: int) -> None:
        group = dist.group.WORLD
        for size in SIZES:
            tensor = group.symmetric_empty(size, torch.float32)
            averages = group.persistent_all_reduce(tensor)
            sums = group.persistent_all_reduce(tensor, dist.ReduceOp.SUM)
            for step in range(1, 6):
                tensor.fill_(step * (rank + 1.0))
                averages.run()
                assert torch.equal(tensor, torch.full((size,), step * (world + 1) / 2))
                tensor.fill_(step * (rank + 1.0))
                sums.start()
                sums.wait()
                assert torch.equal(tensor, torch.full((size,), step * world * (world + 1) / 2))

    run(pool, body, ranks)


def test_it_copies_nothing_and_a_part_of_the_memory_will_do(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        group = dist.group.WORLD
        memory = group.symmetric_empty(100_000, torch.float32)
        memory.fill_(float(rank))
        part = group.persistent_all_reduce(memory[20_000:80_000].view(200, 300))
        before = group.counters()
        part.run()
        after = group.counters()
        assert after["symmetric"] - before["symmetric"] == 1
        assert after["copied_bytes"] == before["copied_bytes"]
        assert memory[20_000:80_000].eq(0.5).all()
        assert memory[:20_000].eq(rank).all()
        assert memory[80_000:].eq(rank).all()

    run(pool, body)


def test_what_is_started_goes_on_while_nobody_waits(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        group = dist.group.WORLD
        tensor = group.symmetric_empty(300_000, torch.float32)
        tensor.fill_(rank + 1.0)
        reduction = group.persistent_all_reduce(tensor)
        assert reduction.is_completed()  # nothing has been started
        reduction.start()
        deadline = time.monotonic() + 20
        while tensor[-1] != 1.5 or tensor[0] != 1.5:  # asking would help it on
            assert time.monotonic() < deadline
            time.sleep(0.001)
        reduction.wait()
        reduction.wait()
        assert reduction.is_completed()

    run(pool, body)


def test_other_ranks_may_call_torchs_function_instead(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        group = dist.group.WORLD
        for size in SIZES:
            tensor = group.symmetric_empty(size, torch.float32) if rank == 0 else torch.empty(size)
            tensor.fill_(rank + 1.0)
            if rank == 0:
                group.persistent_all_reduce(tensor).run()
            else:
                dist.all_reduce(tensor, dist.ReduceOp.AVG)
            assert torch.equal(tensor, torch.full((size,), 1.5))

    run(pool, body)


def test_ranks_that_disagree_are_told_and_can_go_on(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        group = dist.group.WORLD
        memory = group.symmetric_empty(100_000, torch.float32)
        reduction = group.persistent_all_reduce(memory[: 50_000 + rank])
        for call in (reduction.run, lambda: (reduction.start(), reduction.wait())):
            text = raised(call, CollectiveMismatchError)
            assert "50000 x float32" in text
            assert "50001 x float32" in text
        still_works(rank, world)

    run(pool, body)


def test_one_that_is_forgotten_on_its_way_is_still_carried_out(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        group = dist.group.WORLD
        for size in SIZES:
            tensor = group.symmetric_empty(size, torch.float32)
            tensor.fill_(rank + 1.0)
            reduction = group.persistent_all_reduce(tensor)
            if rank == 0:
                reduction.start()
                del reduction, tensor
                gc.collect()
            else:
                time.sleep(0.02)  # rank 0 has let go of it by now
                reduction.run()
                assert torch.equal(tensor, torch.full((size,), 1.5))
            still_works(rank, world)

    run(pool, body)


def test_only_symmetric_memory_of_numbers_is_taken(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        group = dist.group.WORLD
        prepare = group.persistent_all_reduce
        assert "symmetric_empty" in raised(lambda: prepare(torch.ones(3)), ArgumentError)
        memory = group.symmetric_empty(12, torch.float32)
        assert "contiguous" in raised(lambda: prepare(memory.view(3, 4).t()), ArgumentError)
        assert "contiguous" in raised(lambda: prepare(torch.ones(3).to_sparse()), ArgumentError)
        text = raised(lambda: prepare(memory, dist.ReduceOp.BXOR), ArgumentError)
        assert "no BXOR of torch.float32" in text
        text = raised(lambda: prepare(memory.view(torch.complex64)), ArgumentError)
        assert "no AVG of torch.complex64" in text
        still_works(rank, world)

    run(pool, body)


def test_a_group_that_is_closed_is_not_kept_by_it_and_says_so(pool: WorkerPool) -> None:
    def segments() -> int:
        with open("/proc/self/maps") as maps:
            return sum("gradsync" in line for line in maps)

    def body(rank: int, world: int) -> None:
        group = dist.new_group(backend="gradsync")
        tensor = group.symmetric_empty(3, torch.float32)
        reduction = group.persistent_all_reduce(tensor)
        empty = group.persistent_all_reduce(group.symmetric_empty(0, torch.float32))
        for each in (reduction, empty):
            each.start()
            each.wait()
        on_its_way = group.persistent_all_reduce(tensor)
        if rank == 0:
            on_its_way.start()
        dist.barrier(group=dist.group.WORLD)
        gc.collect()
        before = segments()
        dist.destroy_process_group(group)
        gc.collect()
        assert segments() < before
        reduction.wait()  # what was done is done
        assert reduction.is_completed()
        assert "closed" in raised(reduction.run, AbortedError)
        assert "closed" in raised(reduction.start, AbortedError)
        reduction.wait()
        assert on_its_way.is_completed()
        if rank == 0:
            assert "on its way" in raised(on_its_way.wait, AbortedError)
        assert "do not share" in raised(lambda: group.persistent_all_reduce(tensor), StateError)
        still_works(rank, world)

    run(pool, body)


def test_the_groups_timeout_holds_as_it_is_when_a_run_begins(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        group = dist.new_group(backend="gradsync")
        reduction = group.persistent_all_reduce(group.symmetric_empty(3, torch.float32))
        reduction.run()
        group.set_timeout(timedelta(seconds=0.2))
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            began = time.monotonic()
            assert "Not arrived: rank 1" in raised(reduction.run, DeadlineError)
            assert time.monotonic() - began < 2
            store.set("rank 0 gave up", "")
        else:
            store.wait(["rank 0 gave up"])

    run(pool, body)


def _outlive(rank: int, world: int, way: str) -> tuple[int | None, float, float]:
    group = dist.group.WORLD
    tensor = group.symmetric_empty(300_000, torch.float32)
    reduction = group.persistent_all_reduce(tensor)
    reduction.run()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        reduction.run() if way == "run" else (reduction.start(), reduction.wait())
    except PeerLostError as error:
        return error.rank, began, time.monotonic()
    raise AssertionError("rank 1 has ended, and nobody minds")


@pytest.mark.parametrize("way", ["run", "start and wait"])
def test_a_rank_that_is_killed_is_named_by_the_others_within_a_second(
    nursery: Nursery, way: str
) -> None:
    def kill() -> float:
        first, victim, third = nursery.run(_outlive, 3, args=(way,))
        assert victim.code == -signal.SIGKILL
        times = []
        for survivor in (first, third):
            blamed, began, learned = survivor.unwrap()
            assert blamed == 1
            times.append(learned - max(victim.ended, began))
        return max(times)

    check_best_of_three(kill, promise=1.0)
