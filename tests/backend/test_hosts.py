"""Several machines, feigned by ``GRADSYNC_MACHINE``: shared memory inside, gloo between them."""

from __future__ import annotations

import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import check_against_gloo
from forked import Nursery
from hosts import machines
from operations import OPERATIONS, perform
from torch._subclasses.fake_tensor import FakeTensorMode

from gradsync import ArgumentError
from gradsync.backend import hierarchy

LAYOUTS = {"2+1": "aab", "mixed 2+2": "abab", "1+1+2": "abcc"}
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]


def uses_hierarchy() -> bool:
    return dist.group.WORLD._hierarchy is not None


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: exact in every type and order."""
    made = (torch.arange(count) + rank) % 3 + 1
    return made.to(dtype)


def expected(op: Any, world: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    all_values = torch.stack([values(rank, count, dtype).to(wide) for rank in range(world)])
    if op == dist.ReduceOp.SUM:
        return all_values.sum(0).to(dtype)
    if op == dist.ReduceOp.AVG:
        rounding = None if dtype.is_floating_point else "trunc"
        return all_values.sum(0).div(world, rounding_mode=rounding).to(dtype)
    if op == dist.ReduceOp.PRODUCT:
        return all_values.prod(0).to(dtype)
    if op == dist.ReduceOp.MIN:
        return all_values.amin(0).to(dtype)
    if op == dist.ReduceOp.MAX:
        return all_values.amax(0).to(dtype)
    bitwise = {
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }[op]
    result = all_values[0]
    for each in all_values[1:]:
        result = bitwise(result, each)
    return result.to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_reduce_gives_the_same_as_on_one_machine(nursery: Nursery, layout: str) -> None:
    def run(rank: int, world: int) -> None:
        assert uses_hierarchy()
        floats = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT]
        floats += [dist.ReduceOp.MIN, dist.ReduceOp.MAX]
        bits = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
        for dtype in DTYPES:
            for op in floats if dtype.is_floating_point else floats + bits:
                tensor = values(rank, 1000, dtype)
                dist.all_reduce(tensor, op)
                wanted = expected(op, world, 1000, dtype)
                exact = not dtype.is_floating_point
                assert torch.allclose(tensor.double(), wanted.double(), 0 if exact else 1e-2), op
        for count in (0, 1, 3, 262_144, 262_145, 900_000):
            tensor = values(rank, count, torch.float32)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, expected(dist.ReduceOp.SUM, world, count, torch.float32)), (
                count
            )

    for ending in nursery.run(run, **machines(LAYOUTS[layout])):
        ending.unwrap()


def test_complex_strided_and_half_precision_tensors_are_reduced(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        tensor = torch.full((5,), complex(1, rank))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [complex(3, 3)] * 5
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.tolist() == [complex(3, 3)] * 5
        strided = torch.zeros(4, 6)
        strided[:, ::2] = rank
        dist.all_reduce(strided[:, ::2])
        assert strided[:, ::2].eq(3).all()
        assert strided[:, 1::2].eq(0).all()
        large = torch.full((10,), 40_000.0, dtype=torch.float16)
        dist.all_reduce(large, dist.ReduceOp.AVG)
        assert large.eq(40_000).all()
        halves = torch.full((3,), complex(1, rank))
        dist.all_reduce(halves.conj().imag)  # a view that negates what it reads and writes
        assert halves.imag.eq(3).all()
        leaf = torch.ones(3, requires_grad=True)
        with torch.no_grad():
            dist.all_reduce(leaf)
        assert leaf.eq(3).all()
        flags = torch.tensor([rank == 0, False])
        dist.all_reduce(flags, dist.ReduceOp.MAX)  # gloo's business
        assert flags.tolist() == [True, False]

    for ending in nursery.run(run, **machines("aab")):
        ending.unwrap()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_broadcast_works_from_any_root(nursery: Nursery, layout: str) -> None:
    def run(rank: int, world: int) -> None:
        for root in range(world):
            for count in (0, 5, 700_000):
                for dtype in (torch.float32, torch.bool, torch.complex64):
                    tensor = torch.full((count,), rank == root, dtype=dtype)
                    dist.broadcast(tensor, root)
                    assert tensor.eq(True).all()
        halves = torch.full((3,), complex(0, rank))
        dist.broadcast(halves.conj().imag, 2)  # a view that negates what it reads and writes
        assert halves.imag.eq(2).all()
        strided = torch.full((4, 4), float(rank)).t()[::2]
        dist.broadcast(strided, 1)
        assert strided.eq(1).all()

    for ending in nursery.run(run, **machines(LAYOUTS[layout])):
        ending.unwrap()


def test_a_barrier_lets_nobody_through_before_the_last(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> tuple[float, float]:
        dist.barrier()
        if rank == world - 1:
            time.sleep(0.3)
        came = time.monotonic()
        dist.barrier()
        return came, time.monotonic()

    times = [ending.unwrap() for ending in nursery.run(run, **machines("aabc"))]
    assert max(came for came, _ in times) <= min(left for _, left in times)


def test_everything_else_goes_through_gloo(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        for name, make in OPERATIONS.items():
            if "symmetric" not in name:
                for mode in ("sync", "wait"):  # gloo has not all futures
                    perform(make(rank, world), mode)
        assert not dist.group.WORLD.shares_memory
        objects: list[Any] = [None] * world
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": other} for other in range(world)]
        tensor = torch.full((3,), float(rank))
        if rank == 0:
            dist.send(tensor, world - 1)
        if rank == world - 1:
            dist.recv(tensor, 0)
            assert tensor.eq(0).all()
        group = dist.new_group([0, world - 1], backend="gradsync")
        if rank in (0, world - 1):
            dist.all_reduce(tensor, group=group)

    for ending in nursery.run(run, **machines("aab")):
        ending.unwrap()


def test_results_are_those_of_gloo(nursery: Nursery) -> None:
    for layout in ("ab", "aab"):
        for ending in nursery.run(check_against_gloo, **machines(layout)):
            ending.unwrap()


def test_a_tensor_without_memory_is_an_error_and_the_group_lives(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        with FakeTensorMode():
            fake = torch.ones(10)[4:]
        for call in (lambda: dist.all_reduce(fake), lambda: dist.broadcast(fake, 0)):
            with pytest.raises(ArgumentError, match="no memory"):
                call()
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.eq(world).all()

    for ending in nursery.run(run, **machines("ab")):
        ending.unwrap()


def test_many_operations_are_under_way_at_once(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        tensors = [torch.full((100_000,), float(at)) for at in range(12)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        futures = [work.get_future() for work in works[::3]]
        for future in reversed(futures):
            future.wait()
        for work in works:
            work.wait()
            assert work.is_completed()
        for at, tensor in enumerate(tensors):
            assert tensor.eq(at * world).all()
        forgotten = torch.ones(300_000)
        dist.all_reduce(forgotten, async_op=True)
        del forgotten  # its memory has to stay
        dist.barrier()

    for ending in nursery.run(run, **machines("aab")):
        ending.unwrap()


def test_groups_can_be_used_from_threads(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        groups = [dist.new_group(backend="gradsync") for _ in range(3)]
        failures: list[BaseException] = []

        def loop(group: Any, value: float) -> None:
            try:
                for _ in range(20):
                    tensor = torch.full((5_000,), value)
                    dist.all_reduce(tensor, group=group)
                    assert tensor.eq(value * world).all()
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=loop, args=(group, float(at)))
            for at, group in enumerate(groups)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures

    for ending in nursery.run(run, **machines("aab")):
        ending.unwrap()


def test_a_group_of_one_machine_inside_several_shares_memory(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        groups = [dist.new_group(ranks, backend="gradsync") for ranks in ([0, 1], [2, 3])]
        own = groups[rank // 2]
        assert own.shares_memory
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=own)
        assert tensor.eq(1.0 if rank < 2 else 5.0).all()

    for ending in nursery.run(run, **machines("aabb")):
        ending.unwrap()


def test_ranks_of_a_machine_that_cannot_share_memory_are_in_a_place_each(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        from gradsync.backend import attach

        original = attach._map

        def fail(*args: Any) -> Any:
            raise OSError("no memory to share") if rank < 2 else AssertionError

        attach._map = fail if rank < 2 else original
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            group = dist.new_group(backend="gradsync", timeout=timedelta(seconds=20))
        told = [str(each.message) for each in caught if "gradsync" in str(each.message)]
        places = [[member.rank for member in place] for place in group._hierarchy._places]
        assert places == [[0], [1], [2, 3]]
        assert len(told) == (rank == 0), told
        dist.group.WORLD = group
        for make in (make for name, make in OPERATIONS.items() if "symmetric" not in name):
            perform(make(rank, world), "sync")
        check_against_gloo(rank, world)

    for ending in nursery.run(run, **machines("aabb")):
        ending.unwrap()


def test_chunks_cover_a_tensor() -> None:
    tensor = torch.arange(700_000)
    chunks = hierarchy._chunks(tensor)
    assert torch.equal(torch.cat(chunks), tensor)
    assert all(chunk.nbytes <= hierarchy.CHUNK_BYTES for chunk in chunks)
    assert [chunk.numel() for chunk in hierarchy._chunks(torch.empty(0))] == [0]
