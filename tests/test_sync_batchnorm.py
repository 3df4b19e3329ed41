"""SyncBatchNorm against one plain BatchNorm on the batches of all ranks joined."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradsync
from gradsync import DistributedDataParallel as DDP
from gradsync import SyncBatchNorm
from gradsync.sync_batchnorm import (
    _moments_by_hand,
    _moments_by_kernel,
    combine_moments,
    local_moments,
)
from gradsync.testing import WorkerPool, count_collectives

LIMIT = 40.0
FEATURES = 4
# By dtype: what another order of the sums may differ by.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}

PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def close(actual: Tensor | None, expected: Tensor | None, hint: object = "") -> None:
    assert actual is not None, hint
    assert expected is not None, hint
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=5 * tolerance, msg=lambda text: f"{hint}: {text}"
    )


def summed(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


def equal_on_all_ranks(layer: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    for name, buffer in layer.named_buffers():
        others = [torch.empty_like(buffer) for _ in range(dist.get_world_size(group))]
        dist.all_gather(others, buffer, group=group)
        assert all(torch.equal(buffer, other) for other in others), name


def data(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Features of different means and deviations."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64)
    by_feature = torch.arange(1.0, shape[1] + 1).view(-1, *[1] * (len(shape) - 2))
    return (values * by_feature - 3 * by_feature).to(dtype)


def pair(dim: int, **settings: Any) -> tuple[nn.Module, SyncBatchNorm]:
    """A plain layer, and ours with the same parameters."""
    plain = PLAIN[dim](FEATURES, **settings)
    with torch.no_grad():
        for seed, parameter in enumerate(plain.parameters()):
            parameter.copy_(data((1, FEATURES), seed=seed).squeeze(0))
    ours = SyncBatchNorm(FEATURES, **settings)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def compare_steps(
    rank: int,
    rows: Sequence[int],
    rest: Sequence[int] = (),
    *,
    dtype: torch.dtype = torch.float32,
    layout: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    group: dist.ProcessGroup | None = None,
    steps: int = 3,
    **settings: Any,
) -> SyncBatchNorm:
    """Some training steps of both; ``rows`` is the batch size by rank of the group."""
    plain, ours = pair(2 + len(rest), dtype=dtype, **settings)
    ours.process_group = group
    for step in range(steps):
        whole = data((sum(rows), FEATURES, *rest), dtype, seed=step)
        grad = data(whole.shape, dtype, seed=100 + step)
        expected_input = whole.clone().requires_grad_()
        expected = plain(expected_input)
        expected.backward(grad)

        input = layout(whole.split(list(rows))[rank].clone()).requires_grad_()
        output = ours(input)
        assert output.dtype == input.dtype
        output.backward(layout(grad.split(list(rows))[rank].clone()))

        close(output, expected.split(list(rows))[rank], f"output {step}")
        close(input.grad, expected_input.grad.split(list(rows))[rank], f"input.grad {step}")
        for name, parameter in ours.named_parameters():
            theirs = plain.get_parameter(name).grad
            close(summed(parameter.grad, group) / 100, theirs / 100, f"{name}.grad {step}")
            parameter.grad = plain.get_parameter(name).grad = None
        for name, buffer in ours.named_buffers():
            torch.testing.assert_close(buffer, plain.get_buffer(name), msg=f"{name} {step}")
    equal_on_all_ranks(ours, group)
    return ours


class TestOneBigBatch:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("rest", [(), (7,), (3, 5), (2, 3, 2)])
    def test_outputs_gradients_and_running_statistics_are_those_of_the_joined_batch(
        self, pool: WorkerPool, rest: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        def run(rank: int, world: int) -> None:
            compare_steps(rank, (4, 4), rest, dtype=dtype)

        pool.run(run, timeout=LIMIT)

    @pytest.mark.parametrize("rest", [(), (3, 5)])
    @pytest.mark.parametrize("rows", [(5, 1, 2), (3, 0, 4), (0, 2, 0), (0, 0, 9)])
    def test_batches_may_be_of_different_sizes_and_empty(
        self, pool: WorkerPool, rows: tuple[int, ...], rest: tuple[int, ...]
    ) -> None:
        def run(rank: int, world: int) -> None:
            for dtype in (torch.float32, torch.float64):
                compare_steps(rank, rows, rest, dtype=dtype)

        pool.run(run, ranks=3, timeout=LIMIT)

    def test_settings_are_those_of_the_plain_layer(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            compare_steps(rank, (3, 2), momentum=None)
            compare_steps(rank, (3, 2), momentum=0.7, eps=0.5)
            compare_steps(rank, (3, 2), (4,), affine=False)
            compare_steps(rank, (3, 2), (4, 4), track_running_stats=False)
            compare_steps(rank, (3, 0), affine=False, track_running_stats=False)

        pool.run(run, timeout=LIMIT)

    def test_the_memory_format_is_kept_and_any_strides_do(self, pool: WorkerPool) -> None:
        def channels_last(tensor: Tensor) -> Tensor:
            return tensor.contiguous(memory_format=torch.channels_last)

        def transposed(tensor: Tensor) -> Tensor:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)

        def every_second(tensor: Tensor) -> Tensor:
            return tensor.repeat_interleave(2, dim=-1)[..., ::2]

        def run(rank: int, world: int) -> None:
            for layout in (channels_last, transposed, every_second):
                compare_steps(rank, (3, 2), (4, 6), layout=layout)
                compare_steps(rank, (0, 2), (4, 6), layout=layout)
            compare_steps(rank, (3, 2), layout=transposed)
            ours = SyncBatchNorm(FEATURES)
            input = channels_last(data((2, FEATURES, 4, 6))).requires_grad_()
            output = ours(input)
            assert output.is_contiguous(memory_format=torch.channels_last)
            output.sum().backward()  # its gradient is expanded, of stride 0
            assert input.grad is not None
            torch.testing.assert_close(input.grad, torch.zeros_like(input), atol=1e-5, rtol=0)

        pool.run(run, timeout=LIMIT)

    def test_a_bias_alone_can_be_left_out(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ours = SyncBatchNorm(FEATURES, bias=False)
            assert ours.bias is None
            whole = data((6, FEATURES))
            ours(whole[rank::2]).sum().backward()
            assert ours.weight.grad is not None
            close(ours.running_mean, 0.1 * whole.mean(0))

        pool.run(run, timeout=LIMIT)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("parameters", [torch.float32, None])
    def test_16_bit_inputs_are_summed_in_32(
        self, pool: WorkerPool, dtype: torch.dtype, parameters: torch.dtype | None
    ) -> None:
        def run(rank: int, world: int) -> None:
            for format in (torch.contiguous_format, torch.channels_last):
                # In 16 bits a sum of ones ends at 256 (2048).
                whole = data((8, FEATURES, 40, 40), dtype).contiguous(memory_format=format)
                grad = data(whole.shape, dtype, seed=1).contiguous(memory_format=format)
                exact = nn.BatchNorm2d(FEATURES)
                expected_input = whole.float().requires_grad_()
                expected = exact(expected_input)
                expected.backward(grad.float())

                ours = SyncBatchNorm(FEATURES, dtype=parameters or dtype)
                input = whole[rank * 4 : rank * 4 + 4].detach().requires_grad_()
                output = ours(input)
                output.backward(grad[rank * 4 : rank * 4 + 4])
                part = slice(rank * 4, rank * 4 + 4)
                assert output.dtype == input.grad.dtype == dtype
                rounding = {"rtol": 2e-2, "atol": 2e-2}
                torch.testing.assert_close(output.float(), expected[part], **rounding)
                torch.testing.assert_close(
                    input.grad.float(), expected_input.grad[part], **rounding
                )
                stats = {"rtol": 1e-2} if parameters is None else {"rtol": 1e-5}
                for name, buffer in ours.named_buffers():
                    torch.testing.assert_close(
                        buffer.float(), exact.get_buffer(name).float(), atol=1e-5, **stats
                    )
                assert ours.weight.grad.dtype == ours.weight.dtype
                whole_grad = summed(ours.weight.grad.float())
                torch.testing.assert_close(whole_grad, exact.weight.grad, rtol=2e-2, atol=1.0)

        pool.run(run, timeout=LIMIT)

    def test_ranks_may_have_inputs_of_different_dtypes(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ours = SyncBatchNorm(FEATURES)
            whole = data((6, FEATURES))
            input = whole[rank::2].to(torch.bfloat16 if rank else torch.float32).requires_grad_()
            ours(input).sum().backward()
            torch.testing.assert_close(ours.running_mean, 0.1 * whole.mean(0), rtol=0.01, atol=0.01)
            equal_on_all_ranks(ours)

        pool.run(run, timeout=LIMIT)

    def test_a_mean_that_is_large_beside_the_deviation_does_no_harm(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for rest in ((), (8, 8)):
                whole = data((64, FEATURES, *rest)) + 10_000
                ours = SyncBatchNorm(FEATURES, momentum=1.0)
                ours(whole[rank::2])
                dims = [0, *range(2, whole.dim())]
                expected = whole.double().var(dims).float()
                # A difference of squares would be off by several times the variance.
                torch.testing.assert_close(ours.running_var, expected, rtol=1e-3, atol=0)

        pool.run(run, timeout=LIMIT)

    def test_a_batch_that_is_empty_on_all_ranks_changes_nothing(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            compare_steps(rank, (0, 0), (3, 3), steps=1)
            ours = compare_steps(rank, (0, 0), steps=1)
            assert torch.equal(ours.running_var, torch.ones(FEATURES))

        pool.run(run, timeout=LIMIT)


def network(norm: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3),
        norm(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 5, 3, bias=False),
        norm(5),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


class TestTraining:
    def test_a_model_under_ddp_trains_as_in_one_process_on_the_joined_batch(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            alone = network(nn.BatchNorm2d).double()
            module = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
            model = DDP(module)
            optimizers = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (alone, model)]
            for step in range(5):
                whole = data((4 * world, 2, 6, 6), torch.float64, seed=step)
                for each, optimizer, input in (
                    (alone, optimizers[0], whole),
                    (model, optimizers[1], whole[rank * 4 : rank * 4 + 4]),
                ):
                    optimizer.zero_grad()
                    each(input).square().mean().backward()
                    optimizer.step()
                for name, value in alone.state_dict().items():
                    torch.testing.assert_close(module.state_dict()[name], value, msg=name)
            equal_on_all_ranks(module)

        pool.run(run, timeout=LIMIT)
        pool.run(run, ranks=3, timeout=LIMIT)

    def test_uneven_and_empty_batches_train_under_ddp_to_equal_weights(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> list[Tensor]:
            alone = network(nn.BatchNorm2d).double()
            model = DDP(network(lambda n: SyncBatchNorm(n)).double())
            optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (alone, model)]
            for step in range(4):
                rows = [3, 0, 5][step % 3 :] + [3, 0, 5][: step % 3]
                whole = data((8, 2, 6, 6), torch.float64, seed=step)
                optimizers[0].zero_grad()
                (alone(whole).square().sum() / 8).backward()
                optimizers[0].step()
                optimizers[1].zero_grad()
                # DDP divides by the number of ranks.
                (model(whole.split(rows)[rank]).square().sum() * world / 8).backward()
                optimizers[1].step()
            for name, value in alone.state_dict().items():
                torch.testing.assert_close(model.module.state_dict()[name], value, msg=name)
            return [p.detach() for p in model.parameters()]

        first, *others = pool.run(run, ranks=3, timeout=LIMIT)
        for other in others:
            assert all(map(torch.equal, first, other))

    def test_a_layer_may_run_twice_before_one_backward(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            plain, ours = pair(2)
            inputs = [data((6, FEATURES), seed=seed) for seed in (1, 2)]
            whole = [each.clone().requires_grad_() for each in inputs]
            parts = [each[rank::2].clone().requires_grad_() for each in inputs]
            sum(plain(each).pow(3).sum() for each in whole).backward()
            sum(ours(each).pow(3).sum() for each in parts).backward()
            for part, one in zip(parts, whole, strict=True):
                torch.testing.assert_close(part.grad, one.grad[rank::2], rtol=1e-4, atol=1e-3)

        pool.run(run, timeout=LIMIT)

    def test_a_compiled_model_leaves_the_layer_out_of_its_graphs(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            model = nn.Sequential(nn.Linear(3, 4), SyncBatchNorm(4), nn.ReLU())
            reference = copy.deepcopy(model)
            compiled = torch.compile(model, backend="eager")
            for step in range(2):
                input = data((3 + rank, 3), seed=step)
                outputs = [each(input) for each in (compiled, reference)]
                for output in outputs:
                    output.pow(3).sum().backward()
                assert torch.equal(*outputs)
            assert torch.equal(model[0].weight.grad, reference[0].weight.grad)

        pool.run(run, timeout=LIMIT)

    def test_a_frozen_layer_gets_no_gradients_and_passes_them_on(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            plain, ours = pair(2)
            ours.requires_grad_(False)
            whole = data((6, FEATURES)).requires_grad_()
            part = whole.detach()[rank::2].requires_grad_()
            plain(whole).pow(3).sum().backward()
            ours(part).pow(3).sum().backward()
            assert ours.weight.grad is None
            assert ours.bias.grad is None
            torch.testing.assert_close(part.grad, whole.grad[rank::2], rtol=1e-4, atol=1e-3)

        pool.run(run, timeout=LIMIT)

    def test_sub_groups_normalise_on_their_own(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            groups = [dist.new_group([0, 1]), dist.new_group([2])]
            if rank < 2:
                compare_steps(rank, (3, 4), group=groups[0])
            else:
                compare_steps(0, (5,), group=groups[1])
            other = SyncBatchNorm(FEATURES, process_group=groups[0])
            if rank == 2:  # no member of it: a layer of its own
                plain, _ = pair(2)
                assert other(data((5, FEATURES))).shape == plain(data((5, FEATURES))).shape

        pool.run(run, ranks=3, timeout=LIMIT)


class TestCollectives:
    def test_one_in_forward_one_in_backward_and_one_more_in_the_first_forward(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            ours = SyncBatchNorm(FEATURES)
            seen = []
            for rows in (3, 3, 3 * rank):
                input = data((rows, FEATURES)).requires_grad_()
                with count_collectives() as counted:
                    output = ours(input)
                    forward = counted.total
                    output.sum().backward()
                    seen.append((forward, counted.total - forward))
            assert seen == [(2, 1), (1, 1), (1, 1)]

        pool.run(run, timeout=LIMIT)

    def test_another_group_compares_the_layers_again(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            groups = [dist.new_group([0, 1]) for _ in range(2)]
            ours = SyncBatchNorm(FEATURES)
            for group, expected in ((groups[0], 2), (groups[0], 1), (groups[1], 2), (None, 2)):
                ours.process_group = group
                with count_collectives() as counted:
                    ours(data((3, FEATURES)))
                assert counted.total == expected

        pool.run(run, timeout=LIMIT)

    def test_none_in_backward_where_no_rank_wants_the_gradient_of_its_input(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            ours = SyncBatchNorm(FEATURES)
            output = ours(data((3, FEATURES)))
            with count_collectives() as counted:
                output.sum().backward()
            assert counted.total == 0
            assert ours.bias.grad.tolist() == [3.0] * FEATURES

        pool.run(run, timeout=LIMIT)

    def test_a_rank_that_wants_no_gradient_of_its_input_helps_those_that_do(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            plain, ours = pair(2)
            whole = data((6, FEATURES)).requires_grad_()
            part = whole.detach()[rank::2].requires_grad_(rank == 0)
            plain(whole).pow(3).sum().backward()
            ours(part).pow(3).sum().backward()
            if rank == 0:
                torch.testing.assert_close(part.grad, whole.grad[::2], rtol=1e-4, atol=1e-3)
            else:
                assert part.grad is None

        pool.run(run, timeout=LIMIT)

    def test_none_in_evaluation_which_is_plain_batch_normalisation(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for chosen in ({}, {"track_running_stats": False}):
                plain, ours = pair(2, **chosen)
                plain.eval(), ours.eval()
                input = data((3 + rank, FEATURES))
                with count_collectives() as counted:
                    for each in (plain, ours):
                        each(input.requires_grad_()).sum().backward()
                    assert torch.equal(ours(input), plain(input))
                assert counted.total == 0
                assert torch.equal(ours.weight.grad, plain.weight.grad)

        pool.run(run, timeout=LIMIT)

    def test_without_gradients_statistics_are_tracked_as_ever(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            plain, ours = pair(2)
            whole = data((6, FEATURES))
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    output = ours(whole[rank::2])
                    assert not output.requires_grad
                    close(output, plain(whole)[rank::2])
            for name, buffer in ours.named_buffers():
                torch.testing.assert_close(buffer, plain.get_buffer(name))

        pool.run(run, timeout=LIMIT)

    def test_one_rank_is_plain_batch_normalisation_without_a_collective(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            plain, ours = pair(4)
            input = data((3, FEATURES, 2, 2))
            with count_collectives() as counted:
                assert torch.equal(ours(input), plain(input))
            assert counted.total == 0
            assert torch.equal(ours.running_var, plain.running_var)

        pool.run(run, ranks=1, timeout=LIMIT)
        pool.run(run, ranks=1, backend=None, timeout=LIMIT)


def raised(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


class TestFailures:
    def test_one_value_per_channel_over_all_ranks_is_torchs_error_on_all_of_them(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            plain, ours = pair(2)
            torchs = raised(lambda: plain(torch.ones(1, FEATURES)))
            error = raised(lambda: ours(torch.ones(1 - rank, FEATURES)))
            assert isinstance(error, ValueError)
            start = str(torchs).partition("torch.Size")[0]
            assert str(error).startswith(f"{start}torch.Size([{1 - rank}, {FEATURES}])")
            assert ours.num_batches_tracked == 0
            ours(torch.ones(1, FEATURES))  # two over all ranks: enough

        pool.run(run, timeout=LIMIT)

    def test_layers_that_differ_are_named_on_every_rank(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for chosen, names in (
                ({"num_features": 3 + rank}, "num_features is 3 on rank 0 and 4 on rank 1"),
                (
                    {"num_features": 3, "eps": (1e-5, 1e-3)[rank]},
                    "eps is 1e-05 on rank 0 and 0.001",
                ),
                ({"num_features": 3, "momentum": (None, 0.1)[rank]}, "momentum is nan on rank 0"),
            ):
                layer = SyncBatchNorm(**chosen)
                error = raised(lambda: layer(torch.ones(2, layer.num_features)))  # noqa: B023
                assert isinstance(error, gradsync.ModelMismatchError)
                assert names in str(error)
            SyncBatchNorm(3)(torch.ones(2, 3))

        pool.run(run, timeout=LIMIT)

    @pytest.mark.parametrize(
        ("wrong", "words"),
        [
            (torch.ones(4, 3), "4 features"),
            (torch.ones(4), "at least 2D input"),
            (torch.ones(4, 4, dtype=torch.int64), "floating point"),
            (torch.ones(4, 4, dtype=torch.float64), "torch.float32"),
        ],
    )
    def test_an_input_that_is_wrong_on_one_rank_is_an_error_on_all_and_they_can_go_on(
        self, pool: WorkerPool, wrong: Tensor, words: str
    ) -> None:
        def run(rank: int, world: int) -> None:
            ours = SyncBatchNorm(4)
            right = torch.ones(2, 4)
            error = raised(lambda: ours(wrong if rank == 1 else right))
            if rank == 1:
                assert isinstance(error, gradsync.ArgumentError)
                assert words in str(error)
            else:
                assert isinstance(error, gradsync.PeerStepError)
                assert "not valid on rank 1" in str(error)
            assert ours.num_batches_tracked == 0
            ours(right)

        pool.run(run, timeout=LIMIT)

    def test_a_backward_that_another_rank_will_not_come_to_raises(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ours = SyncBatchNorm(4)
            input = torch.randn(3, 4, requires_grad=True)
            with torch.set_grad_enabled(rank == 0):
                output = ours(input)
            if rank == 0:
                error = raised(lambda: output.sum().backward())
                assert isinstance(error, gradsync.StateError)
                assert "on rank 1 its forward ran without gradients" in str(error)

        pool.run(run, timeout=LIMIT)

    def test_gradients_of_gradients_raise(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            input = torch.randn(3, 4, requires_grad=True)
            output = SyncBatchNorm(4)(input)
            (grad,) = torch.autograd.grad(output.pow(3).sum(), input, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                grad.sum().backward()

        pool.run(run, timeout=LIMIT)

    def test_a_rank_that_is_gone_is_named_as_the_likely_cause(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ours = SyncBatchNorm(4)
            if rank == 0:
                error = raised(lambda: ours(torch.ones(2, 4)))
                assert isinstance(error, gradsync.CollectiveError)
                assert "SyncBatchNorm" in str(error)
                assert "Another rank" in str(error)

        pool.run(run, timeout=LIMIT, group_timeout=2.0)


class Shared(nn.Module):
    """One layer in two places, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.BatchNorm1d(4)
        self.same = self.one
        self.more = nn.ModuleList([nn.BatchNorm3d(2, affine=False), self.one])
        self.nothing = None
        self.instance = nn.InstanceNorm1d(4)


