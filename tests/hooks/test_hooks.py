"""What every compression hook has to do, on torch's class and on ours."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compressors import (
    BOUNDS,
    CLASSES,
    FEEDBACK,
    MAKERS,
    SMALL_BUCKETS,
    Model,
    backward,
    equal_on_all_ranks,
    exact_gradients,
    inputs,
)
from torch import Tensor, nn

import gradsync
from gradsync import hooks
from gradsync.testing import WorkerPool, count_collectives

LIMIT = 60.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_are_the_mean_within_bounds_and_the_same_bits_on_all_ranks(
    pool: WorkerPool, ranks: int, dtype: torch.dtype
) -> None:
    def run(rank: int, world: int) -> None:
        for cls in CLASSES:
            for name, make in MAKERS.items():
                ddp = cls(Model(dtype), **SMALL_BUCKETS)
                ddp.register_comm_hook(None, make())
                for step in range(3):
                    x = inputs(rank, step, dtype)
                    exact = exact_gradients(ddp.module, x)
                    found = backward(ddp, x)
                    assert equal_on_all_ranks(found), (cls, name, step)
                    if step == 0 and name in BOUNDS:
                        bound = 2 * BOUNDS[name] + torch.finfo(dtype).eps
                        for a, b in zip(found, exact, strict=True):
                            limit = bound * max(b.abs().max().item(), 1e-2) if b.numel() else 0
                            torch.testing.assert_close(a.double(), b, rtol=0, atol=limit)

    pool.run(run, ranks=ranks, timeout=LIMIT)


@pytest.mark.parametrize("ranks", [2, 3])
def test_error_feedback_makes_the_sum_over_steps_exact(pool: WorkerPool, ranks: int) -> None:
    """What a step leaves out is sent later: the error of the sum stays, that of the mean goes."""

    def run(rank: int, world: int) -> None:
        for cls in CLASSES if world == 2 else CLASSES[1:]:
            for name in FEEDBACK:
                ddp = cls(Model(), **SMALL_BUCKETS)
                ddp.register_comm_hook(None, MAKERS[name]())
                exact = exact_gradients(ddp.module, inputs(rank, 0))  # the same in each step
                sums = [torch.zeros_like(gradient) for gradient in exact]
                errors = {}
                for step in range(1, 41):
                    for total, found in zip(sums, backward(ddp, inputs(rank, 0)), strict=True):
                        total += found
                    if step in (5, 40):
                        errors[step] = max(
                            float((t / step - e).norm() / e.norm())
                            for t, e in zip(sums, exact, strict=True)
                            if e.numel()
                        )
                assert errors[40] < max(0.35 * errors[5], 1e-5), (cls, name, errors)
                assert errors[40] < 0.1, (cls, name, errors)

    pool.run(run, ranks=ranks, timeout=LIMIT)


@pytest.mark.parametrize(("ranks", "names"), [(2, tuple(MAKERS)), (3, ("bf16", "fp16", "topk"))])
def test_a_run_that_is_saved_and_resumed_goes_on_with_the_same_bits(
    pool: WorkerPool, ranks: int, names: tuple[str, ...]
) -> None:
    def run(rank: int, world: int) -> None:
        def start(cls: type[nn.Module], name: str) -> tuple[Any, hooks.Hook, torch.optim.Optimizer]:
            ddp, hook = cls(Model(), **SMALL_BUCKETS), MAKERS[name]()
            ddp.register_comm_hook(None, hook)
            return ddp, hook, torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)

        def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
            for step in steps:
                backward(ddp, inputs(rank, step))
                optimizer.step()

        for cls in CLASSES:
            for name in names:
                ddp, hook, optimizer = start(cls, name)
                train(ddp, optimizer, range(4))
                saved = (ddp.module.state_dict(), optimizer.state_dict(), hook.state_dict())
                torch.save(saved, buffer := io.BytesIO())
                train(ddp, optimizer, range(4, 8))

                again, its_hook, its_optimizer = start(cls, name)
                buffer.seek(0)
                weights, momenta, memory = torch.load(buffer)
                again.module.load_state_dict(weights)
                its_optimizer.load_state_dict(momenta)
                its_hook.load_state_dict(memory)
                train(again, its_optimizer, range(4, 8))
                for a, b in zip(ddp.parameters(), again.parameters(), strict=True):
                    assert torch.equal(a, b), (cls, name)

    pool.run(run, ranks=ranks, timeout=LIMIT)


def test_nan_and_infinity_reach_every_rank_and_are_gone_in_the_next_step(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for cls in CLASSES:
            for name, make in MAKERS.items():
                for poison in (float("nan"), float("inf")):
                    ddp = cls(Model(), **SMALL_BUCKETS)
                    ddp.register_comm_hook(None, make())
                    poisoned = ddp.module.layers[1].weight
                    for step in range(5):
                        bad = step in (1, 3) and rank == 1
                        handle = poisoned.register_hook(
                            lambda g, bad=bad, poison=poison: _with_one(g, poison if bad else 0.0)
                        )
                        backward(ddp, inputs(rank, step))
                        handle.remove()
                        finite = bool(poisoned.grad.isfinite().all())
                        assert finite == (step not in (1, 3)), (cls, name, poison, step)
                    assert all(p.grad.isfinite().all() for p in ddp.parameters()), (cls, name)

    pool.run(run, timeout=LIMIT)


def _with_one(gradient: Tensor, value: float) -> Tensor:
    gradient = gradient.clone()
    gradient[0, 0] += value
    return gradient


def test_one_rank_alone_sends_nothing_and_loses_nothing(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for cls in CLASSES:
            for name, make in MAKERS.items():
                ddp = cls(Model(), **SMALL_BUCKETS)
                ddp.register_comm_hook(None, make())
                for step in range(3):
                    exact = exact_gradients(ddp.module, inputs(rank, step))
                    found = backward(ddp, inputs(rank, step))
                    torch.testing.assert_close(
                        [f.double() for f in found], exact, msg=f"{cls} {name}"
                    )

    pool.run(run, ranks=1, timeout=LIMIT)


def test_the_wire_carries_fewer_bytes(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> dict[str, float]:
        shares = {}
        for name, make in MAKERS.items():
            model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
            full = sum(4 * p.numel() for p in model.parameters())
            ddp = CLASSES[0](model)
            ddp.register_comm_hook(None, make())
            x = torch.ones(2, 256)
            for _ in range(3):
                ddp(x).sum().backward()
            with count_collectives() as counted:
                ddp(x).sum().backward()
            shares[name] = counted.bytes / full
        return shares

    for shares in pool.run(run, timeout=LIMIT):
        assert shares["bf16"] == shares["fp16"] == 0.5
        assert 0.25 < shares["int8"] < 0.28
        assert shares["topk"] == pytest.approx(0.5, rel=0.01)  # a quarter, with indices
        assert shares["power_sgd"] < 0.03
        assert shares["power_sgd, started late"] == shares["power_sgd"]


def test_what_ranks_report_travels_in_the_messages_of_hooks_that_carry_it(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> dict[str, int]:
        messages = {}
        for name in hooks.names():
            ddp = gradsync.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
            ddp.register_comm_hook(None, hooks.by_name(name))
            for _ in range(3):
                ddp(torch.ones(2, 8)).sum().backward()
            with count_collectives() as counted:
                ddp(torch.ones(2, 8)).sum().backward()
            messages[name] = len(counted.log)
        return messages

    for messages in pool.run(run, timeout=LIMIT):
        assert messages["bf16"] == messages["fp16"] == messages["int8"] == 1
    for messages in pool.run(run, ranks=3, timeout=LIMIT):  # two rounds each; int8 carries nothing
        assert messages["bf16"] == messages["fp16"] == 2
        assert messages["int8"] == 3


def test_a_hook_that_changes_the_buffer_before_it_is_reduced_does_not_get_the_report(
    pool: WorkerPool,
) -> None:
    class Clipped(hooks.BF16):
        def __call__(self, state, bucket):
            bucket.buffer().mul_(0.01)
            return super().__call__(state, bucket)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, rank: int) -> Tensor:
            return self.both(x) + (self.second(x) if rank == 1 else 0)

    def run(rank: int, world: int) -> None:
        ddp = gradsync.DistributedDataParallel(Branches(), find_unused_parameters=True)
        ddp.register_comm_hook(None, Clipped())
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(2, 4), rank).sum().backward()
            assert equal_on_all_ranks([p.grad for p in ddp.parameters()])

    pool.run(run, timeout=LIMIT)


def test_a_hook_returns_before_the_other_rank_has_come(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        for name, make in MAKERS.items():
            hook = make()
            if rank == 1:
                store.wait([name])  # a hook of rank 0 that waits for us waits for ever
            future = hook(None, FakeBucket(0, last=False))
            if rank == 0:
                assert not future.done(), name
                store.set(name, "")
            second = FakeBucket(1, last=True)
            hook(None, second).wait()
            future.wait()

    pool.run(run, timeout=LIMIT)


def test_a_step_that_broke_off_leaves_nothing_to_the_next(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for make in MAKERS.values():
            hook = make()
            hook(None, FakeBucket(0, last=False))  # and no other bucket comes
            futures = [hook(None, FakeBucket(index, last=index == 2)) for index in range(3)]
            assert equal_on_all_ranks([future.wait() for future in futures])

    pool.run(run, timeout=LIMIT)


def test_fewer_buckets_than_before_leave_no_memory_behind(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for name, make in MAKERS.items():
            hook = make()
            for count in (3, 3, 3, 1):
                futures = [
                    hook(None, FakeBucket(index, last=index == count - 1)) for index in range(count)
                ]
                torch.futures.wait_all(futures)
            kept = {index for index, _ in hook._scratch}
            kept |= hook._plans._kept.keys() if hasattr(hook, "_plans") else set()
            assert kept <= {0}, name

    pool.run(run, timeout=LIMIT)


class FakeBucket:
    """torch's interface around one weight of 40x50."""

    def __init__(self, index: int, *, last: bool, layout: str = "dense") -> None:
        self._index, self._last = index, last
        generator = torch.Generator().manual_seed(index + 10 * dist.get_rank())
        self._buffer = torch.randn(2000, generator=generator)
        self._parameter = _PARAMETERS.setdefault(index, nn.Parameter(torch.zeros(40, 50)))
        if layout == "sparse":
            self._buffer = torch.eye(3).to_sparse()

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return [self._buffer.view(40, 50)]

    def parameters(self) -> list[Tensor]:
        return [self._parameter]


