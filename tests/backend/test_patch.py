"""``patch_torch(backend=True)``, and groups for several devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import LIMIT, raised, still_works
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import gradsync
from gradsync import ArgumentError, DeadlineError, SharedMemoryGroup
from gradsync.testing import WorkerPool

SECOND = timedelta(seconds=1)


@contextmanager
def served(rank: int, world: int, backend: str | None) -> Iterator[dist.ProcessGroup]:
    """A default group that a program asks torch for, while torch is patched."""
    gradsync.patch_torch(backend=True)
    try:
        method = os.environ["GRADSYNC_INIT_METHOD"]
        dist.init_process_group(
            backend, init_method=method, rank=rank, world_size=world, timeout=20 * SECOND
        )
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
        dist.destroy_process_group()
    finally:
        gradsync.unpatch_torch()


def run(pool: WorkerPool, body: Callable[..., object], ranks: int, *args: object) -> list:
    return pool.run(body, ranks=ranks, backend=None, timeout=LIMIT, args=args)


@pytest.mark.parametrize(
    ("asked", "named"),
    [("gloo", "gloo"), (None, "undefined"), ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl")],
    ids=["by name", "by default", "for the CPU"],
)
def test_whoever_asks_for_gloo_gets_shared_memory_under_gloos_name(
    pool: WorkerPool, asked: str | None, named: str
) -> None:
    def body(rank: int, world: int) -> None:
        with served(rank, world, asked) as group:
            assert isinstance(group, SharedMemoryGroup)
            assert dist.get_backend() == named
            assert group.name() == "gloo"
            still_works(rank, world)
            assert group.counters()["copied_bytes"] > 0
            group.monitored_barrier(20 * SECOND)
            assert group.getBackendName() == "gradsync"  # torch's C++ trusts in that name
            TorchDDP(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()

    run(pool, body, 3)


def test_our_ddp_averages_there_as_on_gloo_for_many_steps(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        with served(rank, world, "gloo"):
            ddp = gradsync.DistributedDataParallel(torch.nn.Linear(3, 2))
            for step in range(40):  # on gloo the first ones try different routes
                ddp.zero_grad()
                ddp(torch.full((1, 3), step + rank + 1.0)).sum().backward()
                expected = torch.full((2, 3), step + (world + 1) / 2)
                assert torch.equal(ddp.module.weight.grad, expected), step

    run(pool, body, 2)


def test_new_groups_are_ours_and_the_rest_of_torch_knows_them_as_gloos(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        with served(rank, world, "gloo"):
            pair = dist.new_group([1, 2])
            named = dist.new_group(backend="gloo")
            assert dist.get_backend(named) == "gloo"
            assert isinstance(named, SharedMemoryGroup)
            still_works(rank, world, named)
            if rank:
                assert isinstance(pair, SharedMemoryGroup)
                assert [member.name for member in pair.members] == [1, 2]
                tensor = torch.full((3,), float(rank))
                dist.all_reduce(tensor, group=pair)
                assert tensor[0] == 3
            dist.monitored_barrier()
            dist.distributed_c10d._set_pg_timeout(7 * SECOND)
            assert dist.group.WORLD._timeout == 7 * SECOND
            if rank == 0:
                text = raised(lambda: dist.monitored_barrier(timeout=SECOND / 4), DeadlineError)
                assert "Rank 1 failed to pass monitoredBarrier" in text
            dist.barrier()

    run(pool, body, 3)


def test_afterwards_gloo_is_gloo_again(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        with served(rank, world, "gloo"):
            gradsync.patch_torch()  # once more, and without the backend: nothing is undone
            assert isinstance(dist.new_group(), SharedMemoryGroup)
            gradsync.unpatch_torch()
            group = dist.new_group()
            assert not isinstance(group, SharedMemoryGroup)
            assert isinstance(group._get_backend(torch.device("cpu")), ProcessGroupGloo)
            still_works(rank, world, group)
            still_works(rank, world)  # made before, and still ours

    run(pool, body, 2)


def test_torchs_checks_of_collectives_do_not_stand_in_the_way(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        with served(rank, world, "gloo"):
            still_works(rank, world)
        gradsync.patch_torch(backend=True)
        try:
            store = dist.HashStore() if world == 1 else None
            inner = ProcessGroupGloo(store, rank, world, SECOND)
            wrapper = dist.distributed_c10d._create_process_group_wrapper(
                inner, "x", store, rank, world
            )
            assert type(wrapper).__name__ == "_ProcessGroupWrapper"
        finally:
            gradsync.unpatch_torch()

    run(pool, body, 1)


@pytest.mark.parametrize("order", ["cpu:gradsync,cuda:nccl", "cpu:gradsync,cuda:gloo"])
def test_a_group_with_a_backend_for_another_device_works_on_this_one(
    pool: WorkerPool, order: str
) -> None:
    def body(rank: int, world: int) -> None:
        group = dist.group.WORLD
        assert isinstance(group, SharedMemoryGroup)
        assert group._device_types == [torch.device("cpu"), torch.device("cuda")]
        assert group._get_backend(torch.device("cpu")) is group
        still_works(rank, world)
        gathered: list = [None] * world
        dist.all_gather_object(gathered, rank)
        assert gathered == list(range(world))

    pool.run(body, ranks=2, backend=order, timeout=LIMIT)


def test_tensors_of_a_device_that_nobody_asked_a_backend_for_are_a_clear_error(
    pool: WorkerPool,
) -> None:
    def body(rank: int, world: int) -> str:
        text = raised(lambda: dist.all_reduce(torch.ones(3, device="meta")), ArgumentError)
        still_works(rank, world)
        return text

    for text in pool.run(body, ranks=2, backend="gradsync", timeout=LIMIT):
        assert "meta" in text
        assert "cpu:gradsync,cuda:nccl" in text


def test_tensors_of_a_device_go_to_the_engine_that_was_asked_for(
    pool: WorkerPool,
) -> None:
    """Without a GPU: NCCL is feigned, and its device is one that every machine has."""

    def body(rank: int, world: int) -> None:
        calls: list[tuple[object, ...]] = []
        options_class = SimpleNamespace

        class Nccl:
            Options = options_class
            supports_coalescing = True

            def __init__(self, store: object, rank: int, size: int, options: object) -> None:
                calls.append(("made", rank, size, options.group_name, options._timeout))

            def __getattr__(self, name: str) -> Callable[..., object]:
                return lambda *args: calls.append((name, *args))

        with (
            mock.patch.object(dist, "ProcessGroupNCCL", Nccl, create=True),
            mock.patch.object(dist, "is_nccl_available", return_value=True),
        ):
            group = dist.group.WORLD
            tensor = torch.ones(3, device="meta")
            group.allreduce([tensor])
            group.broadcast([tensor])
            group._allgather_base(torch.ones(6, device="meta"), tensor)
            group.send([tensor], 1 - rank, 5)
            assert group._get_backend(torch.device("meta")).supports_coalescing
            group._start_coalescing(torch.device("meta"))
            still_works(rank, world)
        assert calls[0][:4] == ("made", rank, world, group.group_name)
        assert [call[0] for call in calls[1:]] == [
            "_set_sequence_number_for_group",
            "allreduce",
            "broadcast",
            "_allgather_base",
            "send",
            "_start_coalescing",
        ]
        group._engines._made.clear()

    pool.run(body, ranks=2, backend="cpu:gradsync,meta:nccl", timeout=LIMIT)
