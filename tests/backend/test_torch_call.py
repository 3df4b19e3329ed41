"""Calls of torch's all_reduce that the native part takes as they come, and those that it leaves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import raised, run
from torch import Tensor

from gradsync import ArgumentError, DeadlineError
from gradsync.backend import _native
from gradsync.backend.shared_memory import DTYPES
from gradsync.testing import WorkerPool

Op = dist.ReduceOp


def options(op: Op = Op.SUM, *, later: bool = False, seconds: float = 0.0) -> dist.AllreduceOptions:
    made = dist.AllreduceOptions()
    made.reduceOp = op
    made.asyncOp = later
    if seconds:
        made.timeout = timedelta(seconds=seconds)
    return made


def is_taken(tensors: object, opts: object) -> bool:
    group = dist.group.WORLD
    return group._memory.all_reduce_now(tensors, opts, group.timeout_seconds)


def test_dense_tensors_of_every_dtype_are_taken(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        for dtype in DTYPES:
            for make in (torch.empty, dist.group.WORLD.symmetric_empty):
                tensor = make(6, dtype=dtype).fill_(rank + 1)
                assert is_taken([tensor], options()), dtype
                assert torch.equal(tensor, torch.full((6,), 3, dtype=dtype))
        for op, result in ((Op.AVG, 1.5), (Op.PRODUCT, 2.0), (Op.MIN, 1.0), (Op.MAX, 2.0)):
            tensor = torch.full((3,), rank + 1.0)
            assert is_taken([tensor], options(op))
            assert torch.equal(tensor, torch.full((3,), result))
        for op, bits in ((Op.BAND, 4), (Op.BOR, 7), (Op.BXOR, 3)):
            tensor = torch.tensor([5 if rank else 6])
            assert is_taken([tensor], options(op))
            assert tensor.item() == bits

    run(pool, body)


def contiguous_in_odd_ways() -> Iterator[Tensor]:
    yield torch.tensor(1.0)
    yield torch.empty(0)
    yield torch.empty_strided((3, 0), (99, 1))
    yield torch.empty_strided((1, 5), (99, 1)).fill_(1.0)  # no step is ever made along the first
    yield torch.ones(3, 4)[1:]
    yield torch.nn.Parameter(torch.ones(3))


def test_what_is_contiguous_in_odd_ways_is_taken(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        for tensor in contiguous_in_odd_ways():
            assert is_taken([tensor], options())
            assert torch.equal(tensor.detach(), torch.full_like(tensor, world))

    run(pool, body)


def not_plain() -> Iterator[tuple[str, object, object]]:
    yield "a stride", [torch.ones(6)[::2]], options()
    yield "transposed", [torch.ones(2, 3).t()], options()
    yield "negated when read", [torch._neg_view(torch.ones(3))], options()
    yield "complex", [torch.ones(3, dtype=torch.complex64)], options()
    yield "sparse", [torch.ones(3).to_sparse()], options()
    yield "bool", [torch.ones(3, dtype=torch.bool)], options()
    yield "nowhere", [torch.ones(3, device="meta")], options()
    yield "no tensor", ["a word"], options()
    yield "several", [torch.ones(3), torch.ones(3)], options()
    yield "none", [], options()
    yield "no list", torch.ones(3), options()
    yield "no kernel", [torch.ones(3)], options(Op.BAND)
    yield "no such operation", [torch.ones(3)], options(dist._make_nccl_premul_sum(2.0))
    yield "who goes on", [torch.ones(3)], options(later=True)
    yield "a time-out of its own", [torch.ones(3)], options(seconds=5)


def test_all_else_is_left_as_it_is(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        for what, tensors, opts in not_plain():
            issued = dist.group.WORLD._context.issued
            assert not is_taken(tensors, opts), what
            assert dist.group.WORLD._context.issued == issued, what
        with torch.autograd.profiler.profile():
            assert not is_taken([torch.ones(3)], options())

    run(pool, body, 1)


def test_options_that_are_none_are_an_error_and_not_a_crash(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        assert "asyncOp" in raised(lambda: is_taken([torch.ones(3)], object()), AttributeError)
        broken = SimpleNamespace(asyncOp=False, timeout=options().timeout, reduceOp=[])
        assert "unhashable" in raised(lambda: is_taken([torch.ones(3)], broken), TypeError)

    run(pool, body, 1)


def test_what_is_left_has_the_same_result(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        group = dist.group.WORLD
        memory = torch.full((6,), rank + 1.0)
        group.allreduce([memory[::2]], options())
        assert memory.tolist() == [3.0, rank + 1.0] * 3
        own = torch.full((3,), rank + 1.0)
        assert group.allreduce([own], options(seconds=20)) is None
        assert torch.equal(own, torch.full((3,), 3.0))
        alone = torch.full((3,), rank + 1.0)
        group.allreduce(alone, opts=options())  # which gloo's takes too
        assert torch.equal(alone, torch.full((3,), 3.0))
        two = [torch.ones(2), torch.ones(2)]
        assert "got 2" in raised(lambda: group.allreduce(two, options()), ArgumentError)
        mixed = memory.fill_(rank + 1.0)[::2] if rank else torch.full((3,), rank + 1.0)
        group.allreduce([mixed], options())  # short on rank 0, long on rank 1
        assert torch.equal(mixed, torch.full((3,), 3.0))

    run(pool, body)


def test_a_timeout_of_its_own_counts(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        if rank == 0:
            call = lambda: dist.group.WORLD.allreduce([torch.ones(3)], options(seconds=0.3))  # noqa: E731
            assert "rank 1" in raised(call, DeadlineError)

    run(pool, body)


def test_only_who_goes_on_gets_a_work(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        group, tensor = dist.group.WORLD, torch.ones(3)
        assert group.allreduce([tensor], options()) is None
        assert group.allreduce([tensor], options(later=True)).wait()
        assert group.allreduce([tensor]).wait()
        opts = dist.BroadcastOptions()
        assert group.broadcast([tensor], opts).wait()
        opts.asyncOp = False
        assert group.broadcast([tensor], opts) is None

    run(pool, body)


def test_without_the_table_of_newer_torch_python_does_it_all(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        context, opts = dist.group.WORLD._context, options()
        call = _native.TorchCall(None, {hash(opts.reduceOp): 1}, opts.timeout, lambda: False)
        assert not call.all_reduce(context, [torch.ones(3)], opts, 10.0)

    run(pool, body, 1)


def test_a_capsule_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="PyCapsule"):
        _native.TorchCall(object(), {}, timedelta(), lambda: False)


def test_nothing_is_kept_of_a_call(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        tensor, opts = torch.ones(3), options(Op.AVG)
        counts = sys.getrefcount(tensor), sys.getrefcount(opts)
        for _ in range(100):
            assert is_taken([tensor], opts)
            assert not is_taken([tensor], options(Op.BAND))
        assert (sys.getrefcount(tensor), sys.getrefcount(opts)) == counts

    run(pool, body)
