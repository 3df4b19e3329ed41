"""Ranks that fail alone: what the others are told, how soon, and whether all can go on."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from replicas import Branches, OurDDP, assert_equal_on_all_ranks, batch, caught, quiet
from torch import Tensor, nn

from gradsync import CollectiveError, PeerStepError, hooks
from gradsync.testing import WorkerPool

LIMIT = 60.0
GROUP_TIMEOUT = 5.0


class BadBatchError(ValueError):
    pass


class Fragile(Branches):
    """Raises in forward or, by way of a tensor hook, in backward when told to."""

    def __init__(self, with_buffer: bool = False) -> None:
        super().__init__()
        if with_buffer:
            self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, fail: str = "") -> Tensor:
        if fail == "forward":
            raise BadBatchError("a bad batch")
        x = self.stem(x)
        if fail in ("backward", "kill"):
            x.register_hook(lambda grad: _end(fail))
        return self.branch[1](self.branch[0](x))


def _end(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise BadBatchError("a bad gradient")


def step(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, at: int, fail: str = ""):
    optimizer.zero_grad()
    ddp(batch(rank, at), fail).square().mean().backward()
    optimizer.step()


def start(with_buffer: bool = False, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    ddp = OurDDP(Fragile(with_buffer), **options)
    return ddp, torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)


SMALL = {"bucket_cap_mb": 0.00005}  # several buckets, after the first step


class TestGone:
    def test_a_rank_that_leaves_after_its_forward_raised_is_reported_by_the_others(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> tuple[str, float]:
            ddp, optimizer = start(**SMALL)
            for at in range(2):
                step(ddp, optimizer, rank, at)
            if rank == 1:
                ddp(batch(rank), "forward")
            began = time.monotonic()
            error = caught(lambda: step(ddp, optimizer, rank, 2))
            assert isinstance(error, CollectiveError), repr(error)
            assert isinstance(error, RuntimeError)
            return str(error), time.monotonic() - began

        left, gone = pool.run(
            run, group_timeout=GROUP_TIMEOUT, timeout=LIMIT, grace=8.0, return_exceptions=True
        )
        assert gone.error is not None
        assert gone.error.type_name == "BadBatchError"
        text, seconds = left.unwrap()
        assert seconds < GROUP_TIMEOUT + 3
        assert "rank 0 of 2" in text
        assert "step 3" in text
        assert "bucket 0 of 3" in text
        assert "branch.1.bias" in text or "branch.1.weight" in text

    def test_a_closed_connection_is_reported_at_once(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> tuple[str, float]:
            ddp, optimizer = start()
            step(ddp, optimizer, rank, 0)
            if rank == 1:
                os._exit(3)
            began = time.monotonic()
            error = caught(lambda: step(ddp, optimizer, rank, 1), CollectiveError)
            return str(error), time.monotonic() - began

        left, _ = pool.run(run, group_timeout=30, timeout=LIMIT, return_exceptions=True)
        text, seconds = left.unwrap()
        assert seconds < 5
        assert "rank 0 of 2: " in text

    @pytest.mark.parametrize("hook", ["synchronous", "bf16", "power_sgd"])
    def test_it_is_reported_so_also_where_a_hook_has_met_it(
        self, pool: WorkerPool, hook: str
    ) -> None:
        def synchronous(state: object, bucket: dist.GradBucket) -> torch.futures.Future:
            dist.all_reduce(bucket.buffer())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        def run(rank: int, world: int) -> tuple[str, float]:
            ddp, optimizer = start(**SMALL)
            ddp.register_comm_hook(
                None, synchronous if hook == "synchronous" else hooks.by_name(hook)
            )
            for at in range(2):
                step(ddp, optimizer, rank, at)
            if rank == 1:
                os._exit(3)
            began = time.monotonic()
            error = caught(lambda: step(ddp, optimizer, rank, 2), CollectiveError)
            return str(error), time.monotonic() - began

        outcomes = pool.run(run, ranks=3, group_timeout=10, timeout=LIMIT, return_exceptions=True)
        for rank in (0, 2):
            text, seconds = outcomes[rank].unwrap()
            assert seconds < 13
            assert f"rank {rank} of 3: " in text

    def test_a_rank_killed_in_its_backward_is_noticed_by_the_others(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> tuple[str, float]:
            ddp, optimizer = start(**SMALL)
            for at in range(2):
                step(ddp, optimizer, rank, at)
            began = time.monotonic()
            fail = "kill" if rank == 1 else ""
            error = caught(lambda: step(ddp, optimizer, rank, 2, fail), CollectiveError)
            return str(error), time.monotonic() - began

        outcomes = pool.run(run, ranks=3, group_timeout=10, timeout=LIMIT, return_exceptions=True)
        assert outcomes[1].error is not None
        assert "SIGKILL" in outcomes[1].error.message
        for rank in (0, 2):
            text, seconds = outcomes[rank].unwrap()
            assert seconds < 13
            assert f"rank {rank} of 3: step 3" in text
            assert "stem.weight" in text or "stem.bias" in text or "branch" in text

    def test_a_failed_collective_of_buffers_names_the_step(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> str:
            ddp, optimizer = start(with_buffer=True)
            step(ddp, optimizer, rank, 0)
            if rank == 0:
                os._exit(3)
            return str(caught(lambda: step(ddp, optimizer, rank, 1), CollectiveError))

        _, left = pool.run(run, group_timeout=10, timeout=LIMIT, return_exceptions=True)
        text = left.unwrap()
        assert "rank 1 of 2" in text
        # Which of the two a rank waits for first is not promised.
        assert "buffers before the forward of step 2" in text or "order of gradients" in text


class TestStays:
    @pytest.mark.parametrize(
        "options", [{}, SMALL, {"gradient_as_bucket_view": True}, {"static_graph": True}]
    )
    @pytest.mark.parametrize("find_unused", [False, True])
    def test_a_backward_that_raises_on_one_rank_is_told_to_the_others_at_once(
        self, pool: WorkerPool, options: dict[str, object], find_unused: bool
    ) -> None:
        def run(rank: int, world: int) -> tuple[list[str], list[float]]:
            with quiet():
                ddp, optimizer = start(find_unused_parameters=find_unused, **options)
            texts, times = [], []
            for at in range(7):
                if at not in (0, 3, 4):
                    step(ddp, optimizer, rank, at)
                    continue
                fail = "backward" if rank == 1 else ""
                began = time.monotonic()
                error = caught(lambda: step(ddp, optimizer, rank, at, fail))  # noqa: B023
                times.append(time.monotonic() - began)
                expected = BadBatchError if rank == 1 else PeerStepError
                assert isinstance(error, expected), repr(error)
                texts.append(str(error))
            assert_equal_on_all_ranks(ddp.parameters())
            return texts, times

        for rank, (texts, times) in enumerate(
            pool.run(run, ranks=3, timeout=LIMIT, group_timeout=20)
        ):
            assert max(times) < 12  # the group waits for 20
            if rank != 1:
                for text, at in zip(texts, (1, 4, 5), strict=True):
                    assert f"rank {rank}, step {at}: the backward of rank 1 raised" in text
                    assert "zero_grad" in text

    @pytest.mark.parametrize("ranks", [2, 3])
    @pytest.mark.parametrize("find_unused", [False, True])
    def test_it_is_told_with_hooks_as_well_also_where_they_carry_the_report(
        self, pool: WorkerPool, ranks: int, find_unused: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            for name in hooks.names():
                for options in ({}, SMALL):
                    with quiet():
                        ddp, optimizer = start(find_unused_parameters=find_unused, **options)
                    ddp.register_comm_hook(None, hooks.by_name(name))
                    for at in range(6):
                        if at not in (0, 3):
                            step(ddp, optimizer, rank, at)
                            continue
                        fail = "backward" if rank == 1 else ""
                        error = caught(lambda: step(ddp, optimizer, rank, at, fail))  # noqa: B023
                        expected = BadBatchError if rank == 1 else PeerStepError
                        assert isinstance(error, expected), (name, options, repr(error))
                    assert_equal_on_all_ranks(ddp.parameters())

        pool.run(run, ranks=ranks, timeout=LIMIT, group_timeout=20)

    @pytest.mark.parametrize("hook", [None, "bf16", "int8", "topk"])
    def test_what_raises_when_all_gradients_have_left_is_the_business_of_its_rank_alone(
        self, pool: WorkerPool, hook: str | None
    ) -> None:
        """A node before the module, and the others are through with the step by then."""

        def explode(_gradient: torch.Tensor) -> None:
            raise BadBatchError("too late")

        def run(rank: int, world: int) -> None:
            ddp = OurDDP(torch.nn.Linear(4, 2), bucket_cap_mb=1e-6)
            if hook is not None:
                ddp.register_comm_hook(None, hooks.by_name(hook))
            for at in range(6):
                early = torch.ones(1, 4, requires_grad=True)
                inputs = early.exp()  # its backward comes last
                if rank == 1 and at in (0, 3):
                    early.register_hook(explode)
                ddp.zero_grad()
                backward = ddp(inputs * (rank + at)).sum().backward
                if rank == 1 and at in (0, 3):
                    assert isinstance(caught(backward), BadBatchError)
                else:
                    backward()
            assert_equal_on_all_ranks([p.grad for p in ddp.parameters()])

        pool.run(run, timeout=LIMIT, group_timeout=20)

    def test_after_a_failed_backward_the_gradients_are_those_of_a_fresh_model(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            ddp, _ = start()
            fresh, _ = start()
            caught(lambda: ddp(batch(rank), "backward" if rank else "").sum().backward())
            for model in (ddp, fresh):
                model.zero_grad()
                model(batch(rank, 1)).sum().backward()
            for ours, expected in zip(ddp.parameters(), fresh.parameters(), strict=True):
                assert torch.equal(ours.grad, expected.grad)

        pool.run(run, timeout=LIMIT)

    def test_a_backward_that_raises_on_every_rank_leaves_all_usable(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp, optimizer = start()
            for at, fail in enumerate(["", "backward", "", "backward", "backward", "", ""]):
                if fail:
                    error = caught(lambda: step(ddp, optimizer, rank, at, fail))  # noqa: B023
                    assert isinstance(error, BadBatchError)
                else:
                    step(ddp, optimizer, rank, at)
            assert_equal_on_all_ranks(ddp.parameters())

        pool.run(run, timeout=LIMIT)

    def test_a_forward_skipped_on_one_rank_only_is_an_error_on_all(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> tuple[str, list[int]]:
            ddp, optimizer = start()
            text, failed = "", []
            for at in range(6):
                try:
                    step(ddp, optimizer, rank, at, "forward" if (rank, at) == (1, 2) else "")
                except BadBatchError:
                    continue  # here alone
                except PeerStepError as error:
                    text = str(error)
                    failed.append(at)
                    if rank == 0:
                        break  # so that both come to the same number of backwards
            return text, failed

        said = pool.run(run, timeout=LIMIT, group_timeout=GROUP_TIMEOUT, return_exceptions=True)
        assert said[0].unwrap()[1] == [2]
        assert "rank 0, step 3: a forward of rank 1 raised" in said[0].unwrap()[0]

    def test_every_rank_learns_of_the_skipped_forward_and_training_can_go_on(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> str:
            ddp, optimizer = start()
            step(ddp, optimizer, rank, 0)
            if rank == 1:
                caught(lambda: ddp(batch(rank), "forward"), BadBatchError)
            text = str(caught(lambda: step(ddp, optimizer, rank, 1), PeerStepError))
            for at in range(2, 5):
                step(ddp, optimizer, rank, at)
            assert_equal_on_all_ranks(ddp.parameters())
            return text

        for ranks in (2, 3):
            for rank, text in enumerate(pool.run(run, ranks=ranks, timeout=LIMIT)):
                assert f"rank {rank}, step 2: a forward of rank 1 raised" in text
                assert "zero_grad()" in text

    @pytest.mark.parametrize("with_buffer", [False, True])
    def test_a_batch_that_all_ranks_skip_together_is_no_error(
        self, pool: WorkerPool, with_buffer: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            ddp, optimizer = start(with_buffer)
            for at in range(6):
                bad = torch.zeros(1)
                try:
                    optimizer.zero_grad()
                    loss = ddp(batch(rank, at), "forward" if (rank, at) == (1, 2) else "").mean()
                except BadBatchError:
                    bad += 1
                dist.all_reduce(bad)
                if bad:
                    continue
                loss.backward()
                optimizer.step()
            assert_equal_on_all_ranks(ddp.parameters())

        pool.run(run, timeout=LIMIT)

    def test_a_forward_that_raises_and_is_repeated_is_no_error(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp, optimizer = start()
            step(ddp, optimizer, rank, 0)
            # Every rank has made two forwards, of which one has failed on rank 1.
            if rank == 1:
                caught(lambda: ddp(batch(rank), "forward"), BadBatchError)
            else:
                ddp(batch(rank))
            step(ddp, optimizer, rank, 1)
            assert_equal_on_all_ranks(ddp.parameters())

        pool.run(run, timeout=LIMIT)
