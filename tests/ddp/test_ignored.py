"""Parameters and buffers that DDP is told to leave alone."""

from __future__ import annotations

import pytest
import torch
from replicas import CLASSES, Count, OurDDP, assert_same, batch, caught, gradients
from torch import Tensor, nn

from gradsync.testing import WorkerPool

LIMIT = 40.0


class Nested(nn.Module):
    """Parameters and a buffer at the root, and the same in a submodule."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.scale = nn.Parameter(torch.rand(4))
        self.shift = nn.Parameter(torch.rand(4))
        self.register_buffer("offset", torch.rand(4))
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale + self.shift + self.offset


IGNORED = ["scale", "offset", "inner.0.weight", "inner.1.running_mean"]


class TestIgnored:
    @pytest.mark.parametrize("views", [False, True])
    def test_root_and_nested_names_are_left_alone_and_the_rest_is_not(
        self, pool: WorkerPool, views: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            models = []
            for cls in CLASSES:
                module, mine, first = Nested(rank), Nested(rank), Nested(0)
                # torch's reducer knows a parameter of the root only with a dot before it.
                names = IGNORED if cls is OurDDP else [*IGNORED, ".scale"]
                cls._set_params_and_buffers_to_ignore_for_model(module, names)
                ddp = cls(module, gradient_as_bucket_view=views)
                models.append(ddp)
                assert set(ddp.parameters_to_ignore) == set(names)
                for name, value in module.state_dict().items():
                    source = mine if name in IGNORED else first
                    assert torch.equal(value, source.state_dict()[name]), (cls, name)
            for step in range(3):
                for ddp in models:
                    ddp.zero_grad()
                    ddp(batch(rank, step)).square().sum().backward()
                assert_same(*map(gradients, models), hint=step)
            assert_same(models[0].state_dict(), models[1].state_dict())
            gathered = [None] * world
            ours = models[1].module
            torch.distributed.all_gather_object(
                gathered, (gradients(ours), ours.offset, ours.inner[1].running_mean)
            )
            (first, offset, mean), (second, other_offset, other_mean) = gathered
            for name in first:
                assert torch.equal(first[name], second[name]) == (name not in IGNORED), name
            assert not torch.equal(offset, other_offset)
            assert not torch.equal(mean, other_mean)

        pool.run(run, timeout=LIMIT)

    def test_gradients_of_ignored_parameters_are_those_of_this_rank(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            module = nn.Linear(4, 2)
            OurDDP._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
            ddp = OurDDP(module)
            ddp(torch.full((1 + rank, 4), 1.0)).sum().backward()
            assert torch.equal(module.bias.grad, torch.full((2,), 1.0 + rank))
            assert torch.equal(module.weight.grad, torch.full((2, 4), 1.5))

        pool.run(run, timeout=LIMIT)

    def test_an_ignored_parameter_may_differ_in_shape_and_go_unused(self, pool: WorkerPool) -> None:
        class Different(nn.Module):
            def __init__(self, size: int) -> None:
                super().__init__()
                self.own = nn.Parameter(torch.rand(size))
                self.linear = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.linear(x)

        def run(rank: int, world: int) -> None:
            module = Different(2 + rank)
            OurDDP._set_params_and_buffers_to_ignore_for_model(module, ["own"])
            ddp = OurDDP(module)
            for step in range(3):
                ddp(batch(rank, step)).sum().backward()
            assert module.own.grad is None

        pool.run(run, timeout=LIMIT)

    def test_a_shared_parameter_is_reduced_under_the_name_not_ignored(
        self, pool: WorkerPool
    ) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(7)
                self.first = nn.Linear(4, 4, bias=False)
                self.second = nn.Linear(4, 4, bias=False)
                self.second.weight = self.first.weight

            def forward(self, x: Tensor) -> Tensor:
                return self.second(self.first(x))

        def run(rank: int, world: int, ignored: list[str]) -> Tensor:
            module = Tied()
            OurDDP._set_params_and_buffers_to_ignore_for_model(module, ignored)
            ddp = OurDDP(module)
            ddp(batch(rank)).sum().backward()
            return module.first.weight.grad

        for ignored in (["second.weight"], ["first.weight"]):
            first, second = pool.run(run, args=(ignored,), timeout=LIMIT)
            assert torch.equal(first, second), ignored

    def test_ignoring_every_parameter_leaves_nothing_to_do(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            module = nn.Linear(4, 2)
            OurDDP._set_params_and_buffers_to_ignore_for_model(module, ["weight", "bias"])
            error = caught(lambda: OurDDP(module), RuntimeError)
            assert "doesn't have any parameter that requires a gradient" in str(error)

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_a_model_whose_only_buffer_is_ignored_issues_no_broadcast(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            module = nn.Sequential(nn.Linear(4, 4))
            module.register_buffer("own", torch.rand(3))
            OurDDP._set_params_and_buffers_to_ignore_for_model(module, ["own"])
            ddp = OurDDP(module)
            count = Count()
            ddp(batch(rank))
            assert count() == 0

        pool.run(run, timeout=LIMIT)
