"""Compiled autograd: with our reducer, and with the collectives traced (python_reducer)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from compile_parts import (
    LIMIT,
    OPTIONS,
    Choice,
    always,
    batch,
    build,
    check,
    compiled_backward,
    fresh,
    skip_sync,
)
from oracles import DDP, TorchDDP, assert_same, loss_of
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from gradsync.testing import WorkerPool

pytestmark = pytest.mark.timeout(100)

SLOW = ("plain", "static")


class TestCompiledAutograd:
    """torch's class refuses it but for the mode python_reducer: so eager mode is the oracle."""

    @pytest.mark.parametrize(
        "options", ["views", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
    )
    def test_has_the_gradients_of_eager_mode(self, pool: WorkerPool, options: str) -> None:
        def run(rank: int, world: int) -> None:
            check(
                rank,
                "wrapper",
                against_torch=False,
                make_model=Choice,
                around=always(compiled_backward),
                **OPTIONS[options],
            )

        pool.run(run, timeout=LIMIT)

    @pytest.mark.slow
    def test_averages_what_only_one_rank_has_used(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            check(
                rank,
                "eager",
                against_torch=False,
                make_model=Choice,
                arguments=lambda step: (1 + (rank == step % world),),
                around=always(compiled_backward),
                find_unused_parameters=True,
            )

        pool.run(run, timeout=LIMIT)

    def test_takes_part_where_a_rank_has_used_nothing(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> Tensor:
            with fresh():
                ddp, step = build(DDP, "eager", Choice(), find_unused_parameters=True)
                for index in range(2):
                    ddp.zero_grad()
                    with compiled_backward():
                        step(batch(rank, index).requires_grad_(), 2 if rank == 0 else 0)
            return ddp.module.first.weight.grad

        mine, other = pool.run(run, timeout=LIMIT)
        assert mine.any()
        assert_same(mine, other, bitwise=True, what="rank 1")

    @pytest.mark.slow
    def test_reduces_with_the_whole_step_compiled(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            check(
                rank,
                "step",
                against_torch=False,
                make_model=Choice,
                config={"compiled_autograd": True},
            )

        pool.run(run, timeout=LIMIT)

    @pytest.mark.slow
    def test_leaves_gradients_local_in_no_sync(self, pool: WorkerPool) -> None:
        @contextmanager
        def around(ddp: nn.Module, step: int) -> Iterator[None]:
            with skip_sync(ddp, step), compiled_backward():
                yield

        def run(rank: int, world: int) -> None:
            check(
                rank,
                "eager",
                against_torch=False,
                make_model=Choice,
                around=around,
                around_eager=skip_sync,
            )

        pool.run(run, timeout=LIMIT)

    def test_captures_a_graph_once(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> list[int]:
            counter = CompileCounterWithBackend("aot_eager")
            counts = []
            with fresh():
                ddp, step = build(DDP, "eager", Choice())
                for index in range(10):  # beyond the limit from which on Dynamo gives up
                    ddp.zero_grad()
                    with compiled_backward(counter):
                        step(batch(rank, index))
                    counts.append(counter.frame_count)
            return counts

        for counts in pool.run(run, timeout=LIMIT):
            assert counts == [counts[0]] * 10

    def test_a_backward_that_raises_on_one_rank_is_told_to_the_others(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> str:
            with fresh():
                ddp, step = build(DDP, "eager", Choice())
                if rank == 0:
                    ddp.module.second.weight.register_hook(raises)
                with pytest.raises(Exception, match=r".") as caught, compiled_backward():
                    step(batch(rank, 0))
            return str(caught.value)

        @torch.compiler.disable
        def raises(_gradient: Tensor) -> None:
            raise KeyError("not today")

        mine, other = pool.run(run, timeout=LIMIT)
        assert "not today" in mine
        assert "rank 0" in other


PYTHON_REDUCER = {"optimize_ddp": "python_reducer"}


class TestPythonReducer:
    """The mode in which torch's class works with compiled autograd."""

    def test_forward_and_backward_compile_without_a_break(self, pool: WorkerPool) -> None:
        def count(rank: int, cls: type[nn.Module]) -> tuple[nn.Module, int, int]:
            forward, backward = (CompileCounterWithBackend("aot_eager") for _ in range(2))
            with fresh(**PYTHON_REDUCER):
                ddp = cls(Choice())
                call = torch.compile(ddp, backend=forward, fullgraph=True)
                loss = loss_of(call(batch(rank, 0)))
                with compiled_backward(backward, fullgraph=True):
                    loss.backward()
            return ddp, forward.frame_count, backward.frame_count

        def run(rank: int, world: int) -> None:
            (ours, *graphs), (theirs, *their_graphs) = (count(rank, c) for c in (DDP, TorchDDP))
            assert graphs == their_graphs
            for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert_same(mine.grad, its.grad, bitwise=True, what="torch's DDP")

        pool.run(run, timeout=LIMIT)

    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    def test_has_the_gradients_of_torchs_class(self, pool: WorkerPool, compiled: bool) -> None:
        around = always(compiled_backward if compiled else nullcontext)
        pool.run(
            lambda rank, _: check(
                rank, "wrapper", make_model=Choice, config=PYTHON_REDUCER, around=around
            ),
            timeout=LIMIT,
        )

    def test_leaves_gradients_local_in_no_sync(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            check(
                rank,
                "wrapper",
                config=PYTHON_REDUCER,
                around=skip_sync,
                around_eager=skip_sync,
            )

        pool.run(run, timeout=LIMIT)

    @pytest.mark.slow
    def test_runs_the_hooks_of_torch(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> list[Tensor | None]:
            found = []
            for cls in (DDP, TorchDDP):
                with fresh(**PYTHON_REDUCER):
                    ddp = cls(Choice())
                    ddp.register_comm_hook(None, fp16_compress_hook)
                    call = torch.compile(ddp, backend="aot_eager", fullgraph=True)
                    with compiled_backward(fullgraph=True):
                        loss_of(call(batch(rank, 0))).backward()
                    found.append(ddp.module.first.weight.grad)
            return found

        for ours, theirs in pool.run(run, timeout=LIMIT):
            assert_same(ours, theirs, bitwise=True, what="torch's DDP")

    def test_the_hooks_go_with_the_wrapper(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> float:
            model = nn.Linear(1, 1, bias=False)
            with fresh(**PYTHON_REDUCER):
                ddp = DDP(model)
                ddp(torch.ones(1, 1))
                del ddp
                gc.collect()
                model(torch.full((1, 1), rank + 1.0)).sum().backward()
            return model.weight.grad.item()

        assert pool.run(run, timeout=LIMIT) == [1.0, 2.0]
