"""Parameters that get no gradient: allowed, and not allowed."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from replicas import CLASSES, Branches, OurDDP, assert_same, batch, caught, gradients
from torch import Tensor, nn

from gradsync import UnusedParametersError
from gradsync.testing import WorkerPool

LIMIT = 40.0


class ReturnsNoGradient(torch.autograd.Function):
    """Passes its input on; says in backward that there is no gradient for it."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        return x + weight.sum()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Undefined(nn.Module):
    """Reaches ``weight`` on its way back with an undefined gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, define: bool) -> Tensor:
        x = self.linear(x)
        return x + self.weight.sum() if define else ReturnsNoGradient.apply(x, self.weight)


def pair(**options: object) -> list[nn.Module]:
    return [cls(Branches(), find_unused_parameters=True, **options) for cls in CLASSES]


@pytest.mark.parametrize("views", [False, True])
class TestAllowed:
    def test_unused_on_all_ranks_keeps_none_and_keeps_the_old_gradient(
        self, pool: WorkerPool, views: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(Branches(), find_unused_parameters=True, gradient_as_bucket_view=views)
            for _ in range(2):
                ddp(batch(rank), 0).sum().backward()
                left_out = ddp.module.branch[1]
                assert left_out.weight.grad is None
                assert left_out.bias.grad is None
            old = torch.full((4, 4), 1.0 + rank)
            left_out.weight.grad = old
            ddp(batch(rank), 0).sum().backward()
            assert torch.equal(left_out.weight.grad, torch.full((4, 4), 1.0 + rank))
            assert left_out.bias.grad is None
            if not views:
                assert left_out.weight.grad is old

        pool.run(run, timeout=LIMIT)

    def test_unused_on_one_rank_gets_the_average_with_zeros(
        self, pool: WorkerPool, views: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            torchs, ours = pair(gradient_as_bucket_view=views)
            use = (0, 1) if rank == 0 else (0,)
            for ddp in (torchs, ours):
                ddp(batch(rank), *use).sum().backward()
            assert_same(gradients(torchs), gradients(ours))
            local = Branches()
            local(batch(0), 0, 1).sum().backward()
            expected = local.branch[1].weight.grad / 2
            assert torch.equal(ours.module.branch[1].weight.grad, expected)

        pool.run(run, timeout=LIMIT)

    def test_what_is_used_may_change_with_every_step_and_rank(
        self, pool: WorkerPool, views: bool
    ) -> None:
        def run(rank: int, world: int, set_to_none: bool) -> None:
            models = [
                cls(
                    Branches(3),
                    find_unused_parameters=True,
                    gradient_as_bucket_view=views,
                    bucket_cap_mb=0.00005,
                )
                for cls in CLASSES
            ]
            optimizers = [torch.optim.SGD(m.parameters(), 0.01, momentum=0.9) for m in models]
            plans = [((0, 1), (2,)), ((), (0, 1, 2)), ((), ()), ((1,), (1,)), ((2, 0), (0, 2))]
            for step, plan in enumerate(plans * 2):
                for ddp, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad(set_to_none=set_to_none)
                    ddp(batch(rank, step), *plan[rank]).square().mean().backward()
                assert_same(*map(gradients, models), hint=(step, set_to_none))
                for optimizer in optimizers:
                    optimizer.step()
            assert_same(models[0].state_dict(), models[1].state_dict())

        for set_to_none in (True, False):
            pool.run(run, args=(set_to_none,), timeout=LIMIT)

    def test_gradients_accumulate_over_steps_without_zero_grad(
        self, pool: WorkerPool, views: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            torchs, ours = pair(gradient_as_bucket_view=views)
            # Branch 1 is used by all, then by rank 1 alone, then by nobody.
            for step, used in enumerate([(0, 1), (0, 1) if rank else (0,), (0,)]):
                for ddp in (torchs, ours):
                    ddp(batch(rank, step), *used).sum().backward()
                if step < 2 or not views:  # torch averages an old gradient that is a view
                    assert_same(gradients(torchs), gradients(ours), hint=step)

        pool.run(run, timeout=LIMIT)

    def test_used_only_inside_no_sync_is_reduced_all_the_same(
        self, pool: WorkerPool, views: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            torchs, ours = pair(gradient_as_bucket_view=views)
            for step in range(2):
                for ddp in (torchs, ours):
                    ddp.zero_grad()
                    with ddp.no_sync():
                        ddp(batch(rank, step), 0, 1).sum().backward()
                    ddp(batch(rank, step + 10), 0).sum().backward()
                assert_same(gradients(torchs), gradients(ours), hint=step)
                local = Branches()
                local.load_state_dict(ours.module.state_dict())
                for each in range(world):
                    local(batch(each, step), 0, 1).sum().backward()
                    local(batch(each, step + 10), 0).sum().backward()
                for name, param in local.named_parameters():
                    got = ours.module.get_parameter(name).grad
                    torch.testing.assert_close(got, param.grad / world)

        pool.run(run, timeout=LIMIT)

    def test_used_in_no_sync_on_one_rank_only_is_reduced_on_all(
        self, pool: WorkerPool, views: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            torchs, ours = pair(gradient_as_bucket_view=views)
            for ddp in (torchs, ours):
                with ddp.no_sync():
                    ddp(batch(rank), *((0, 1) if rank else (0,))).sum().backward()
                ddp(batch(rank, 1), 0).sum().backward()
            assert_same(gradients(torchs), gradients(ours))

        pool.run(run, timeout=LIMIT)

    def test_an_undefined_gradient_counts_as_none(self, pool: WorkerPool, views: bool) -> None:
        def run(rank: int, world: int) -> None:
            models = [
                cls(Undefined(), find_unused_parameters=True, gradient_as_bucket_view=views)
                for cls in CLASSES
            ]
            for ddp in models:
                ddp(batch(rank), define=rank == 0).sum().backward()
            torchs, ours = models
            assert torch.equal(ours.module.weight.grad, torchs.module.weight.grad)
            assert torch.equal(ours.module.weight.grad, torch.full((3,), 6.0))
            ddp = OurDDP(Undefined(), find_unused_parameters=True, gradient_as_bucket_view=views)
            ddp(batch(rank), define=False).sum().backward()
            assert ddp.module.weight.grad is None

        pool.run(run, timeout=LIMIT)

    def test_a_rank_that_uses_no_parameter_at_all_takes_part(
        self, pool: WorkerPool, views: bool
    ) -> None:
        class Skips(Branches):
            def forward(self, x: Tensor, *use: int) -> Tensor:
                return super().forward(x, *use) if use else x * 1.0

        def run(rank: int, world: int) -> None:  # torch's DDP cannot
            ddp = OurDDP(Skips(), find_unused_parameters=True, gradient_as_bucket_view=views)
            local = Skips()
            for step in range(3):
                idle = step % 2
                ddp.zero_grad()
                x = batch(rank, step).requires_grad_()
                ddp(x, *((0, 1) if rank != idle else ())).sum().backward()
                assert x.grad is not None
                local.zero_grad()
                local(batch(1 - idle, step), 0, 1).sum().backward()
                for name, param in local.named_parameters():
                    assert torch.equal(ddp.module.get_parameter(name).grad, param.grad / 2)

        pool.run(run, timeout=LIMIT)


class TestSkippedBuckets:
    def test_skip_all_reduce_unused_params_gives_the_same_gradients(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            models = [
                cls(
                    Branches(3),
                    find_unused_parameters=True,
                    skip_all_reduce_unused_params=skip,
                    bucket_cap_mb=0.00005,
                )
                for cls in CLASSES
                for skip in (False, True)
            ]
            for step in range(3):
                for ddp in models:
                    ddp.zero_grad(set_to_none=step != 2)
                    ddp(batch(rank, step), 0).sum().backward()
                for ddp in models[1:]:
                    assert_same(gradients(models[0]), gradients(ddp), hint=step)

        pool.run(run, timeout=LIMIT)

    def test_it_issues_fewer_collectives(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> list[int]:
            from replicas import Count

            counts = []
            for skip in (False, True):
                ddp = OurDDP(
                    Branches(3),
                    find_unused_parameters=True,
                    skip_all_reduce_unused_params=skip,
                    bucket_cap_mb=0.00005,
                )
                ddp(batch(rank), 0).sum().backward()
                count = Count()
                ddp(batch(rank), 0).sum().backward()
                counts.append(count())
            return counts

        for all_of_them, without_unused in pool.run(run, timeout=LIMIT):
            assert without_unused < all_of_them


class TestNotAllowed:
    def test_every_rank_gets_the_error_with_names_and_ranks(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> tuple[str, float]:
            ddp = OurDDP(Branches())
            ddp(batch(rank), *((0, 1) if rank != 1 else (0,))).sum().backward()
            began = time.monotonic()
            error = caught(lambda: ddp(batch(rank), 0, 1), RuntimeError)
            assert isinstance(error, UnusedParametersError)
            return str(error), time.monotonic() - began

        for ranks in (2, 3):
            for text, seconds in pool.run(run, ranks=ranks, timeout=LIMIT):
                assert seconds < 5
                assert "Expected to have finished reduction in the prior iteration" in text
                assert "find_unused_parameters=True" in text
                assert "did not receive grad for rank 1: 4 5" in text
                assert "branch.1.weight" in text
                assert "branch.1.bias" in text
                assert "rank 0" not in text
                assert "branch.0" not in text
                assert "stem" not in text

    def test_different_parameters_on_different_ranks_are_all_named(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> str:
            ddp = OurDDP(Branches())
            ddp(batch(rank), rank).sum().backward()
            return str(caught(lambda: ddp(batch(rank), 0, 1), UnusedParametersError))

        for text in pool.run(run, timeout=LIMIT):
            assert "did not receive grad for rank 0: branch.1.weight, branch.1.bias" in text
            assert "did not receive grad for rank 1: branch.0.weight, branch.0.bias" in text

    def test_unused_on_all_ranks_is_an_error_too_also_after_good_steps(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int, views: bool) -> None:
            ddp = OurDDP(Branches(), gradient_as_bucket_view=views)
            for step in range(3):
                ddp.zero_grad()
                ddp(batch(rank, step), 0, 1).sum().backward()
            ddp.zero_grad()
            ddp(batch(rank), 0).sum().backward()
            error = caught(lambda: ddp(batch(rank), 0, 1), UnusedParametersError)
            assert "branch.1.weight" in str(error)

        for views in (False, True):
            pool.run(run, args=(views,), timeout=LIMIT)

    def test_after_the_error_training_can_go_on(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(Branches())
            ddp(batch(rank), *((0, 1) if rank else (0,))).sum().backward()
            caught(lambda: ddp(batch(rank), 0, 1), UnusedParametersError)
            reference = OurDDP(Branches())
            for model in (ddp, reference):
                model.zero_grad()
                model(batch(rank), 0, 1).sum().backward()
            assert_same(gradients(ddp), gradients(reference))

        pool.run(run, timeout=LIMIT)

    def test_one_process_alone_is_told_as_well(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(Branches())
            ddp(batch(rank), 0).sum().backward()
            error = caught(lambda: ddp(batch(rank), 0, 1), UnusedParametersError)
            assert "rank 0: branch.1.weight, branch.1.bias" in str(error)

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_an_output_left_out_of_the_loss_is_noticed(self, pool: WorkerPool) -> None:
        class TwoHeads(Branches):
            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                x = self.stem(x)
                return self.branch[0](x), self.branch[1](x)

        def run(rank: int, world: int) -> str:
            ddp = OurDDP(TwoHeads())
            ddp(batch(rank))[0].sum().backward()
            return str(caught(lambda: ddp(batch(rank)), UnusedParametersError))

        for text in pool.run(run, timeout=LIMIT):
            assert "branch.1.weight" in text
            assert "branch.0.weight" not in text

    def test_forward_without_backward_is_no_error(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(Branches())
            for step in range(3):
                ddp(batch(rank, step), 0)
            ddp(batch(rank), 0, 1).sum().backward()
            ddp(batch(rank), 0, 1)
            dist.barrier()

        pool.run(run, timeout=LIMIT)