_PARAMETERS: dict[int, nn.Parameter] = {}


def test_sparse_gradients_are_refused_by_name(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> list[str]:
        messages = []
        for make in MAKERS.values():
            with pytest.raises(gradsync.StateError) as caught:
                make()(None, FakeBucket(0, last=True, layout="sparse"))
            messages.append(str(caught.value))
        return messages

    for messages in pool.run(run, timeout=LIMIT):
        assert messages[0].startswith("BF16 cannot compress sparse gradients (bucket 0)")
        assert all("Embedding(sparse=False)" in message for message in messages)


def test_a_hook_works_on_a_group_that_is_not_the_default_one(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        group = dist.new_group([0, 2])
        if rank == 1:
            return
        for cls in CLASSES:
            ddp = cls(nn.Linear(3, 3), process_group=group)
            ddp.register_comm_hook(None, hooks.BF16(process_group=group))
            ddp(torch.full((1, 3), float(rank))).sum().backward()
            assert torch.equal(ddp.module.weight.grad, torch.ones(3, 3))

    pool.run(run, ranks=3, timeout=LIMIT)


def test_a_parameter_without_gradient_for_a_while_is_compressed_again_later(
    pool: WorkerPool,
) -> None:
    """PowerSGD must not stay at the zeros that a gradient of zeros has left."""

    def run(rank: int, world: int) -> None:
        hook = hooks.PowerSGD(rank=1, start_iteration=0)
        for step in range(4):
            bucket = FakeBucket(0, last=True)
            if step < 2:
                bucket.buffer().zero_()
            result = hook(None, bucket).wait()
            assert bool(result.any()) == (step >= 2)

    pool.run(run, timeout=LIMIT)


class TestNames:
    @pytest.mark.parametrize("name", hooks.names())
    def test_a_hook_is_found_by_its_name(self, name: str) -> None:
        hook = hooks.by_name(name)
        assert isinstance(hook, hooks.Hook)
        assert hook.name == name
        assert hook.state_dict()["hook"] == name

    def test_an_unknown_name_is_an_error_that_tells_the_names(self) -> None:
        with pytest.raises(ValueError, match=r"'int4'; the names are bf16, fp16, int8"):
            hooks.by_name("int4")

    def test_an_unknown_option_is_an_error_that_names_it(self) -> None:
        with pytest.raises(gradsync.ArgumentError, match=r"'topk'.*blocks"):
            hooks.by_name("topk", blocks=3)

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("int8", {"block": 7}),
            ("topk", {"ratio": 0.0}),
            ("power_sgd", {"rank": 0}),
            ("power_sgd", {"start_iteration": -1}),
            ("power_sgd", {"min_compression_rate": 0}),
        ],
    )
    def test_a_value_that_cannot_work_is_an_error(
        self, name: str, options: dict[str, float]
    ) -> None:
        with pytest.raises(gradsync.ArgumentError, match=next(iter(options))):
            hooks.by_name(name, **options)


class TestWrongStates:
    def test_the_state_of_another_hook_is_refused(self) -> None:
        with pytest.raises(gradsync.ArgumentError, match=r"'bf16'.*'int8'"):
            hooks.Int8().load_state_dict(hooks.BF16().state_dict())

    def test_the_state_of_another_rank_of_power_sgd_is_refused(self) -> None:
        with pytest.raises(gradsync.ArgumentError, match="rank 2, not 1"):
            hooks.PowerSGD(1).load_state_dict(hooks.PowerSGD(2).state_dict())

    def test_the_state_of_another_model_is_refused_at_the_next_step(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            def train(hook: hooks.Hook, width: int) -> None:
                ddp = CLASSES[1](nn.Linear(width, 2))
                ddp.register_comm_hook(None, hook)
                ddp(torch.ones(1, width)).sum().backward()

            train(first := hooks.Int8(), 4)
            second = hooks.Int8()
            second.load_state_dict(first.state_dict())
            with pytest.raises(gradsync.StateError, match="does not fit the model"):
                train(second, 5)

        pool.run(run, timeout=LIMIT)
