"""Our DDP on the gradsync backend: the numbers of gloo, and nothing is copied on the way."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync.backend import _native
from gradsync.testing import WorkerPool

LIMIT = 90.0
OPTIONS = {
    "defaults": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"gradient_as_bucket_view": True, "static_graph": True},
    "unused": {"find_unused_parameters": True},
    "one bucket for each": {"bucket_cap_mb": 1e-5},
    "sum": {"reduce": "sum"},
}


class Net(nn.Module):
    """Small and large gradients, a sparse and a complex one, buffers, one part used in turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(20, 16, sparse=True)
        self.wide = nn.Linear(16, 40_000)  # 2.5 MB
        self.norm = nn.BatchNorm1d(16)
        self.turn = nn.Parameter(torch.ones(16, dtype=torch.complex64))
        self.left = nn.Linear(16, 4)
        self.right = nn.Linear(16, 4)

    def forward(self, indices: Tensor, step: int, *, uses_all: bool) -> Tensor:
        x = self.norm(self.table(indices))
        x = (x * self.turn).abs()
        sides = [self.left, self.right]
        if not uses_all:
            sides = [sides[step % 2]]
        return sum(side(x).square().mean() for side in sides) + self.wide(x).square().mean()


def train(ddp: nn.Module, rank: int, *, uses_all: bool, steps: int = 4) -> list[Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(steps):
        indices = torch.arange(8) * (rank + 2) % 20 + step
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        ddp(indices % 20, step, uses_all=uses_all).backward()
        optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_are_those_of_gloo_bit_by_bit(pool: WorkerPool, name: str) -> None:
    def run(rank: int, world: int) -> None:
        ended = []
        for backend in ("gloo", "gradsync"):
            group = dist.new_group(backend=backend)
            ddp = gradsync.DistributedDataParallel(Net(), process_group=group, **OPTIONS[name])
            ended.append(train(ddp, rank, uses_all=name != "unused"))
            del ddp
            dist.destroy_process_group(group)
        for one, other in zip(*ended, strict=True):
            assert torch.equal(one, other)

    pool.run(run, timeout=LIMIT)


def test_three_ranks_agree_bit_by_bit_and_with_gloo_closely(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ended = []
        for backend in ("gloo", "gradsync"):
            group = dist.new_group(backend=backend)
            ddp = gradsync.DistributedDataParallel(Net(), process_group=group)
            ended.append(train(ddp, rank, uses_all=True))
        for one, other in zip(*ended, strict=True):
            torch.testing.assert_close(one, other)
        for tensor in ended[1]:
            shared = tensor.clone()
            dist.broadcast(shared, 0)
            assert torch.equal(shared, tensor)

    pool.run(run, ranks=3, timeout=LIMIT)


@pytest.mark.parametrize("views", [False, True])
def test_buckets_are_reduced_where_they_are(pool: WorkerPool, views: bool) -> None:
    def run(rank: int, world: int) -> tuple[dict[str, int], int]:
        group = dist.new_group(backend="gradsync")
        assert isinstance(group, gradsync.SharedMemoryGroup)
        model = nn.Sequential(nn.Linear(100, 900), nn.Linear(900, 400))
        ddp = gradsync.DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=views
        )
        for _ in range(2):  # the buckets are laid out anew in between
            ddp(torch.ones(2, 100)).sum().backward()
            ddp.zero_grad()
        before = group.counters()
        for _ in range(3):
            ddp(torch.ones(2, 100)).sum().backward()
            ddp.zero_grad()
        after = group.counters()
        return {key: after[key] - before[key] for key in after}, ddp.stats().buckets

    for counters, buckets in pool.run(run, timeout=LIMIT):
        assert counters["symmetric"] == 3 * buckets
        assert counters["copied"] == 0
        assert counters["copied_bytes"] == 0


def test_large_gradients_need_no_buffer_and_are_those_of_gloo(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> tuple[dict[str, int], int]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(1400, 1400), nn.ReLU(), nn.Linear(1400, 4))
        x = torch.randn(3, 1400, generator=torch.Generator().manual_seed(rank))
        gradients = []
        for backend in ("gloo", "gradsync"):
            group = dist.new_group(backend=backend)
            ddp = gradsync.DistributedDataParallel(copy.deepcopy(model), process_group=group)
            for step in range(5):
                if step == 2 and isinstance(group, gradsync.SharedMemoryGroup):
                    before = group.counters()
                ddp.zero_grad()
                ddp(x * (step + 1)).square().sum().backward()
            gradients.append([p.grad for p in ddp.parameters()])
        for one, other in zip(*gradients, strict=True):
            assert torch.equal(one, other)
        assert isinstance(group, gradsync.SharedMemoryGroup)
        after = group.counters()
        return {key: after[key] - before[key] for key in after}, ddp.stats().buckets

    for counters, buckets in pool.run(run, timeout=LIMIT):
        assert buckets == 2
        assert counters["copied"] == 6  # from the gradient to the slots, and back; and a small one
        assert counters["symmetric"] == 0  # the other bucket is small
        assert 0 < counters["copied_bytes"] - 3 * 4 * 1400**2 < 3 * _native.SMALL_BYTES


def test_steps_may_differ_in_what_is_averaged_and_over_whom(pool: WorkerPool) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(150, 150), nn.Linear(150, 150)

        def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
            return sum(getattr(self, name)(x).square().sum() for name in names)

    def train(rank: int, backend: str) -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        groups = [dist.new_group(backend=backend) for _ in range(2)]
        alone = [dist.new_group([each], backend=backend) for each in range(2)][rank]
        ddp = gradsync.DistributedDataParallel(
            Two(), process_group=groups[0], bucket_cap_mb=0.05, find_unused_parameters=True,
            skip_all_reduce_unused_params=True,
        )  # fmt: skip
        seen = []

        def step(size: float, names: str = "ab") -> None:
            ddp.zero_grad()
            ddp(torch.full((1, 150), size + rank), names).backward()
            seen.append([p.grad.clone() for p in ddp.parameters() if p.grad is not None])

        for names in ("ab", "ab", "a", "ab"):  # the last bucket has only the report in between
            step(1.0, names)
        with ddp.join(divide_by_initial_world_size=False):
            for number in range(1 + 2 * rank):  # rank 1 goes on by itself
                step(2.0 + number)
        for group in (groups[1], alone, groups[0]):
            ddp._update_process_group(group)
            step(3.0)
            step(4.0)
        return seen

    def run(rank: int, world: int) -> None:
        by_gloo, by_ours = train(rank, "gloo"), train(rank, "gradsync")
        assert len(by_gloo) == len(by_ours) == 11 + 2 * rank
        for at, (one, other) in enumerate(zip(by_gloo, by_ours, strict=True)):
            assert len(one) == len(other) > 0
            assert all(map(torch.equal, one, other)), at

    pool.run(run, timeout=LIMIT)


def test_a_rank_that_dies_is_named_with_the_step_and_the_bucket(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> str:
        import os
        import signal

        ddp = gradsync.DistributedDataParallel(nn.Linear(300, 300))
        for _ in range(2):
            ddp(torch.ones(1, 300)).sum().backward()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for _ in range(3):
                ddp(torch.ones(1, 300)).sum().backward()
        except gradsync.PeerLostError as error:
            return "\n".join([str(error), *error.__notes__])
        return "no error"

    survivor, _ = pool.run(run, timeout=LIMIT, backend="gradsync", return_exceptions=True)
    assert "rank 1 (pid " in survivor.value
    assert "bucket 0 of 1" in survivor.value
    assert "weight" in survivor.value
