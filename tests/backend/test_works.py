"""Works, futures, groups and threads: when collectives happen, and for whom."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import raised, run, still_works

import gradsync
from gradsync import CollectiveMismatchError, DeadlineError
from gradsync.testing import WorkerPool

Group = dist.ProcessGroup


class TestWork:
    def test_it_is_done_when_waited_for_and_holds_the_result(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            for size in (3, 400_000):
                tensor = torch.full((size,), rank + 1.0)
                if rank == 1:
                    time.sleep(0.05)
                work = dist.all_reduce(tensor, async_op=True)
                assert work.wait()
                assert work.is_completed()
                assert work.is_success()
                assert work.exception() is None
                assert work.result()[0] is tensor
                assert tensor[-1] == 3

        run(pool, body)

    def test_who_only_asks_whether_it_is_completed_finds_it_completed(
        self, pool: WorkerPool
    ) -> None:
        def body(rank: int, world: int) -> None:
            for size in (3, 400_000):
                tensor = torch.full((size, 2), rank + 1.0)[:, 1]  # to be copied back
                time.sleep(0.02 * rank)
                work = dist.all_reduce(tensor, async_op=True)
                deadline = time.monotonic() + 20
                while not work.is_completed():
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
                assert torch.equal(tensor, torch.full((size,), 3.0))

        run(pool, body)

    def test_a_wait_with_a_time_out_gives_up_and_can_be_repeated(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            tensor = torch.full((3,), rank + 1.0)
            store = dist.distributed_c10d._get_default_store()
            if rank == 1:
                store.wait(["rank 0 gave up"])
            work = dist.all_reduce(tensor, async_op=True)
            if rank == 0:
                raised(lambda: work.wait(timedelta(seconds=0.05)), DeadlineError)
                store.set("rank 0 gave up", "")
            work.wait(timedelta(seconds=20))
            assert tensor[0] == 3

        run(pool, body)

    def test_futures_complete_without_a_wait_and_take_callbacks(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            for size in (3, 400_000):
                tensor = torch.full((size,), rank + 1.0)
                future = dist.all_reduce(tensor, async_op=True).get_future()
                doubled = future.then(lambda f: f.value()[0] * 2)
                assert doubled.wait()[0] == 6
                assert future.done()
                gathered = [torch.zeros(size) for _ in range(world)]
                future = dist.all_gather(gathered, tensor, async_op=True).get_future()
                future.wait()
                assert gathered[1][0] == 3
            work = dist.all_reduce(torch.ones(1 + rank), async_op=True)  # not the same
            text = raised(lambda: work.get_future().wait(), RuntimeError)
            assert "not the same on all ranks" in text
            assert isinstance(work.exception(), CollectiveMismatchError)
            assert work.is_completed()
            assert not work.is_success()

        run(pool, body)

    def test_works_that_are_dropped_are_carried_out(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            kept = []
            for size in (3, 300_000, 5, 90_000):
                kept.append(torch.full((size,), rank + 1.0))
                dist.all_reduce(kept[-1], async_op=True)
                dist.all_reduce(torch.ones(size), async_op=True)  # its memory is dropped too
                dist.isend(torch.full((size,), float(rank)), 1 - rank)
            for size in (3, 300_000, 5, 90_000):
                tensor = torch.zeros(size)
                dist.recv(tensor, 1 - rank)
                assert tensor[-1] == 1 - rank
            dist.barrier()
            for tensor in kept:
                assert torch.equal(tensor, torch.full_like(tensor, 3.0))

        run(pool, body)

    def test_many_at_once_and_waited_for_in_another_order(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            tensors = [torch.full((size,), rank + 1.0) for size in (3, 100_000, 7) * 20]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            order = reversed(works) if rank else works
            for work in order:
                work.wait()
            for tensor in tensors:
                assert tensor[-1] == world * (world + 1) / 2

        run(pool, body, 3)

    def test_profilers_show_them(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            with torch.autograd.profiler.profile(record_shapes=True) as profile:
                dist.all_reduce(torch.ones(3, 4))
                dist.all_gather(
                    [torch.empty(2), torch.empty(2)], torch.ones(2), async_op=True
                ).wait()
            events = {event.name: event for event in profile.function_events}
            assert events["gradsync:all_reduce"].input_shapes == [[3, 4]]
            assert events["gradsync:all_reduce"].is_async
            assert events["gradsync:all_gather"].input_shapes == [[2]]

        run(pool, body)


class TestGroups:
    def test_several_groups_at_once_each_with_its_ranks(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            members = ([0, 1], [2, 3], [1, 2, 3], [3, 0], [0, 1, 2, 3])
            groups = [dist.new_group(ranks) for ranks in members]
            works = []
            for ranks, group in zip(members, groups, strict=True):
                if rank in ranks:
                    tensor = torch.full((50_000,), float(rank))
                    works.append(
                        (tensor, ranks, dist.all_reduce(tensor, group=group, async_op=True))
                    )
            for tensor, ranks, work in reversed(works):
                work.wait()
                assert torch.equal(tensor, torch.full_like(tensor, float(sum(ranks))))
            if rank in (1, 2, 3):
                tensor = torch.full((3,), float(rank))
                dist.broadcast(tensor, 3, group=groups[2])
                assert tensor[0] == 3
                if rank == 2:
                    dist.send(tensor + 1, 1, group=groups[2])
                elif rank == 1:
                    assert dist.recv(tensor, group=groups[2]) == 2
                    assert tensor[0] == 4
            dist.destroy_process_group(groups[-1])
            still_works(rank, world)

        run(pool, body, 4)

    def test_each_thread_with_a_group_of_its_own(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            groups = [dist.new_group() for _ in range(3)]
            failures: list[BaseException] = []

            def work(group: Group, seed: int) -> None:
                try:
                    for step in range(60):
                        size = (3, 40_000)[(step + seed) % 2]
                        tensor = torch.full((size,), float(rank + step))
                        dist.all_reduce(tensor, group=group)
                        assert tensor[-1] == sum(r + step for r in range(world))
                except BaseException as error:
                    failures.append(error)

            in_threads(failures, [(work, (group, seed)) for seed, group in enumerate(groups)])

        run(pool, body)

    def test_one_group_from_two_threads_that_agree_on_the_order(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            turn = threading.Condition()
            now = [0]
            failures: list[BaseException] = []

            def work(own: int) -> None:
                try:
                    for step in range(own, 60, 2):
                        tensor = torch.full(((3, 40_000)[step % 3 == 0],), float(rank + step))
                        with turn:
                            turn.wait_for(lambda step=step: now[0] == step, 20)
                            work = dist.all_reduce(tensor, async_op=True)
                            now[0] += 1
                            turn.notify_all()
                        work.wait()  # outside: both threads wait at once
                        assert tensor[-1] == sum(r + step for r in range(world))
                except BaseException as error:
                    failures.append(error)

            in_threads(failures, [(work, (0,)), (work, (1,))])

        run(pool, body)


def in_threads(failures: list[BaseException], calls: list[tuple[Callable, tuple]]) -> None:
    threads = [threading.Thread(target=fn, args=args) for fn, args in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_groups_are_known_by_the_public_class(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        group = dist.group.WORLD
        assert isinstance(group, gradsync.SharedMemoryGroup)
        assert group.shares_memory
        assert dist.get_backend() == "gradsync"
        assert (group.rank(), group.size(), group.name()) == (rank, world, "gradsync")

    run(pool, body)
