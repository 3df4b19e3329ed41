"""Uneven inputs, and something goes wrong: early ends, unused parameters, errors on one rank."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from join_parts import LIMIT, Tower, train
from replicas import (
    CLASSES,
    Branches,
    OurDDP,
    assert_equal_on_all_ranks,
    batch,
    caught,
    limit_time,
    quiet,
)
from torch import Tensor

from gradsync import UnusedParametersError
from gradsync.testing import WorkerPool


class TestFailures:
    def test_early_termination_throws_on_all_ranks(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> list[tuple[int, str]]:
            told = []
            for cls in CLASSES:
                ddp = cls(Tower(norm=True))
                done = 0
                with quiet():
                    try:
                        with ddp.join(throw_on_early_termination=True):
                            for step in range((2, 5, 3)[rank]):
                                ddp(batch(rank, step)).sum().backward()
                                done += 1
                    except RuntimeError as error:
                        told.append((done, str(error)))
            # Ours is out of the context then: one rank may evaluate, all may train.
            if rank == 0:
                ddp.eval()
                ddp.require_forward_param_sync = False
                with torch.no_grad():
                    ddp(batch(rank))
                ddp.train()
                ddp.require_forward_param_sync = True
            dist.barrier()
            ddp.zero_grad()
            ddp(batch(rank)).sum().backward()
            assert_equal_on_all_ranks(p.grad for p in ddp.parameters())
            return told

        for rank, told in enumerate(pool.run(run, ranks=3, timeout=LIMIT, group_timeout=8)):
            assert told[0] == told[1]
            steps, text = told[1]
            assert steps == 2
            assert ("Rank 0 exhausted all inputs" if rank == 0 else "Detected at least one") in text

    def test_even_inputs_throw_nowhere(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(Tower())
            train(ddp, rank, 3, throw_on_early_termination=True)
            assert_equal_on_all_ranks(ddp.parameters())

        pool.run(run, timeout=LIMIT, group_timeout=8)

    def test_unused_parameters_are_told_on_all_ranks_also_on_those_that_have_joined(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> str:
            ddp = OurDDP(Branches(2))

            def epoch() -> None:
                with quiet(), ddp.join():
                    for step in range((1, 4, 3)[rank]):
                        use = (0,) if (rank, step) == (2, 1) else (0, 1)
                        ddp(batch(rank, step), *use).sum().backward()
                        with torch.no_grad():
                            ddp(batch(rank, step), 0)  # asks for no reduction, so raises nowhere

            error = caught(epoch, UnusedParametersError)
            ddp.zero_grad()
            ddp(batch(rank), 0, 1).sum().backward()  # ordinary training goes on
            assert_equal_on_all_ranks(p.grad for p in ddp.parameters())
            return str(error)

        for text in pool.run(run, ranks=3, timeout=LIMIT, group_timeout=8):
            assert "for rank 2: branch.1.weight, branch.1.bias" in text
            assert "for rank 0" not in text
            assert "for rank 1" not in text

    @pytest.mark.parametrize("phase", ["forward", "backward", "loop"])
    def test_an_error_on_one_rank_reaches_the_others_in_time(
        self, pool: WorkerPool, phase: str
    ) -> None:
        def run(rank: int, world: int) -> tuple[str, float]:
            def fails(_: Tensor) -> None:
                raise ArithmeticError("backward")

            ddp = OurDDP(Tower(norm=True))
            began = time.monotonic()

            def epoch() -> None:
                nonlocal began
                with quiet(), ddp.join():
                    for step in range((1, 4, 4)[rank]):
                        began = time.monotonic()
                        x = batch(rank, step)
                        bad = (rank, step) == (1, 2)
                        if step == 2:
                            limit_time(dist.group.WORLD, 3)
                        if bad and phase == "loop":
                            raise ArithmeticError("loop")
                        if bad and phase == "forward":
                            x = None
                        if bad and phase == "backward":
                            ddp.module.first.weight.register_hook(fails)
                        ddp(x).sum().backward()
                    limit_time(dist.group.WORLD, 3)
                    began = time.monotonic()

            error = caught(epoch)
            return f"{type(error).__name__}: {error}", time.monotonic() - began

        outcomes = pool.run(
            run, ranks=3, timeout=60, group_timeout=30, grace=10, return_exceptions=True
        )
        texts = [outcome.unwrap() for outcome in outcomes]
        for text, seconds in texts:
            assert seconds < 20, text
        own = {"forward": "TypeError", "backward": "ArithmeticError", "loop": "ArithmeticError"}
        assert texts[1][0].startswith(own[phase])
        if phase == "backward":  # all are at the same point, so it is told at once
            for rank in (0, 2):
                assert "the backward of rank 1 raised an exception" in texts[rank][0]
