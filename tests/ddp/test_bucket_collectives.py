"""What buckets send: how many collectives, how many bytes, and when in the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import Net, batch, check, loss_of, plain_step, seeded
from replicas import both_kinds
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from towers import CAPS, LAYERS, LIMIT, Tower, collectives_by_step

from gradsync import DistributedDataParallel as DDP
from gradsync.testing import WorkerPool, count_collectives

pytestmark = pytest.mark.timeout(60)


@both_kinds
def test_after_the_rebuild_a_step_is_one_all_reduce_for_each_bucket_and_nothing_else(
    pool: WorkerPool, views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        for caps, buckets in CAPS:
            for static in (False, True):
                settings = caps | {"gradient_as_bucket_view": views, "static_graph": static}
                steps = collectives_by_step(DDP(seeded(Tower), **settings), rank, 4)
                assert set(steps[0]) == {"allreduce"}, settings
                assert steps[1].count("allreduce") == buckets, settings
                assert steps[2:] == [["allreduce"] * buckets] * 2, settings

    pool.run(run, timeout=LIMIT)


def test_the_first_backward_sends_small_parameters_in_one_bucket_if_no_list_of_caps_is_given(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> None:
        for caps, _ in CAPS:
            if caps != {"bucket_cap_mb": 0} and "bucket_cap_mb_list" not in caps:
                first, second = collectives_by_step(DDP(seeded(Tower), **caps), rank, 2)
                assert first == ["allreduce"], caps
                assert second[0] == "broadcast", caps  # of the order in which gradients came

    pool.run(run, timeout=LIMIT)


def test_a_search_for_unused_parameters_costs_no_collective_where_torch_needs_one(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> None:
        for caps, buckets in CAPS:
            settings = caps | {"find_unused_parameters": True}
            steps = collectives_by_step(DDP(seeded(Tower), **settings), rank, 3)
            assert steps == [["allreduce"] * len(steps[0])] * 3, settings
            # Buckets are not rebuilt then, and those filled in the order of parameters may be
            # one more than those filled in the order of gradients.
            assert len(steps[0]) - buckets in (0, 1), settings
            torchs = collectives_by_step(TorchDDP(seeded(Tower), **settings), rank, 3)
            assert [len(step) for step in torchs] == [len(steps[0]) + 1] * 3, settings

    pool.run(run, timeout=LIMIT)


def test_what_is_sent_is_hardly_more_than_the_gradients(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        size = sum(p.numel() * 4 for p in Tower().parameters() if p.requires_grad)
        for caps, buckets in CAPS:
            for find_unused in (False, True):
                model = DDP(seeded(Tower), **caps, find_unused_parameters=find_unused)
                with count_collectives() as counted:
                    for index in range(3):
                        counted.clear()
                        plain_step(model, batch(index, rank), index)
                assert set(counted.by_op) == {"allreduce"}
                assert find_unused or counted.total == buckets, caps
                assert size <= counted.bytes <= size + 4 * (64 + 2 * LAYERS)

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_alone_in_the_world_no_collective_is_issued(pool: WorkerPool, views: bool) -> None:
    def run(rank: int, world: int) -> None:
        for more in ({}, {"bucket_cap_mb": 0}, {"find_unused_parameters": True}):
            settings = {"gradient_as_bucket_view": views} | more
            model = DDP(seeded(Tower), **settings)
            assert collectives_by_step(model, rank, 4) == [[]] * 4, settings
            check(rank, world, Tower, ddp=settings, against=["single"])

    pool.run(run, ranks=1, timeout=LIMIT)


@both_kinds
def test_a_small_model_is_reduced_by_one_collective_a_step_in_a_long_run_as_well(
    pool: WorkerPool, views: bool
) -> None:
    """An all-reduce, or an exchange, is found by trying; the result may not depend on it."""

    def run(rank: int, world: int) -> None:
        for more in ({}, {"find_unused_parameters": True}):
            settings = {"gradient_as_bucket_view": views} | more
            check(rank, world, Net, ddp=settings, steps=40, against=["torch"])
            steps = collectives_by_step(DDP(seeded(Net), **settings), rank, 60)
            single = (["allreduce"], ["recv", "send"])
            extra = [index for index, ops in enumerate(steps) if ops not in single]
            assert len(extra) <= 2, steps  # one to rebuild, one to agree on the trial's result
            assert all(index < 40 for index in extra), steps

    pool.run(run, timeout=LIMIT)


def test_a_rank_that_fails_in_any_of_the_first_steps_leaves_the_others_with_an_error_not_a_hang(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> None:
        for failing in (0, 1):
            for at in (0, 1, 2, 10, 11, 12, 32, 33, 34, 35):
                model = DDP(seeded(Net))
                for index in range(38):
                    model.zero_grad()
                    loss = loss_of(model(batch(index, rank)))
                    if index != at:
                        loss.backward()
                        continue
                    if rank == failing:
                        hook = model.module.second.weight.register_hook(lambda _grad: 1 / 0)
                    with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
                        loss.backward()
                    assert isinstance(caught.value, ZeroDivisionError) == (rank == failing)
                    if rank == failing:
                        hook.remove()
                reference = seeded(Net)
                joined = torch.cat([batch(37, each) for each in range(world)])
                loss_of(reference(joined)).backward()
                for ours, plain in zip(model.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-4, atol=1e-5)

    pool.run(run, timeout=LIMIT, group_timeout=10)


@both_kinds
def test_buckets_are_sent_while_the_backward_still_runs(pool: WorkerPool, views: bool) -> None:
    def sent_before_the_first_layer(model: nn.Module, rank: int) -> list[int]:
        """For each step, the all-reduces under way when the backward gets to the first layer."""
        found = []
        with count_collectives() as counted:

            def note(_module: nn.Module, _args: Any, output: Tensor) -> None:
                output.register_hook(lambda _grad: found.append(counted.by_op["allreduce"]))

            handle = model.module.layers[0].register_forward_hook(note)
            for index in range(3):
                counted.clear()
                plain_step(model, batch(index, rank), index)
            handle.remove()
        return found

    def run(rank: int, world: int) -> None:
        def sent(**settings: Any) -> list[int]:
            model = DDP(seeded(Tower), gradient_as_bucket_view=views, **settings)
            return sent_before_the_first_layer(model, rank)

        others = 2 * (LAYERS - 1)
        assert sent(bucket_cap_mb=0) == [0, others, others]
        assert sent(bucket_cap_mb=0, static_graph=True) == [0, others, others]
        assert sent(bucket_cap_mb=0, find_unused_parameters=True) == [others] * 3
        assert sent(bucket_cap_mb=0.07) == [0, 2, 2]
        assert sent(bucket_cap_mb=1000) == [0, 0, 0]

    pool.run(run, timeout=LIMIT)
