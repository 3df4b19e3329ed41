"""The collectives of the gradsync backend, against gloo and against plain computation."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from cases import MOVES, REDUCTIONS, Maker, check_against_gloo, maker
from oracle import (
    ARITHMETIC,
    BITWISE,
    CHUNK,
    FLOATS,
    INTEGERS,
    SLOT,
    SMALL,
    Op,
    assert_equal,
    reduced,
    values,
)
from ranks import raised, run, still_works
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from gradsync.testing import WorkerPool

RANKS = pytest.mark.parametrize("ranks", [2, 3, 4])


def around(limit: int, element: int) -> list[int]:
    """Numbers of elements just below, at and above a limit in bytes."""
    return [limit // element - 1, limit // element, limit // element + 1]


class TestReductions:
    @RANKS
    def test_all_reduce_gives_what_one_process_computes_bit_by_bit(
        self, pool: WorkerPool, ranks: int
    ) -> None:
        def body(rank: int, world: int) -> None:
            for dtype in (*INTEGERS, *FLOATS):
                ops = (*ARITHMETIC, *BITWISE) if dtype in INTEGERS else ARITHMETIC
                for size in (0, 1, 7, 2 * CHUNK // dtype.itemsize + 1):
                    given = [values(r, size, dtype) for r in range(world)]
                    for op in ops:
                        tensor = given[rank].clone()
                        dist.all_reduce(tensor, op)
                        assert_equal(tensor, reduced(given, op), (dtype, op, size))

        run(pool, body, ranks)

    @RANKS
    def test_sizes_around_the_limits_of_small_ones_and_of_slots(
        self, pool: WorkerPool, ranks: int
    ) -> None:
        def body(rank: int, world: int) -> None:
            for dtype in (torch.float32, torch.bfloat16):
                element = dtype.itemsize
                sizes = [*around(SMALL, element), *around(CHUNK, element), *around(SLOT, element)]
                sizes += [3 * CHUNK // element + 1, 2 * SLOT // element + 1]
                for size in sizes:
                    given = [values(r, size, dtype) for r in range(world)]
                    expected = reduced(given, Op.SUM)
                    tensor = given[rank].clone()
                    dist.all_reduce(tensor)
                    assert_equal(tensor, expected, (dtype, size))
                    tensor = given[rank].clone()
                    dist.reduce(tensor, world - 1)
                    kept = expected if rank == world - 1 else given[rank]
                    assert_equal(tensor, kept, (dtype, size))

        run(pool, body, ranks)

    def test_sums_of_complex_numbers(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            for dtype in (torch.complex64, torch.complex128):
                given = [values(r, 1001, dtype) for r in range(world)]
                for op in (Op.SUM, Op.AVG):
                    parts = [torch.view_as_real(t) for t in given]
                    expected = torch.view_as_complex(reduced(parts, op))
                    tensor = given[rank].clone()
                    dist.all_reduce(tensor, op)
                    assert_equal(tensor, expected, (dtype, op))

        run(pool, body, 3)

    def test_not_a_number_goes_through_minimum_and_maximum(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            for dtype in FLOATS:
                for op in (Op.MIN, Op.MAX):
                    tensor = torch.arange(world + 1.0).to(dtype)
                    tensor[rank] = torch.nan
                    dist.all_reduce(tensor, op)
                    assert tensor[:world].isnan().all()
                    assert tensor[world] == world

        run(pool, body, 3)

    @RANKS
    def test_every_reduction_is_gloos(self, pool: WorkerPool, ranks: int) -> None:
        def body(rank: int, world: int) -> None:
            gloo = dist.new_group(backend="gloo")
            for dtype in (torch.float32, torch.int64):
                for op in (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX):
                    for size in (0, 1, 5, 20_001):
                        make = maker(rank, size * world, dtype)
                        for case in REDUCTIONS:
                            ours, theirs = (case(g, world, make, op) for g in (None, gloo))
                            for a, b in zip(ours, theirs, strict=True):
                                torch.testing.assert_close(a, b, msg=f"{case.__name__} {op} {size}")

        run(pool, body, ranks)

    def test_bitwise_equal_on_all_ranks_and_from_run_to_run(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> list[Tensor]:
            group = dist.group.WORLD
            results = []
            for size in (1000, 200_003):
                given = values(rank, size)
                results += [given.clone(), group.symmetric_empty(size, torch.float32).copy_(given)]
            for tensor in results:
                dist.all_reduce(tensor)
            return [tensor.clone() for tensor in results]

        first = run(pool, body, 4)
        second = run(pool, body, 4)
        for other in (*first, *second):
            for a, b in zip(first[0], other, strict=True):
                assert torch.equal(a, b)

    def test_what_has_no_kernel_of_ours_goes_to_gloo(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            index = torch.tensor([[rank, 4]])
            sparse = torch.sparse_coo_tensor(index, torch.tensor([1.0, 2.0]), (6,))
            dist.all_reduce(sparse)
            expected = torch.zeros(6)
            expected[:world], expected[4] = 1, 2 * world
            assert torch.equal(sparse.to_dense(), expected)
            flags = torch.arange(world + 1) == rank
            dist.all_reduce(flags, Op.MAX)
            assert torch.equal(flags, torch.arange(world + 1) < world)
            unknown = torch.ones(2, dtype=torch.uint16)
            assert "scalar type" in raised(lambda: dist.all_reduce(unknown), RuntimeError).lower()
            still_works(rank, world)

        run(pool, body, 3)


class TestMoves:
    @RANKS
    def test_every_move_is_gloos_in_all_sizes(self, pool: WorkerPool, ranks: int) -> None:
        def body(rank: int, world: int) -> None:
            gloo = dist.new_group(backend="gloo")
            bytes_ = [0, 1, 7, SMALL // world, SMALL // world + 1, *around(SMALL, 1)]
            for size in (*bytes_, SLOT // world + 1, SLOT + 1):
                ours, theirs = (
                    Maker(rank, size, torch.int8, as_bytes=as_bytes) for as_bytes in (False, True)
                )
                for case in MOVES:
                    results = zip(case(None, world, ours), case(gloo, world, theirs), strict=True)
                    for a, b in results:
                        assert_equal(a.view(torch.uint8), b, (case.__name__, size))

        run(pool, body, ranks)

    def test_every_move_takes_every_dtype(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            gloo = dist.new_group(backend="gloo")
            more = (torch.bool, torch.complex64, torch.complex128, torch.float8_e5m2, torch.uint16)
            for dtype in (*INTEGERS, *FLOATS, *more):
                ours, theirs = (
                    Maker(rank, 1003, dtype, as_bytes=as_bytes) for as_bytes in (False, True)
                )
                for case in MOVES:
                    results = zip(case(None, world, ours), case(gloo, world, theirs), strict=True)
                    for a, b in results:
                        assert_equal(a.view(torch.uint8), b, (case.__name__, dtype))

        run(pool, body, 3)

    @RANKS
    def test_all_to_all_with_lists_of_uneven_tensors(self, pool: WorkerPool, ranks: int) -> None:
        def body(rank: int, world: int) -> None:
            for size in (0, 1, 501, 70_001):
                inputs = [values(rank, size * (rank + r), seed=r) for r in range(world)]
                outputs = [torch.zeros(size * (rank + r)) for r in range(world)]
                dist.all_to_all(outputs, inputs)
                for source, output in enumerate(outputs):
                    assert_equal(output, values(source, output.numel(), seed=rank), size)

        run(pool, body, ranks)

    def test_a_barrier_waits_for_the_last(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> tuple[float, float]:
            time.sleep(0.1 * rank)
            before = time.monotonic()
            dist.barrier()
            return before, time.monotonic()

        times = run(pool, body, 3)
        assert min(after for _, after in times) >= max(before for before, _ in times)


class TestShapes:
    def test_tensors_that_are_not_contiguous(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            def gaps(seed: int = 0, source: int = rank) -> Tensor:
                return values(source, 12 * 8 * 2, seed=seed).view(12, 8, 2).permute(1, 0, 2)[::2]

            def empty() -> Tensor:
                return torch.zeros(8, 4, 12).permute(2, 0, 1)[:, :, 1]

            plain = gaps().contiguous()
            tensor = gaps()
            assert not tensor.is_contiguous()
            dist.all_reduce(tensor)
            dist.all_reduce(plain)
            assert torch.equal(tensor, plain)

            tensor = gaps()
            dist.broadcast(tensor, 1)
            assert torch.equal(tensor, gaps(source=1))

            outputs = [empty() for _ in range(world)]
            value = torch.arange(96.0).view(8, 12).t() + rank
            dist.all_gather(outputs, value)
            for source, output in enumerate(outputs):
                assert torch.equal(output, value - rank + source)

            output = torch.zeros(12, world).t()  # a row for each rank
            dist.all_gather_into_tensor(output, value[:, 0])
            assert torch.equal(output, torch.stack([value[:, 0] - rank + r for r in range(world)]))

            outputs = [empty() for _ in range(world)] if rank == 1 else None
            dist.gather(value, outputs, 1)
            for source, output in enumerate(outputs or ()):
                assert torch.equal(output, value - rank + source)

            output = empty()
            dist.scatter(output, [value + 9 * r for r in range(world)] if rank == 0 else None, 0)
            assert torch.equal(output, value + 8 * rank)

            output = empty()
            dist.reduce_scatter(output, [value * (r + 1) for r in range(world)])
            total = sum((value - rank + r) * (rank + 1) for r in range(world))
            assert torch.equal(output, total)

            output = torch.zeros(2, world).t()
            dist.reduce_scatter_tensor(output, torch.ones(world * 2, world).t())
            assert torch.equal(output, torch.full((world, 2), float(world)))

            output = torch.zeros(3, world).t()
            dist.all_to_all_single(output, torch.full((3, world), float(rank)).t())
            assert torch.equal(output, torch.arange(world).float()[:, None].expand(world, 3))

            other = (rank + 1) % world
            output = empty()
            work = dist.isend(value, other)
            dist.recv(output, (rank - 1) % world)
            work.wait()
            assert torch.equal(output, value - rank + (rank - 1) % world)

        run(pool, body, 3)

    def test_scalars_empty_tensors_and_parameters(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            scalar = torch.tensor(rank + 1.0)
            dist.all_reduce(scalar)
            assert scalar.item() == world * (world + 1) / 2
            for shape in ((0,), (3, 0), (0, 2)):
                dist.all_reduce(torch.empty(shape))
                dist.broadcast(torch.empty(shape), 1)
                dist.all_gather([torch.empty(shape) for _ in range(world)], torch.empty(shape))
                dist.all_to_all_single(torch.empty(shape), torch.empty(shape))
            negated = torch._neg_view(torch.full((4,), rank + 1.0))  # when it is read
            dist.all_reduce(negated)
            assert torch.equal(negated, torch.full((4,), -6.0))
            negated = torch._neg_view(torch.full((4,), rank + 1.0))
            dist.all_reduce(negated, Op.MAX)
            assert torch.equal(negated, torch.full((4,), -1.0))
            parameter = torch.nn.Parameter(torch.full((4,), float(rank)))
            dist.broadcast(parameter, 1)
            assert torch.equal(parameter.detach(), torch.ones(4))

        run(pool, body, 3)


def test_all_is_as_on_gloo_also_with_gaps(pool: WorkerPool) -> None:
    run(pool, check_against_gloo, 3)


class TestSymmetricMemory:
    def test_large_reductions_are_in_place_and_copy_nothing(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            group = dist.group.WORLD
            tensor = group.symmetric_empty(300_001, torch.float32)
            dist.barrier()
            for op in (Op.SUM, Op.AVG, Op.MAX):
                given = [values(r, tensor.numel()) for r in range(world)]
                before = group.counters()
                tensor.copy_(given[rank])
                dist.all_reduce(tensor, op)
                part = tensor[1000:250_000]  # a part of it is as good
                assert_equal(part, reduced(given, op)[1000:250_000], op)
                dist.all_reduce(part, Op.MAX)
                after = group.counters()
                assert after["symmetric"] - before["symmetric"] == 2
                assert after["copied"] == before["copied"]
                assert_equal(tensor, reduced(given, op), op)

        run(pool, body, 3)

    def test_one_rank_with_such_memory_and_one_without_it(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            group = dist.group.WORLD
            for size in (3, 300_001):
                given = [values(r, size) for r in range(world)]
                tensor = torch.empty(size)
                if rank == 1:
                    tensor = group.symmetric_empty(size, torch.float32)
                tensor.copy_(given[rank])
                before = group.counters()
                dist.all_reduce(tensor)
                assert_equal(tensor, reduced(given, Op.SUM), size)
                assert group.counters()["symmetric"] == before["symmetric"]
                dist.broadcast(tensor, 1)
                assert_equal(tensor, reduced(given, Op.SUM), size)

        run(pool, body, 3)

    def test_such_memory_in_messages_and_other_collectives(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            tensor = dist.group.WORLD.symmetric_empty(world * 100, torch.float32)
            tensor.fill_(rank)
            pieces = list(tensor.view(world, -1))
            dist.all_gather(pieces, pieces[rank])  # in place
            assert torch.equal(tensor, torch.arange(world).float().repeat_interleave(100))
            output = dist.group.WORLD.symmetric_empty(100, torch.float32)
            dist.reduce_scatter_tensor(output, tensor)
            assert torch.equal(output, torch.full((100,), float(rank * world)))
            if rank == 0:
                dist.send(output + 7, 1)
            elif rank == 1:
                dist.recv(output, 0)
                assert torch.equal(output, torch.full((100,), 7.0))

        run(pool, body, 2)


class TestObjects:
    def test_objects_go_wherever_tensors_do(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            gathered: list = [None] * world
            dist.all_gather_object(gathered, {"rank": rank, "much": "x" * 1000 * rank})
            assert [entry["rank"] for entry in gathered] == list(range(world))
            objects = [rank, "a" * rank] if rank == 1 else [None, None]
            dist.broadcast_object_list(objects, 1)
            assert objects == [1, "a"]
            mine: list = [None]
            dist.scatter_object_list(
                mine, [f"for {r}" for r in range(world)] if rank == 0 else None
            )
            assert mine == [f"for {rank}"]
            if rank == 2:
                dist.gather_object(rank, gathered, 2)
                assert gathered == list(range(world))
            else:
                dist.gather_object(rank, None, 2)

        run(pool, body, 3)


class TestFunctional:
    def test_functional_collectives(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            group = dist.group.WORLD
            tensor = torch.arange(6.0) + rank
            total = torch.arange(6.0) * world + sum(range(world))
            assert torch.equal(functional.all_reduce(tensor, "sum", group), total)
            pair = functional.all_reduce_coalesced([tensor, tensor * 2], "sum", group)
            assert torch.equal(pair[1] + 0, 2 * total)
            gathered = functional.all_gather_tensor(tensor, 0, group)
            assert torch.equal(gathered.view(world, 6)[1], torch.arange(6.0) + 1)
            lists = functional.all_gather_into_tensor_coalesced([tensor, tensor[:2]], group)
            assert torch.equal(lists[1] + 0, gathered.view(world, 6)[:, :2].reshape(-1))
            scattered = functional.reduce_scatter_tensor(tensor, "sum", 0, group)
            assert torch.equal(scattered, total.chunk(world)[rank])
            scattered = functional.reduce_scatter_tensor_coalesced(
                [tensor, tensor * 2], "sum", [0, 0], group
            )
            assert torch.equal(scattered[1] + 0, 2 * total.chunk(world)[rank])
            exchanged = functional.all_to_all_single(tensor, [3, 3], [3, 3], group)
            assert torch.equal(
                exchanged, torch.cat([torch.arange(3.0) + 3 * rank + r for r in (0, 1)])
            )
            assert torch.equal(functional.broadcast(tensor, 1, group), torch.arange(6.0) + 1)

        run(pool, body)

    def test_under_the_compiler(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            @torch.compile(backend="aot_eager", fullgraph=True)
            def step(x: Tensor) -> Tensor:
                total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
                return functional.all_gather_tensor(total + 1, 0, dist.group.WORLD)

            result = step(torch.full((3,), rank + 1.0))
            assert torch.equal(result, torch.full((6,), 7.0))

        run(pool, body)
