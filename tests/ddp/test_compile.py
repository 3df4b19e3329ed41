"""torch.compile around the wrapper, inside it and around the step; split graphs; overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_parts import (
    LIMIT,
    OPTIONS,
    Checkpointed,
    Choice,
    Net,
    batch,
    build,
    check,
    fresh,
    skip_sync,
    train,
)
from oracles import DDP, TorchDDP
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

from gradsync import patch_torch, unpatch_torch
from gradsync.testing import WorkerPool

pytestmark = pytest.mark.timeout(100)

WAYS = [
    *(("wrapper", each) for each in OPTIONS),
    *(("module", each) for each in ("plain", "unused")),
    *(("blocks", each) for each in ("plain", "views")),
    *(("step", each) for each in ("plain", "static")),
]


class TestTraining:
    @pytest.mark.parametrize(("way", "options"), WAYS, ids=lambda each: each)
    def test_has_the_gradients_of_torchs_class_and_of_eager_mode(
        self, pool: WorkerPool, way: str, options: str
    ) -> None:
        pool.run(lambda rank, _: check(rank, way, **OPTIONS[options]), timeout=LIMIT)

    @pytest.mark.parametrize("way", ["wrapper", "module"])
    def test_leaves_gradients_local_in_no_sync(self, pool: WorkerPool, way: str) -> None:
        def run(rank: int, world: int) -> None:
            with fresh():
                ours = train(rank, DDP, way, around=skip_sync)
            with fresh():
                theirs = train(rank, TorchDDP, way, around=skip_sync)
            ours.assert_equal(theirs, bitwise=True, what="torch's DDP")

        pool.run(run, timeout=LIMIT)

    def test_works_with_activation_checkpoints(self, pool: WorkerPool) -> None:
        pool.run(lambda rank, _: check(rank, "wrapper", make_model=Checkpointed), timeout=LIMIT)

    def test_averages_what_only_one_rank_has_used(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            check(
                rank,
                "wrapper",
                make_model=Choice,
                arguments=lambda step: (1 + (rank == step % world),),
                find_unused_parameters=True,
            )

        pool.run(run, timeout=LIMIT)

    @pytest.mark.parametrize("mode", [False, "python_reducer_without_compiled_forward"])
    def test_is_right_in_every_mode_of_dynamo(self, pool: WorkerPool, mode: object) -> None:
        pool.run(
            lambda rank, _: check(rank, "wrapper", config={"optimize_ddp": mode}), timeout=LIMIT
        )

    def test_compiles_nothing_again_from_step_to_step(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> list[int]:
            counter = CompileCounterWithBackend("aot_eager")
            with fresh():
                _, step = build(DDP, "step", Net(), counter)
                counts = []
                for index in range(4):
                    step(batch(rank, index))
                    counts.append(counter.frame_count)
            return counts

        for counts in pool.run(run, timeout=LIMIT):
            assert counts[1:] == [counts[1]] * 3  # the second step finds gradients to add to

    @pytest.mark.slow
    @pytest.mark.parametrize("way", ["wrapper", "module", "blocks", "step"])
    def test_works_with_inductor(self, pool: WorkerPool, way: str) -> None:
        pool.run(lambda rank, _: check(rank, way, backend="inductor"), timeout=LIMIT)


def graphs(cls: type[nn.Module], **options: Any) -> int:
    counter = CompileCounterWithBackend("aot_eager")
    with fresh():
        _, step = build(cls, "wrapper", Net(), counter, **options)
        step(batch(0, 0))
    return counter.frame_count


class TestSplitGraphs:
    @pytest.mark.parametrize(("cap", "expected"), [(1, 3), (None, 2)])
    def test_there_are_as_many_as_for_torchs_class(
        self, pool: WorkerPool, cap: float | None, expected: int
    ) -> None:
        def run(rank: int, world: int) -> list[int]:
            return [graphs(cls, bucket_cap_mb=cap) for cls in (DDP, TorchDDP)]

        assert pool.run(run, timeout=LIMIT) == [[expected] * 2] * 2

    def test_buckets_may_be_smaller_than_dynamo_takes(self, pool: WorkerPool) -> None:
        assert pool.run(lambda *_: graphs(DDP, bucket_cap_mb=0.1), timeout=LIMIT) == [3, 3]

    def test_dynamo_finds_ours_in_torchs_place(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> int:
            patch_torch()
            try:
                return graphs(torch.nn.parallel.DistributedDataParallel, bucket_cap_mb=1)
            finally:
                unpatch_torch()

        assert pool.run(run, timeout=LIMIT) == [3, 3]

    def test_no_ddp_is_active_after_a_forward(self, pool: WorkerPool) -> None:
        class Fails(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                assert TorchDDP._get_active_ddp_module()
                assert DDP._get_active_ddp_module() is not None
                raise KeyError("inside")

        def run(rank: int, world: int) -> None:
            with pytest.raises(KeyError, match="inside"):
                DDP(Fails(2, 2))(torch.ones(1, 2))
            assert not TorchDDP._get_active_ddp_module()
            assert DDP._get_active_ddp_module() is None

        pool.run(run)


def overlapped(rank: int, cls: type[nn.Module]) -> tuple[int, int]:
    """In a step: all-reduces before the last compiled backward begins, and all of them."""
    _, step = build(cls, "wrapper", Net())
    for index in range(3):
        step(batch(rank, index))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step(batch(rank, 3))
    starts: dict[str, list[float]] = {"CompiledFunctionBackward": [], "c10d::allreduce_": []}
    for event in recorded.events():
        if event.name in starts:
            starts[event.name].append(event.time_range.start)
    backwards, reductions = starts.values()
    return sum(start < max(backwards) for start in reductions), len(reductions)


class TestOverlap:
    def test_buckets_are_sent_while_the_first_layers_have_yet_to_run_backward(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> list[tuple[int, int]]:
            found = []
            for cls in (DDP, TorchDDP):
                with fresh():
                    found.append(overlapped(rank, cls))
            return found

        for ours, theirs in pool.run(run, timeout=LIMIT):
            assert ours == theirs == (2, 4)

    def test_an_unsplit_graph_lets_none_be_sent_early(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> tuple[int, int]:
            with fresh(optimize_ddp=False):
                return overlapped(rank, DDP)

        assert pool.run(run, timeout=LIMIT) == [(0, 4)] * 2
