"""Calls of torch's all_reduce that the native part takes as they come, and those that it leaves."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import raised, run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional

from gradsync import AbortedError, ArgumentError, DeadlineError
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


def at_low_addresses() -> Tensor:
    """Three ones where programs that are not loaded anywhere have their heap."""
    low, length = 0x4000_0000, mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10_0000  # MAP_FIXED_NOREPLACE
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    found = libc.mmap(low, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert found == low
    memory = (ctypes.c_float * 4).from_address(low)
    return torch.frombuffer(memory, dtype=torch.float32)[1:].fill_(1.0)


def test_low_addresses_are_as_good_as_any(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        tensor = at_low_addresses()
        assert is_taken([tensor], options())
        assert torch.equal(tensor, torch.full((3,), 2.0))

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
        group.allreduce([own], options(seconds=20))
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


def test_who_has_waited_gets_a_work_that_is_done(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        group, tensor = dist.group.WORLD, torch.ones(3)
        meet = dist.BarrierOptions()
        meet.asyncOp = False
        works = [
            group.allreduce([tensor], options()),
            group.allreduce([tensor[::2]], options()),
            group.barrier(meet),
        ]
        for work in works:
            assert work.wait()
            assert work.is_completed()
        assert dist.ProcessGroup.barrier(group, meet).wait()  # through torch's C++, which holds it
        assert works[0].get_future().wait() == works[0].result() == []
        assert group.allreduce([tensor]).get_future().wait()[0] is tensor  # its own work

    run(pool, body)


def test_torchs_function_goes_the_short_way(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        def long_way(*_: object, **__: object) -> None:
            raise AssertionError("the long way")

        dist.group.WORLD._memory.all_reduce = long_way
        tensor = torch.full((3,), rank + 1.0)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((3,), 3.0))
        assert raised(lambda: dist.all_reduce(torch.ones(6)[::2])) == "the long way"

    run(pool, body)


class Inside(Tensor):
    """Has no memory but that of the tensor inside, and shows it."""

    @staticmethod
    def __new__(cls, inside: Tensor) -> Inside:
        made = Tensor._make_wrapper_subclass(cls, inside.size(), dtype=inside.dtype)
        made.inside = inside
        return made

    def data_ptr(self) -> int:
        return self.inside.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return Inside(function(*[each.inside for each in args], **(kwargs or {})))


class Outside(Tensor):
    """Stands for three numbers of a tensor that it does not show."""

    @staticmethod
    def __new__(cls) -> Outside:
        return Tensor._make_wrapper_subclass(cls, (3,), strides=(1,), storage_offset=4)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls()


def without_memory() -> Iterator[Tensor]:
    with FakeTensorMode():
        yield torch.ones(3)
        yield torch.ones(10)[4:]
    for dtype in (torch.float32, torch.bool):  # one that is reduced through gloo
        freed = torch.ones(3, dtype=dtype)
        view = freed[1:]
        freed.untyped_storage().resize_(0)
        yield from (freed, view)
    yield Outside()
    yield torch._efficientzerotensor((3,))


def test_tensors_without_memory_are_an_error_and_not_a_crash(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        for tensor in without_memory():
            assert not is_taken([tensor], options())
            other = torch.ones(tensor.shape, dtype=tensor.dtype)
            calls = (
                lambda: dist.all_reduce(tensor),  # noqa: B023
                lambda: dist.broadcast(tensor, 0),  # noqa: B023
                lambda: dist.all_gather([other], tensor),  # noqa: B023
                lambda: dist.all_gather([tensor], other),  # noqa: B023
                lambda: dist.all_to_all([tensor], [other]),  # noqa: B023
            )
            for call in calls:
                assert "no memory" in raised(call, ArgumentError)

    run(pool, body, 1)


def test_what_is_inside_a_tensor_is_reduced_if_it_says_where_that_is(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        wrapped = Inside(torch.full((3,), rank + 1.0))
        dist.all_reduce(wrapped)
        assert torch.equal(wrapped.inside, torch.full((3,), 3.0))
        coming = functional.all_reduce(torch.full((3,), rank + 1.0), "sum", dist.group.WORLD)
        dist.all_reduce(coming)
        assert torch.equal(coming + 0, torch.full((3,), 6.0))
        gathered = functional.all_reduce(torch.zeros(3), "sum", dist.group.WORLD)
        dist.broadcast(gathered, 0)
        dist.all_gather([gathered, torch.zeros(3)], torch.full((3,), rank + 1.0))
        assert torch.equal(gathered + 0, torch.ones(3))
        part = functional.all_reduce(torch.zeros(6), "sum", dist.group.WORLD)[3:]
        dist.all_reduce(part)
        assert torch.equal(part + 0, torch.zeros(3))
        given = torch.tensor([rank == 0, False])
        either = functional.all_reduce(given, "max", dist.group.WORLD)  # through gloo
        dist.all_reduce(either, Op.MAX)
        assert (either | False).tolist() == [True, False]

    run(pool, body)


def test_after_an_abort_nothing_works_though_the_other_has_come(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        group = dist.new_group(backend="gradsync")
        work = group.allreduce([torch.ones(3)]) if rank else None  # it is posted
        dist.barrier()
        if rank == 0:
            group.abort()
            raised(lambda: dist.all_reduce(torch.ones(3), group=group), AbortedError)
        dist.barrier()
        if work is not None:
            raised(work.wait, AbortedError)

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
