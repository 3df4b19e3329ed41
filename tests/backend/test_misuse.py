"""What cannot work: ranks that disagree, wrong arguments, ranks that do not come."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import raised, run, still_works

from gradsync import CollectiveMismatchError, DeadlineError, GradsyncError
from gradsync.testing import WorkerPool

Op = dist.ReduceOp


def reduce_scatter(tensor: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(tensor.new_empty(tensor.numel() // 2), tensor)


def all_gather(tensor: torch.Tensor) -> None:
    dist.all_gather_into_tensor(tensor.new_empty(2 * tensor.numel()), tensor)


def gather(tensor: torch.Tensor) -> None:
    outputs = [torch.empty_like(tensor) for _ in range(2)]
    dist.gather(tensor, outputs if dist.get_rank() == 0 else None)


def scatter(tensor: torch.Tensor) -> None:
    dist.scatter(tensor, [tensor.clone()] * 2 if dist.get_rank() == 0 else None)


F32, I32 = torch.float32, torch.int32
# What rank 0 hands in, what rank 1 does, and where.
DTYPES_THAT_DIFFER: dict[str, Any] = {
    "reduce_scatter": ((8, I32), (8, F32), reduce_scatter),
    "broadcast": ((4, I32), (4, F32), lambda t: dist.broadcast(t, 0)),
    "broadcast of bytes": ((8, torch.bool), (4, torch.uint16), lambda t: dist.broadcast(t, 0)),
    "broadcast of bool": ((8, torch.bool), (8, torch.uint8), lambda t: dist.broadcast(t, 0)),
    "all_gather": ((4, torch.uint32), (4, F32), all_gather),
    "gather": ((8, torch.bool), (8, torch.float8_e4m3fn), gather),
    "gather of pairs": ((4, torch.complex64), (2, torch.complex128), gather),
    "scatter": ((4, torch.uint64), (4, torch.float64), scatter),
    "all_to_all": ((4, I32), (4, F32), lambda t: dist.all_to_all_single(t.clone(), t)),
    "all_to_all of bytes": (
        (2, torch.int64), (4, F32), lambda t: dist.all_to_all_single(t.clone(), t),
    ),
}  # fmt: skip


class TestMismatches:
    @pytest.mark.parametrize(
        ("calls", "words"),
        [
            (
                (lambda t: dist.all_reduce(t), lambda t: dist.broadcast(t, 0)),
                ("all_reduce(sum, 4 x float32)", "broadcast(root 0, 4 x float32)"),
            ),
            (
                (lambda t: dist.all_reduce(t), lambda t: dist.all_reduce(t, Op.MAX)),
                ("all_reduce(sum, 4 x float32)", "all_reduce(max, 4 x float32)"),
            ),
            (
                (lambda t: dist.all_reduce(t), lambda t: dist.all_reduce(t[:3])),
                ("4 x float32", "3 x float32"),
            ),
            (
                (lambda t: dist.all_reduce(t), lambda t: dist.all_reduce(t.double())),
                ("4 x float32", "4 x float64"),
            ),
            (
                (lambda t: dist.broadcast(t, 0), lambda t: dist.broadcast(t, 1)),
                ("broadcast(root 0", "broadcast(root 1"),
            ),
            (
                (lambda t: dist.all_reduce(t), lambda t: dist.barrier()),
                ("all_reduce(sum, 4 x float32)", "barrier"),
            ),
            (
                (lambda t: dist.all_reduce(t), lambda t: dist.all_reduce(torch.ones(10**6))),
                ("4 x float32", "1000000 x float32"),
            ),
            (  # the root of a scatter writes into the slots of the others
                (
                    lambda t: dist.all_reduce(torch.ones(10**5)),
                    lambda t: dist.scatter(t, [torch.ones(4)] * dist.get_world_size(), 1),
                ),
                ("100000 x float32", "scatter(root 1, 4 x float32)"),
            ),
        ],
        ids=["kind", "op", "size", "dtype", "root", "barrier", "small and large", "scatter"],
    )
    def test_show_both_sides_on_all_ranks_and_leave_the_group_usable(
        self, pool: WorkerPool, calls: tuple[Callable, Callable], words: tuple[str, str]
    ) -> None:
        def body(rank: int, world: int) -> str:
            text = raised(lambda: calls[rank == 1](torch.ones(4)), CollectiveMismatchError)
            still_works(rank, world)
            return text

        for text in run(pool, body, 3):
            for expected in (*words, "rank 0", "rank 1", "rank 2"):
                assert expected in text

    @pytest.mark.parametrize("call", DTYPES_THAT_DIFFER)
    def test_dtypes_that_differ_are_shown_though_as_many_bytes_are_moved(
        self, pool: WorkerPool, call: str
    ) -> None:
        one, other, operation = DTYPES_THAT_DIFFER[call]

        def body(rank: int, world: int) -> str:
            count, dtype = one if rank == 0 else other
            tensor = torch.zeros(count, dtype=dtype)
            text = raised(lambda: operation(tensor), CollectiveMismatchError)
            still_works(rank, world)
            return text

        for text in run(pool, body):
            for _, dtype in (one, other):
                assert str(dtype.to_real()).removeprefix("torch.") in text

    def test_splits_of_all_to_all_that_do_not_meet(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> str:
            def call() -> None:
                output = torch.empty(4 + rank)
                splits = [2, 2 + rank]
                dist.all_to_all_single(output, torch.ones(4), splits, [2, 2])

            text = raised(call, CollectiveMismatchError)
            still_works(rank, world)
            return text

        for text in run(pool, body):
            assert "sends 8 bytes" in text
            assert "expects 12" in text


class TestArguments:
    def test_what_cannot_be_meant_is_said_before_anything_is_sent(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            group = dist.group.WORLD
            one, two = torch.ones(4), torch.ones(8)
            symmetric = group.symmetric_empty(4, torch.float32)
            options = dist.BroadcastOptions()
            options.rootRank = 7
            calls = {
                "group rank 7": lambda: group.broadcast([one], options),
                "for each of the 2 ranks": lambda: group.allgather([[one]], [one]),
                "number 1 has 8": lambda: group.allgather([[one, two]], [one]),
                "number 0 has 4 of torch.float64": lambda: group.allgather(
                    [[one.double(), one.double()]], [one]
                ),
                "2 times the 4 elements": lambda: dist.all_gather_into_tensor(one, one),
                "its dtype, torch.float32": lambda: group._allgather_base(two.double(), one),
                "Exactly one tensor": lambda: group.allreduce([one, one]),
                "does not divide equally": lambda: dist.all_to_all_single(one[:3], one[:3]),
                "Split sizes doesn't match": lambda: dist.all_to_all_single(
                    one, one, [1, 1], [2, 2]
                ),
                "one for each rank": lambda: group.alltoall([one], [one, one]),
                "of one dtype": lambda: group.alltoall([one, one], [one, one.double()]),
                "dense": lambda: group.send([one.to_sparse()], 1 - rank, 0),
                "receiver, group rank 5": lambda: group.send([one], 5, 0),
                "is this rank itself": lambda: dist.isend(one, rank),
                "elements, and a torch.dtype; got -5": lambda: group.symmetric_empty(-5, one.dtype),
                "got (3, 4) and": lambda: group.symmetric_empty((3, 4), one.dtype),
                "<class 'float'>": lambda: group.symmetric_empty(3, float),
                "bytes of memory": lambda: group.symmetric_empty(10**15, one.dtype),
                "not 'sum'": lambda: group.persistent_all_reduce(symmetric, "sum"),
                "got torch.float32, torch.float64": lambda: group.all_to_all_single(
                    one, one.double()
                ),
                "sender, group rank -3": lambda: group.recv([one], -3, 0),
            }
            for words, call in calls.items():
                assert words in raised(call, GradsyncError), words
            still_works(rank, world)

        run(pool, body)

    def test_a_destroyed_group_says_so(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            group = dist.new_group()
            dist.destroy_process_group(group)
            with_error = raised(lambda: group.allreduce([torch.ones(3)]).wait(), GradsyncError)
            assert "destroyed" in with_error
            still_works(rank, world)

        run(pool, body)


class TestMonitoredBarrier:
    def test_passes_when_all_come_and_names_who_does_not(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> list[str]:
            group = dist.group.WORLD
            texts = []
            for _ in range(3):
                group.monitored_barrier()
            short = timedelta(seconds=0.3)
            for wait_all_ranks in (False, True):
                if rank == 0:
                    call = lambda: group.monitored_barrier(short, wait_all_ranks)  # noqa: B023, E731
                    texts.append(raised(call, DeadlineError))
                dist.barrier()  # they come too late
                if rank:
                    texts.append(raised(lambda: group.monitored_barrier(short), DeadlineError))
            group.monitored_barrier()
            still_works(rank, world)
            return texts

        texts = run(pool, body, 3)
        assert "Rank 1 failed to pass monitoredBarrier in 300 ms" in texts[0][0]
        assert "Ranks 1, 2 failed to pass monitoredBarrier in 300 ms" in texts[0][1]
        for text in (*texts[1], *texts[2]):
            assert "successfully reached monitoredBarrier" in text
            assert "failed to pass" in text
