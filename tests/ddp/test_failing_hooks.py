"""Communication hooks that go wrong say so: on every rank, in time, with rank and bucket."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hook_parts import LIMIT, OPTIONS, SMALL, average, done, power_sgd
from oracles import Net, loss_of, seeded
from oracles import batch as net_batch
from replicas import (
    Branches,
    OurDDP,
    assert_equal_on_all_ranks,
    batch,
    caught,
    limit_time,
    quiet,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from gradsync import CollectiveError, PeerStepError, StateError, UnusedParametersError
from gradsync.ddp import futures
from gradsync.testing import WorkerPool


def not_a_future(bucket: Any) -> Any:
    return bucket.buffer()


def wrong_size(bucket: Any) -> Any:
    return done(bucket.buffer()[:-1].clone())


def wrong_type(bucket: Any) -> Any:
    return done("text")


def failed(bucket: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_exception(ValueError("no luck"))
    return future


def failing_callback(bucket: Any) -> Any:
    def raises(future: Any) -> Any:
        raise ValueError("no luck in a callback")

    return done(bucket.buffer()).then(raises)


WRONG: dict[Callable[[Any], Any], tuple[type[Exception], str]] = {
    not_a_future: (StateError, "must return a torch.futures.Future object, but got Tensor"),
    wrong_size: (StateError, "elements for a bucket of"),
    wrong_type: (StateError, "holds str"),
    failed: (ValueError, "no luck"),
    failing_callback: (CollectiveError, "no luck in a callback"),
}


def with_grace(run: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    """``run``, while futures get no more than a second longer than a collective."""

    def body(rank: int, world: int) -> Any:
        with patch.object(futures, "GRACE", timedelta(seconds=1)):
            return run(rank, world)

    return body


def full_text(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


class TestFailures:
    @pytest.mark.parametrize("options", ["plain", "buckets"])
    @pytest.mark.parametrize("at_once", [True, False])
    def test_a_hook_that_sends_and_then_raises_is_told_to_the_others(
        self, pool: WorkerPool, at_once: bool, options: str
    ) -> None:
        class Raises:
            issues_at_once = at_once

            def __init__(self, rank: int) -> None:
                self.rank, self.broken = rank, False

            def __call__(self, state, bucket):
                future = default_hooks.allreduce_hook(None, bucket)
                if self.broken and self.rank == 1:
                    raise RuntimeError("sent, and then no luck")
                return future

        def run(rank: int, world: int) -> str:
            ddp = OurDDP(seeded(Net), **OPTIONS[options])
            hook = Raises(rank)
            ddp.register_comm_hook(None, hook)
            text = ""
            for step in range(4):
                hook.broken = step == 2
                ddp.zero_grad()
                backward = loss_of(ddp(net_batch(step, rank))).backward
                if hook.broken:
                    began = time.monotonic()
                    text = full_text(caught(backward))
                    assert time.monotonic() - began < 5
                else:
                    backward()
            assert_equal_on_all_ranks([p.grad for p in ddp.parameters()])
            return text

        other, culprit = pool.run(run, timeout=60, group_timeout=20)
        assert "the backward of rank 1 raised" in other
        assert "sent, and then no luck" in culprit

    @pytest.mark.parametrize("backend", ["gloo", "gradsync"])
    def test_a_future_that_nobody_completes_is_an_error_after_the_time_of_a_collective(
        self, pool: WorkerPool, backend: str
    ) -> None:
        def run(rank: int, world: int) -> tuple[str, float]:
            def hook(state, bucket):
                future = default_hooks.allreduce_hook(group, bucket)
                return torch.futures.Future() if rank == 1 and forgets else future

            forgets = False
            group = dist.new_group(backend=backend)
            ddp = OurDDP(seeded(Net), process_group=group)
            ddp.register_comm_hook(group, hook)
            loss_of(ddp(net_batch(0, rank))).backward()
            forgets = True
            loss = loss_of(ddp(net_batch(1, rank)))
            limit_time(group, 3)
            began = time.monotonic()
            return full_text(caught(loss.backward)), time.monotonic() - began

        (_, waited), (text, forgot) = pool.run(with_grace(run), timeout=60, group_timeout=30)
        assert "rank 1 of 2: the communication hook has returned a future" in text
        assert "not completed in 0:00:04" in text
        assert "bucket 0" in text
        assert 3 < forgot < 20
        assert waited < 20

    def test_a_buffer_hook_that_leaves_its_future_is_an_error_too(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> str:
            group = dist.new_group(backend="gloo")
            ddp = OurDDP(torch.nn.BatchNorm1d(3), process_group=group)
            ddp._register_buffer_comm_hook(None, lambda state, buffers: [torch.futures.Future()])
            loss = ddp(torch.randn(4, 3)).sum()
            limit_time(group, 1)
            return full_text(caught(loss.backward))

        for text in pool.run(with_grace(run), timeout=60, group_timeout=30):
            assert "the buffer hook has returned a future" in text

    @pytest.mark.parametrize("options", ["plain", "buckets", "views", "static", "unused"])
    def test_what_a_hook_does_wrong_is_told_with_rank_and_bucket_and_to_the_others_at_once(
        self, pool: WorkerPool, options: str
    ) -> None:
        def run(rank: int, world: int) -> None:
            for wrong, (kind, text) in WRONG.items():
                for culprits in ((1,), tuple(range(world))):
                    if wrong is failing_callback and culprits == (1,):
                        continue  # nobody can tell it from a collective that failed, see below
                    broken = False

                    def hook(state, bucket, wrong=wrong, culprits=culprits):
                        future = default_hooks.allreduce_hook(None, bucket)
                        if not broken or rank not in culprits or not bucket.is_last():  # noqa: B023
                            return future
                        future.wait()
                        return wrong(bucket)

                    with quiet():
                        ddp = OurDDP(seeded(Net), **OPTIONS[options])
                    ddp.register_comm_hook(None, hook)
                    for step in range(4):
                        broken = step == 2
                        ddp.zero_grad()
                        backward = loss_of(ddp(net_batch(step, rank))).backward
                        if not broken:
                            backward()
                            continue
                        began = time.monotonic()
                        error = caught(backward)
                        assert time.monotonic() - began < 5
                        what = f"{wrong.__name__}, {culprits}: {error!r}"
                        if rank in culprits:
                            assert isinstance(error, kind), what
                            assert text in full_text(error), what
                            places = f"on rank {rank}, bucket", f"rank {rank} of {world}: step 3"
                            assert any(place in full_text(error) for place in places), what
                            assert "first.weight" in full_text(error) or "6 param" in full_text(
                                error
                            ), what
                        else:
                            assert isinstance(error, PeerStepError), what
                            assert "backward of rank 1 raised" in str(error), what
                    expected = average(seeded(Net), world, 3)
                    for parameter, mean in zip(ddp.parameters(), expected, strict=True):
                        torch.testing.assert_close(parameter.grad, mean)

        pool.run(run, timeout=LIMIT, group_timeout=15)

    @pytest.mark.parametrize("way", ["raises", "fails in a callback", "raises in a chain"])
    def test_the_other_ranks_get_an_error_in_time_if_a_hook_never_sends_its_bucket(
        self, pool: WorkerPool, way: str
    ) -> None:
        def run(rank: int, world: int) -> str:
            broken = False
            state, power = power_sgd(powerSGD_hook.powerSGD_hook)

            def hook(_, bucket):
                if broken and rank == 1 and bucket.index() == 1:
                    if way == "fails in a callback":
                        default_hooks.allreduce_hook(None, bucket)
                        return failing_callback(bucket)
                    raise ArithmeticError("not today")
                if way == "raises in a chain":
                    return power(state, bucket)
                return default_hooks.allreduce_hook(None, bucket)

            ddp = OurDDP(seeded(Net), **SMALL)
            ddp.register_comm_hook(None, hook)
            for step in range(3):
                loss_of(ddp(net_batch(step, rank))).backward()
            broken = True
            began = time.monotonic()
            error = caught(loss_of(ddp(net_batch(3, rank))).backward)
            assert time.monotonic() - began < 15
            return f"{type(error).__name__}: {full_text(error)}"

        first, second = pool.run(run, timeout=50, group_timeout=4, grace=8)
        assert "CollectiveError: rank 0 of 2: " in first
        if way == "fails in a callback":
            assert "CollectiveError: rank 1 of 2: step 4: the reduction of bucket 1" in second
            assert "no luck in a callback" in second
        else:
            assert "ArithmeticError: not today" in second
            assert "on rank 1, bucket 1: second.bias, second.weight" in second

    def test_a_hook_that_raises_once_is_tried_with_zeros_and_the_others_learn_at_once(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            for options in OPTIONS.values():
                for wrap in (lambda hook: hook, default_hooks.fp16_compress_wrapper):

                    def careful(state, bucket):
                        if not bucket.buffer().isfinite().all():
                            raise ArithmeticError("a gradient is not finite")
                        return default_hooks.allreduce_hook(None, bucket)

                    with quiet():
                        ddp = OurDDP(seeded(Net), **options)
                    ddp.register_comm_hook(None, wrap(careful))
                    for step in range(6):
                        ddp.zero_grad()
                        bad = step in (0, 3)
                        x = net_batch(step, rank)
                        if bad and rank == 1:
                            x = x * torch.inf
                        backward = loss_of(ddp(x)).backward
                        if not bad:
                            backward()
                            continue
                        began = time.monotonic()
                        error = caught(backward)
                        assert time.monotonic() - began < 5
                        assert isinstance(error, ArithmeticError if rank == 1 else PeerStepError)
                    expected = average(seeded(Net), world, 5)
                    for parameter, mean in zip(ddp.parameters(), expected, strict=True):
                        torch.testing.assert_close(parameter.grad, mean, atol=1e-3, rtol=1e-2)

        pool.run(run, timeout=LIMIT, group_timeout=15)

    def test_unused_parameters_are_told_on_every_rank(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for options in ({}, SMALL, {"gradient_as_bucket_view": True}):
                ddp = OurDDP(Branches(2), **options)
                ddp.register_comm_hook(None, default_hooks.allreduce_hook)
                ddp(batch(rank), 0, 1).sum().backward()
                ddp(batch(rank), *((0,) if rank == 1 else (0, 1))).sum().backward()
                error = caught(lambda: ddp(batch(rank), 0, 1), UnusedParametersError)  # noqa: B023
                assert "for rank 1: branch.1.weight, branch.1.bias" in str(error)
                assert "for rank 0" not in str(error)
                ddp.zero_grad()
                ddp(batch(rank), 0, 1).sum().backward()
                assert_equal_on_all_ranks(p.grad for p in ddp.parameters())

        pool.run(run, ranks=3, timeout=LIMIT, group_timeout=15)