class TestConversion:
    def test_every_layer_is_converted_with_all_that_it_has(self) -> None:
        model = nn.ModuleList(
            [
                nn.BatchNorm1d(4, eps=0.1, momentum=None).eval(),
                nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.Linear(4, 4)),
                nn.BatchNorm3d(4, track_running_stats=False),
                nn.SyncBatchNorm(4, dtype=torch.float64),
                SyncBatchNorm(4, momentum=0.3),
            ]
        )
        model[0].weight.requires_grad_(False)
        before = dict(model.state_dict(keep_vars=True))
        converted = SyncBatchNorm.convert_sync_batchnorm(model)
        assert converted is model
        after = dict(model.state_dict(keep_vars=True))
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before)
        layers = [model[0], model[1][0], *model[2:]]
        assert {type(layer) for layer in layers} == {SyncBatchNorm}
        assert [layer.training for layer in layers] == [False, True, True, True, True]
        assert (model[0].eps, model[0].momentum, model[4].momentum) == (0.1, None, 0.3)
        assert not model[0].weight.requires_grad
        assert model[1][0].weight is None
        assert model[2].running_mean is None
        assert type(model[1][1]) is nn.Linear

    def test_a_layer_alone_is_returned_as_a_new_one(self) -> None:
        plain = nn.BatchNorm2d(4)
        ours = SyncBatchNorm.convert_sync_batchnorm(plain)
        assert type(plain) is nn.BatchNorm2d
        assert type(ours) is SyncBatchNorm
        assert ours.weight is plain.weight
        linear = nn.Linear(2, 2)
        assert SyncBatchNorm.convert_sync_batchnorm(linear) is linear

    def test_a_layer_in_several_places_stays_one_layer(self) -> None:
        model = SyncBatchNorm.convert_sync_batchnorm(Shared())
        assert type(model.one) is SyncBatchNorm
        assert model.same is model.one
        assert model.more[1] is model.one
        assert type(model.more[0]) is SyncBatchNorm
        assert type(model.instance) is nn.InstanceNorm1d
        assert len(list(model.parameters())) == 2

    def test_hooks_stay_and_can_be_removed(self) -> None:
        calls = []
        plain = nn.BatchNorm1d(4)
        handle = plain.register_forward_hook(lambda *_: calls.append(1))
        ours = SyncBatchNorm.convert_sync_batchnorm(plain)
        ours(torch.randn(3, 4))
        handle.remove()
        ours(torch.randn(3, 4))
        assert calls == [1]

    def test_a_layer_of_unknown_size_cannot_be_converted_yet(self) -> None:
        with pytest.raises(gradsync.ArgumentError, match="LazyBatchNorm1d"):
            SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))

    def test_the_group_is_the_one_given_or_the_layers_own(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            convert = SyncBatchNorm.convert_sync_batchnorm
            first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
            ours = convert(nn.Sequential(nn.BatchNorm1d(4)), first)[0]
            assert ours.process_group is first
            assert convert(ours).process_group is first
            assert convert(ours, second).process_group is second
            assert convert(nn.SyncBatchNorm(4, process_group=first)).process_group is first
            assert convert(nn.BatchNorm1d(4)).process_group is None

        pool.run(run, timeout=LIMIT)

    def test_states_load_in_both_directions(self) -> None:
        for dim in (2, 4, 5):
            plain, ours = pair(dim)
            ours(data((6, FEATURES, *[2] * (dim - 2))))
            for other in (plain, nn.SyncBatchNorm(FEATURES), SyncBatchNorm(FEATURES)):
                other.load_state_dict(ours.state_dict())
                again = SyncBatchNorm(FEATURES)
                again.load_state_dict(other.state_dict())
                for name, value in ours.state_dict().items():
                    assert torch.equal(again.state_dict()[name], value)
            assert ours.state_dict()._metadata == plain.state_dict()._metadata
        assert repr(SyncBatchNorm(3)).startswith("SyncBatchNorm(3, eps=1e-05, momentum=0.1")

    def test_a_copied_or_reloaded_layer_goes_on_as_the_original(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ours = SyncBatchNorm(FEATURES)
            ours(data((3 + rank, FEATURES)))
            file = io.BytesIO()
            torch.save(ours, file)
            file.seek(0)
            for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
                other(data((3 + rank, FEATURES), seed=1))
                assert other.num_batches_tracked == 2
                equal_on_all_ranks(other)

        pool.run(run, timeout=LIMIT)


parts_of_values = st.lists(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=0, max_size=8), min_size=1, max_size=6
)


class TestMoments:
    @settings(deadline=None)
    @given(parts=parts_of_values, offset=st.sampled_from([0.0, 1.0, 1e6]))
    def test_the_moments_of_parts_combine_to_those_of_the_whole(
        self, parts: list[list[float]], offset: float
    ) -> None:
        tensors = [torch.tensor(part, dtype=torch.float64) + offset for part in parts]
        counts = torch.tensor([float(len(part)) for part in parts], dtype=torch.float64)
        means = torch.stack([t.mean() if len(t) else t.sum() for t in tensors]).unsqueeze(1)
        m2s = torch.stack([((t - t.mean()).square()).sum() for t in tensors]).unsqueeze(1)
        mean, m2 = combine_moments(counts, means, m2s)
        whole = torch.cat(tensors)
        expected = whole.mean() if len(whole) else torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(mean[0], expected, rtol=1e-13, atol=1e-10)
        deviations = (whole - expected).square().sum()
        torch.testing.assert_close(m2[0], deviations, rtol=1e-9, atol=1e-8)
        assert m2 >= 0

    @settings(deadline=None)
    @given(parts=parts_of_values, seed=st.randoms(use_true_random=False))
    def test_the_order_of_the_parts_does_not_matter(self, parts: list[list[float]], seed: Any):
        def moments(order: list[list[float]]) -> tuple[Tensor, Tensor]:
            rows = [torch.tensor(part, dtype=torch.float64) for part in order]
            return combine_moments(
                torch.tensor([float(len(row)) for row in rows], dtype=torch.float64),
                torch.stack([row.sum() / max(len(row), 1) for row in rows]).unsqueeze(1),
                torch.stack([(row - row.mean()).square().sum() for row in rows]).unsqueeze(1),
            )

        shuffled = parts.copy()
        seed.shuffle(shuffled)
        for one, other in zip(moments(parts), moments(shuffled), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-8)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("shape", [(50, 3), (5, 3, 7), (9, 3, 200, 200)])
    def test_both_ways_to_local_moments_agree_with_float64(
        self, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        values = data(shape, dtype) + 100
        exact = values.double()
        dims = [0, *range(2, len(shape))]
        variance, mean = torch.var_mean(exact, dims, correction=0)
        count = torch.tensor([[values.numel() // 3]], dtype=torch.float64)
        for rounding, (got_mean, got_m2) in (
            (5e-6, local_moments(values)),
            (5e-6, [each[0] for each in _moments_by_hand([values], count)]),
            (1e-4, [each[0] for each in _moments_by_kernel([values], count)]),
        ):
            assert got_mean.dtype == got_m2.dtype == torch.float64
            torch.testing.assert_close(got_mean, mean, rtol=1e-6, atol=0)
            torch.testing.assert_close(got_m2 / count[0], variance, rtol=rounding, atol=0)

    def test_a_constant_has_no_deviation(self) -> None:
        for value in (0.1, 1e4 + 0.1, -3e-20):
            _, m2 = local_moments(torch.full((7, 2, 3), value))
            assert (m2 >= 0).all()
            assert (m2 <= 1e-12 * value**2).all()
