"""Module buffers: rank 0's before each training forward, with few collectives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replicas import (
    CLASSES,
    Count,
    OurDDP,
    assert_equal_on_all_ranks,
    assert_same,
    batch,
    gradients,
    quiet,
    weights,
)
from torch import Tensor, nn

from gradsync.testing import WorkerPool

LIMIT = 40.0


class WithBuffers(nn.Module):
    """Buffers of several dtypes; the forward changes them by what this rank sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("total", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("short", torch.zeros(3, dtype=torch.float16))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("replaced", torch.zeros(4))
        self.register_buffer("strided", torch.zeros(6, 4)[::2, ::2])
        self.register_buffer("complex", torch.zeros(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1 + (x[0, 0] > 0)
        self.flags ^= x.flatten()[:5] > 0
        self.total += x.detach().sum(0)
        self.short += x.detach()[0, :3].half()
        self.strided += x.detach()[0, 0]
        self.complex += x.detach()[0, 0] * 1j
        self.replaced = self.replaced + x.detach()[0]  # another tensor each time
        return self.linear(x) + self.replaced


class SavesBuffer(nn.Module):
    """Multiplies by a buffer, which autograd saves for backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def convolutional() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    )


def images(rank: int, step: int) -> Tensor:
    return batch(rank, step, rows=6, width=2 * 4 * 4).view(6, 2, 4, 4)


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.named_buffers()}


class TestTraining:
    @pytest.mark.parametrize("options", [{}, {"forward_sync_buffers": False}])
    @pytest.mark.parametrize("ranks", [2, 3])
    def test_batch_norm_trains_to_the_same_state_as_with_torch(
        self, pool: WorkerPool, options: dict[str, object], ranks: int
    ) -> None:
        def run(rank: int, world: int) -> None:
            models = [cls(convolutional(), **options) for cls in CLASSES]
            for ddp in models:
                optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
                for step in range(4):
                    optimizer.zero_grad()
                    ddp(images(rank, step)).square().mean().backward()
                    optimizer.step()
                ddp.eval()
                with torch.no_grad():
                    ddp(images(rank, 9))
            if world == 2:
                assert_same(weights(models[0]), weights(models[1]))
            else:  # the order of additions depends on where gloo's ring cuts a bucket
                torch.testing.assert_close(weights(models[0]), weights(models[1]))

        pool.run(run, ranks=ranks, timeout=LIMIT)

    def test_buffers_of_every_kind_are_rank_0s_at_each_forward(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            models = [cls(WithBuffers()) for cls in CLASSES]
            local = WithBuffers()  # what rank 0 alone would have
            for step in range(4):
                for ddp in models:
                    ddp(batch(rank, step)).sum().backward()
                assert_same(buffers(models[0]), buffers(models[1]), hint=step)
                if rank == 0:
                    local(batch(0, step))
                    assert_same(buffers(models[1].module), buffers(local), hint=step)
            models[1](batch(0, 9))  # the same input: so buffers are the same after it
            assert_equal_on_all_ranks(b.to(torch.complex64) for b in models[1].buffers())

        pool.run(run, timeout=LIMIT)

    def test_a_buffer_put_in_place_of_another_between_steps_is_seen(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(SavesBuffer())
            ddp(batch(rank)).sum().backward()
            ddp.module.scale = torch.full((4,), 5.0 + rank)
            ddp.module.register_buffer("late", torch.tensor([1.0 + rank]))
            ddp(batch(rank)).sum().backward()
            assert torch.equal(ddp.module.scale, torch.full((4,), 5.0))
            assert torch.equal(ddp.module.late, torch.tensor([1.0]))

        pool.run(run, timeout=LIMIT)

    def test_two_forwards_may_come_before_one_backward_with_a_saved_buffer(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            # Batch normalisation in evaluation mode saves its running statistics.
            norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
            for module in (SavesBuffer(), norm):
                ddp = OurDDP(module)
                loss = ddp(batch(rank)).sum() + ddp(batch(rank, 1)).sum()
                loss.backward()
                assert_equal_on_all_ranks(p.grad for p in ddp.parameters())
            local = SavesBuffer()
            (local(batch(rank)).sum() + local(batch(rank, 1)).sum()).backward()
            ddp = OurDDP(SavesBuffer())
            first, second = ddp(batch(rank)).sum(), ddp(batch(rank, 1)).sum()
            (first + second).backward()
            mean = local.linear.weight.grad.clone()
            torch.distributed.all_reduce(mean)
            torch.testing.assert_close(ddp.module.linear.weight.grad, mean / world)

        pool.run(run, timeout=LIMIT)


class TestSettings:
    def test_without_forward_sync_buffers_start_equal_and_then_go_their_own_way(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            for cls in CLASSES:
                module = SavesBuffer()
                module.scale.fill_(1.0 + rank)
                ddp = cls(module, forward_sync_buffers=False)
                assert torch.equal(module.scale, torch.ones(4)), cls
                module.scale.fill_(1.0 + rank)
                ddp(batch(rank)).sum().backward()
                assert torch.equal(module.scale, torch.full((4,), 1.0 + rank)), cls

        pool.run(run, timeout=LIMIT)

    def test_broadcast_buffers_false_leaves_them_alone_from_the_start(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            for cls in CLASSES:
                for setting in (False, True):
                    module = SavesBuffer()
                    module.scale.fill_(1.0 + rank)
                    with quiet():
                        ddp = cls(module, broadcast_buffers=setting)
                    assert ddp.broadcast_buffers is setting
                    assert ddp.forward_sync_buffers is setting
                    expected = 1.0 if setting else 1.0 + rank
                    assert torch.equal(module.scale, torch.full((4,), expected)), cls
                    module.scale.fill_(3.0 + rank)
                    ddp(batch(rank)).sum().backward()
                    expected = 3.0 if setting else 3.0 + rank
                    assert torch.equal(module.scale, torch.full((4,), expected)), cls

        pool.run(run, timeout=LIMIT)

    def test_ignored_buffers_are_left_alone(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            module = nn.Sequential(SavesBuffer(), SavesBuffer())
            for each in module:
                each.scale.fill_(1.0 + rank)
            OurDDP._set_params_and_buffers_to_ignore_for_model(module, ["1.scale"])
            ddp = OurDDP(module)
            ddp(batch(rank)).sum().backward()
            assert torch.equal(module[0].scale, torch.ones(4))
            assert torch.equal(module[1].scale, torch.full((4,), 1.0 + rank))

        pool.run(run, timeout=LIMIT)


class TestCollectives:
    def test_all_buffers_travel_in_one_collective_a_forward(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            counts = {}
            for module in (nn.Linear(4, 4), WithBuffers(), SavesBuffer()):
                ddp = OurDDP(module)
                for step in range(3):
                    ddp(batch(rank, step)).sum().backward()
                count = Count()
                ddp(batch(rank)).sum()
                counts[type(module)] = count()
            assert counts == {nn.Linear: 0, WithBuffers: 1, SavesBuffer: 1}

        pool.run(run, timeout=LIMIT)

    def test_there_is_one_where_torch_has_one_and_none_where_torch_has_none(
        self, pool: WorkerPool
    ) -> None:
        def in_no_sync(ddp: nn.Module, x: Tensor) -> None:
            with ddp.no_sync():
                ddp(x).sum().backward()

        def training(ddp: nn.Module, x: Tensor) -> None:
            ddp(x).sum().backward()

        def without_backward(ddp: nn.Module, x: Tensor) -> None:
            ddp(x)

        def in_no_grad(ddp: nn.Module, x: Tensor) -> None:
            with torch.no_grad():
                ddp(x)

        def in_inference_mode(ddp: nn.Module, x: Tensor) -> None:
            with torch.inference_mode():
                ddp(x)

        def in_eval(ddp: nn.Module, x: Tensor) -> None:
            ddp.eval()
            with torch.no_grad():
                ddp(x)
            ddp.train()

        def in_eval_with_gradients(ddp: nn.Module, x: Tensor) -> None:
            ddp.eval()
            ddp(x)
            ddp.train()

        program: list[Callable[[nn.Module, Tensor], None]] = [
            training,
            training,
            training,
            in_eval,
            in_eval,
            training,
            in_no_grad,
            in_no_grad,
            in_no_sync,
            in_no_sync,
            training,
            in_inference_mode,
            in_inference_mode,
            without_backward,
            in_eval_with_gradients,
            in_no_grad,
            training,
            in_no_sync,
            training,
        ]

        def run(rank: int, world: int) -> None:
            issued = []
            for cls in CLASSES:
                ddp = cls(SavesBuffer())
                training(ddp, batch(rank))
                training(ddp, batch(rank))  # buckets are rebuilt by now
                count = Count()
                issued.append([])
                for call in program:
                    call(ddp, batch(rank))
                    issued[-1].append((call.__name__, count()))
            torchs, ours = issued
            # A training step of either is one broadcast and one all-reduce.
            assert ours == torchs

        pool.run(run, timeout=LIMIT)

    def test_evaluation_uses_the_buffers_that_training_left(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            models = [cls(convolutional()) for cls in CLASSES]
            for ddp in models:
                for step in range(2):
                    ddp(images(rank, step)).sum().backward()
                ddp.eval()
            for _ in range(2):
                with torch.no_grad():
                    left, right = (ddp(images(rank, 5)) for ddp in models)
                assert torch.equal(left, right)
                assert_same(buffers(models[0]), buffers(models[1]))

        pool.run(run, timeout=LIMIT)

    def test_a_module_without_buffers_issues_no_collective_in_its_forward(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(nn.Linear(4, 4))
            count = Count()
            outputs = [ddp(batch(rank, step)) for step in range(3)]
            assert count() == 0
            assert not ddp.will_sync_module_buffers()
            outputs[-1].sum().backward()
            assert gradients(ddp)

        pool.run(run, timeout=LIMIT)


def test_an_evaluation_in_inference_mode_may_come_before_training(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = OurDDP(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        with torch.inference_mode():
            ddp(torch.ones(2, 3))
        for _ in range(3):
            ddp(torch.randn(4, 3)).sum().backward()

    pool.run(run, timeout=40)


def test_a_lone_buffer_of_any_dtype_is_broadcast(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> list[int]:
        model = nn.Linear(2, 2)
        model.register_buffer("counts", torch.full((3,), rank + 5, dtype=torch.int16))
        return OurDDP(model).module.counts.tolist()

    assert pool.run(run, timeout=40) == [[5, 5, 5]] * 2
