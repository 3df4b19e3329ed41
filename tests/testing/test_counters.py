from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradsync.testing import Collective, WorkerPool, count_collectives


def test_calls_from_python_are_counted_with_their_bytes(pool: WorkerPool) -> None:
    def issue(rank: int, world: int) -> list[Collective]:
        group = dist.distributed_c10d._get_default_group()
        tensor = torch.ones(6)
        dist.all_reduce(tensor)
        with count_collectives() as counted:
            dist.all_reduce(tensor)
            group.allreduce([tensor.double()], dist.AllreduceOptions()).wait()
            dist.broadcast(tensor.int(), src=0)
            dist.all_gather([torch.empty(6) for _ in range(world)], tensor)
            dist.all_gather_into_tensor(torch.empty(12), tensor)
            dist.barrier()
        dist.all_reduce(tensor)
        assert counted.total == 6
        assert counted.bytes == 24 + 48 + 24 + 24 + 24
        assert counted.by_op["allreduce"] == 2
        return counted.log

    expected = [
        Collective("allreduce", 24, torch.float32),
        Collective("allreduce", 48, torch.float64),
        Collective("broadcast", 24, torch.int32),
        Collective("allgather", 24, torch.float32),
        Collective("allgather_base", 24, torch.float32),
        Collective("barrier", 0, None),
    ]
    assert pool.run(issue) == [expected, expected]


@pytest.mark.parametrize("around", ["whole step", "backward only"])
def test_the_cpp_reducer_of_torch_is_seen_in_backward(pool: WorkerPool, around: str) -> None:
    def step(rank: int, world: int) -> dict[str, object]:
        model = TorchDDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=100)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        if around == "whole step":
            with count_collectives() as counted:
                model(torch.ones(2, 4)).sum().backward()
        else:
            loss = model(torch.ones(2, 4)).sum()
            with count_collectives() as counted:
                loss.backward()
        return {"by_op": dict(counted.by_op), "bytes": counted.bytes}

    assert pool.run(step) == [{"by_op": {"allreduce": 1}, "bytes": 2 * 20 * 4}] * 2


def test_a_group_written_in_python_counts_once_however_it_does_its_work(
    pool: WorkerPool,
) -> None:
    def issue(rank: int, world: int) -> list[Collective]:
        class Forwarding(dist.ProcessGroup):
            def __init__(self, inner: Any) -> None:
                super().__init__(rank, world)
                self.inner = inner

            def allreduce(self, tensors: Any, opts: Any = None) -> Any:
                self.inner.broadcast([tensors[0].clone()], dist.BroadcastOptions()).wait()
                return self.inner.allreduce(tensors, opts or dist.AllreduceOptions())

        method = Forwarding.allreduce
        group = Forwarding(dist.distributed_c10d._get_default_group())
        tensor = torch.ones(3)
        with count_collectives() as counted:
            group.allreduce([tensor]).wait()
            group.allreduce(tensors=[tensor]).wait()
        assert Forwarding.allreduce is method
        assert tensor.tolist() == [4.0] * 3
        return counted.log

    assert pool.run(issue) == [[Collective("allreduce", 12, torch.float32)] * 2] * 2


def test_other_threads_are_not_counted(pool: WorkerPool) -> None:
    def issue(rank: int, world: int) -> int:
        with count_collectives() as counted:
            thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
            thread.start()
            thread.join(timeout=20)
        return counted.total

    assert pool.run(issue) == [0, 0]


def test_clear_starts_a_new_count(pool: WorkerPool) -> None:
    def issue(rank: int, world: int) -> int:
        with count_collectives() as counted:
            dist.all_reduce(torch.ones(1))
            counted.clear()
            dist.all_reduce(torch.ones(1))
        return counted.total

    assert pool.run(issue, ranks=1) == [1]
