"""SyncBatchNorm against one plain BatchNorm on the batches of all ranks joined."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from batch_norms import (
    FEATURES,
    LIMIT,
    close,
    compare_steps,
    data,
    equal_on_all_ranks,
    pair,
    summed,
)
from gradsync import DistributedDataParallel as DDP
from gradsync import SyncBatchNorm
from gradsync.testing import WorkerPool


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
