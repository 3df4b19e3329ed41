from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradsync.testing import (
    Scenario,
    Trace,
    WorkerPool,
    assert_traces_equal,
    check_parity,
    train,
    train_single,
)


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 6, generator=seed), torch.randn(8, 3, generator=seed)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Dropout(0.3), nn.Linear(10, 3))


SIMPLE = Scenario(build=mlp, batch=batch)


class Buggy(nn.Module):
    """A wrapper with a bug of choice: what a parity check exists to find."""

    def __init__(self, module: nn.Module, bug: str) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            if bug == "sums":
                parameter.register_post_accumulate_grad_hook(self._sum)
        if bug == "wrong sign once":
            self._strikes = 0
            parameter.register_post_accumulate_grad_hook(self._turn)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.module(*inputs)

    def _sum(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)

    def _turn(self, parameter: torch.Tensor) -> None:
        self._strikes += 1
        if self._strikes == 3:
            assert parameter.grad is not None
            parameter.grad.neg_()


class TestCheckParity:
    @pytest.mark.parametrize("ours", [None, TorchDDP], ids=["gradsync", "torch"])
    def test_a_right_wrapper_passes_and_the_traces_come_back(
        self, pool: WorkerPool, ours: Any
    ) -> None:
        traces = check_parity(pool, SIMPLE, ours=ours)
        assert len(traces.ours) == len(traces.torch) == 2
        assert len(traces.ours[0].losses) == SIMPLE.steps
        assert not torch.equal(traces.ours[0].losses[0], traces.ours[1].losses[0])

    @pytest.mark.parametrize(
        "change",
        [
            {"same_init": False},
            {"accumulate": 3, "steps": 2},
            {"zero_grad_to_none": False},
        ],
        ids=str,
    )
    def test_variants_of_a_scenario_agree_with_one_process(
        self, pool: WorkerPool, change: dict[str, Any]
    ) -> None:
        scenario = Scenario(build=mlp, batch=batch, **change)
        check_parity(pool, scenario, ours=TorchDDP)

    def test_dropout_and_batch_norm_agree_but_for_running_statistics(
        self, pool: WorkerPool
    ) -> None:
        scenario = Scenario(build=batch_norm, batch=batch, steps=2)
        check_parity(pool, scenario, ours=TorchDDP, compare_buffers=False)
        with pytest.raises(AssertionError, match=r"buffer '1\.running_mean'.*a single process"):
            check_parity(pool, scenario, ours=TorchDDP)

    def test_a_wrapper_that_sums_is_found_in_the_first_gradient(self, pool: WorkerPool) -> None:
        with pytest.raises(AssertionError, match=r"step 0, gradient of '0\.weight': 60 of 60"):
            check_parity(pool, SIMPLE, ours=lambda m: Buggy(m, "sums"))

    def test_a_wrapper_that_does_not_reduce_is_found(self, pool: WorkerPool) -> None:
        with pytest.raises(AssertionError, match=r"step 0, gradient of '0\.weight'"):
            check_parity(pool, SIMPLE, ours=lambda m: Buggy(m, "none"))

    def test_weights_that_differ_between_ranks_are_found(self, pool: WorkerPool) -> None:
        scenario = Scenario(build=mlp, batch=lambda *_: batch(0, 0, 1), same_init=False, steps=1)
        traces_differ = r"the ranks' parameter '0\.weight'.*rank 0 has.*rank 1 has"
        with pytest.raises(AssertionError, match=traces_differ):
            check_parity(pool, scenario, ours=lambda m: Buggy(m, "none"))


class TestTrain:
    def test_single_training_is_the_mean_over_ranks(self) -> None:
        joined = Scenario(
            build=mlp,
            batch=lambda step, rank, world: tuple(
                torch.cat(parts) for parts in zip(batch(step, 0, 2), batch(step, 1, 2), strict=True)
            ),
        )
        two = train_single(SIMPLE, world=2)
        one = train(joined, lambda module: module, rank=0, world=1)
        assert_traces_equal(one, two, bitwise=False)

    def test_unused_parameters_have_no_gradient_in_the_trace(self) -> None:
        class Half(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

            def forward(self, x: torch.Tensor) -> Any:
                return self.used(x)

        trace = train(Scenario(build=Half, batch=batch), lambda m: m, rank=0, world=1)
        assert trace.grads[0]["unused.weight"] is None
        assert trace.grads[0]["used.weight"] is not None

    def test_before_step_is_called_with_the_wrapped_model(self) -> None:
        seen: list[tuple[type, int]] = []
        scenario = Scenario(
            build=mlp,
            batch=batch,
            steps=2,
            before_step=lambda model, step: seen.append((type(model), step)),
        )
        train(scenario, lambda m: Buggy(m, "none"), rank=0, world=1)
        assert seen == [(Buggy, 0), (Buggy, 1)]


class TestAssertTracesEqual:
    @pytest.fixture
    def trace(self) -> Trace:
        return train(SIMPLE, lambda module: module, rank=0, world=1)

    def test_a_trace_equals_its_copy(self, trace: Trace) -> None:
        assert_traces_equal(trace, copy.deepcopy(trace))

    def test_one_wrong_gradient_of_one_step_is_named_with_its_difference(
        self, trace: Trace
    ) -> None:
        wrong = train(SIMPLE, lambda m: Buggy(m, "wrong sign once"), rank=0, world=1)
        gradient = trace.grads[2]["2.bias"]
        assert gradient is not None
        largest = f"{2 * gradient.abs().max():g}"
        pattern = rf"step 2, gradient of '2\.bias': 3 of 3 elements.*most by {largest} at"
        with pytest.raises(AssertionError, match=pattern):
            assert_traces_equal(trace, wrong)
        with pytest.raises(AssertionError, match=pattern):
            assert_traces_equal(trace, wrong, bitwise=False)

    def test_one_bit_is_enough_bitwise_but_not_with_a_tolerance(self, trace: Trace) -> None:
        other = copy.deepcopy(trace)
        weight = other.parameters["0.weight"]
        weight[3, 2] = torch.nextafter(weight[3, 2], torch.tensor(9.0))
        with pytest.raises(AssertionError, match=r"'0\.weight': 1 of 60.*at \(3, 2\)"):
            assert_traces_equal(trace, other)
        assert_traces_equal(trace, other, bitwise=False)

    def test_bitwise_tells_zeros_apart_and_takes_equal_nans(self) -> None:
        def with_loss(value: float) -> Trace:
            return Trace(losses=[torch.tensor(value)], grads=[{}])

        assert_traces_equal(with_loss(float("nan")), with_loss(float("nan")))
        with pytest.raises(AssertionError, match=r"a has 0\.0, b has -0\.0"):
            assert_traces_equal(with_loss(0.0), with_loss(-0.0))

    def test_none_a_missing_name_and_a_missing_step_are_told_apart(self, trace: Trace) -> None:
        none, missing, short = (copy.deepcopy(trace) for _ in range(3))
        none.grads[1]["0.bias"] = None
        del missing.parameters["0.bias"]
        short.losses.pop()
        with pytest.raises(AssertionError, match=r"step 1, gradient of '0\.bias': b has None"):
            assert_traces_equal(trace, none)
        with pytest.raises(AssertionError, match=r"only in a: \['0\.bias'\]"):
            assert_traces_equal(trace, missing)
        with pytest.raises(AssertionError, match="a has 4 steps, b 3"):
            assert_traces_equal(trace, short)
