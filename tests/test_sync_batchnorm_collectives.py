"""SyncBatchNorm between ranks: few collectives, and what is told to all when one goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradsync
from batch_norms import FEATURES, LIMIT, close, data, pair
from gradsync import SyncBatchNorm
from gradsync.testing import WorkerPool, count_collectives


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
                # Only now: the start of the group may take longer.
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
                error = raised(lambda: ours(torch.ones(2, 4)))
                assert isinstance(error, gradsync.CollectiveError)
                assert "SyncBatchNorm" in str(error)
                assert "Another rank" in str(error)

        pool.run(run, timeout=LIMIT)
