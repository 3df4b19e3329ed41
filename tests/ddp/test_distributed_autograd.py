"""DDP inside a context of torch.distributed.autograd: gradients are in the context.

The cases of torch's own suite (``ddp_under_dist_autograd_test``) are here and in
test_remote_modules.py, smaller, and more.
"""

from __future__ import annotations

import rpc_pool
import torch
import torch.distributed.autograd as dist_autograd
from replicas import (
    Branches,
    Count,
    OurDDP,
    assert_equal_on_all_ranks,
    assert_same,
    batch,
    caught,
    gradients,
)
from rpc_pool import RANKS, RpcPool, assert_close, mlp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import gradsync

pool = rpc_pool.pool  # in the place of the one that all tests share


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.EmbeddingBag(10, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.table(words, offsets))


def words(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 10, (10,), generator=generator), torch.tensor([0, 4])


class TestAgainstLocalBackward:
    """The gradients in the context are those that a plain backward leaves in .grad."""

    def test_dense_models_in_buckets_of_all_kinds(self, pool: RpcPool) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            cases = [
                (mlp, {}, 4),
                (mlp, {"gradient_as_bucket_view": True}, 4),
                (mlp, {"bucket_cap_mb": 0.0001}, 4),
                (mlp, {"reduce": "sum"}, 4),
                (mlp, {"static_graph": True}, 4),
                (mlp, {"find_unused_parameters": True}, 4),
                (lambda: mlp(4, 70_000), {"bucket_cap_mb": 1}, 4),  # large: its own buffer
                (lambda: mlp(200, 200), {"gradient_as_bucket_view": True}, 200),
            ]
            with remote.workers(rank, world):
                for build, options, width in cases:
                    distributed, local = OurDDP(build(), **options), OurDDP(build(), **options)
                    for step in range(3):
                        x = batch(rank, step, width=width)
                        got = remote.step(distributed, lambda x=x, ddp=distributed: ddp(x).norm())
                        assert all(p.grad is None for p in distributed.parameters())
                        local.zero_grad()
                        local(x).norm().backward()
                        assert_same(got, gradients(local), hint=(options, step))

        pool.run(run)

    def test_sparse_gradients(self, pool: RpcPool) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            with remote.workers(rank, world):
                for options in ({}, {"find_unused_parameters": True}):
                    distributed, local = OurDDP(Bag(), **options), OurDDP(Bag(), **options)
                    for step in range(3):
                        inputs = words(rank, step)
                        got = remote.step(
                            distributed, lambda i=inputs, ddp=distributed: ddp(*i).norm()
                        )
                        local.zero_grad()
                        local(*inputs).norm().backward()
                        assert got["module.table.weight"].is_sparse
                        assert_same(got, gradients(local), hint=(options, step))

        pool.run(run)

    def test_both_kinds_of_backward_take_turns_on_one_module(self, pool: RpcPool) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            with remote.workers(rank, world):
                ddp = OurDDP(mlp())
                for step in range(3):
                    x = batch(rank, step)
                    ddp.zero_grad()
                    ddp(x).norm().backward()
                    kept = gradients(ddp)
                    got = remote.step(ddp, lambda x=x: ddp(x).norm())
                    assert_close(got, kept)
                    assert_same(gradients(ddp), kept)  # left alone

        pool.run(run)

    def test_a_plain_backward_of_a_forward_in_a_context_goes_to_grad(self, pool: RpcPool) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            with remote.workers(rank, world):
                ddp, other = OurDDP(mlp()), OurDDP(mlp())
                with dist_autograd.context() as context:
                    ddp(batch(rank)).norm().backward()
                    assert not dist_autograd.get_gradients(context)
                other(batch(rank)).norm().backward()
                assert_same(gradients(ddp), gradients(other))

        pool.run(run)

    def test_a_hook_reduces_and_no_more_collectives_are_issued(self, pool: RpcPool) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            with remote.workers(rank, world):
                hooked = OurDDP(mlp())
                hooked.register_comm_hook(None, allreduce_hook)
                for ddp in (OurDDP(mlp()), hooked):
                    for step in range(3):
                        x = batch(rank, step)
                        count = Count()
                        got = remote.step(ddp, lambda x=x, ddp=ddp: ddp(x).norm())
                        in_context = count()
                        ddp.zero_grad()
                        ddp(x).norm().backward()
                        assert_close(got, gradients(ddp))
                        if step:
                            assert in_context == count()
                    ddp.zero_grad()

        pool.run(run)

    def test_full_buckets_are_reduced_while_the_backward_runs(self, pool: RpcPool) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            with remote.workers(rank, world):
                ddp, events = OurDDP(mlp(), bucket_cap_mb=0.0001), []

                def hook(_state, bucket):
                    events.append("bucket")
                    return allreduce_hook(None, bucket)

                ddp.register_comm_hook(None, hook)
                for step in range(3):
                    x = batch(rank, step).requires_grad_()
                    x.register_hook(lambda _: events.append("inputs reached"))
                    events.clear()
                    remote.step(ddp, lambda x=x: ddp(x).norm())
                assert events[0] == "bucket"
                assert "inputs reached" in events[1:]

        pool.run(run)


class TestUnevenInputs:
    def test_a_rank_that_has_joined_mirrors_steps_in_contexts_and_outside(
        self, pool: RpcPool
    ) -> None:
        def run(rank: int, world: int) -> list[Tensor]:
            import remote_parts as remote

            with remote.workers(rank, world):
                ddp = OurDDP(mlp())
                with ddp.join():
                    for step in range(3 if rank == 0 else 1):
                        x = batch(rank, step)
                        got = remote.step(ddp, lambda x=x: ddp(x).norm())
                        ddp.zero_grad()
                        ddp(x).norm().backward()
                        assert_close(got, gradients(ddp))
                        if step:  # alone, and divided by all ranks
                            local = mlp()
                            local(x).norm().backward()
                            for mine, theirs in zip(local.parameters(), got.values(), strict=True):
                                torch.testing.assert_close(mine.grad / world, theirs)
                return [p.detach() for p in ddp.parameters()]

        first, *others = pool.run(run)
        assert all(all(map(torch.equal, first, other)) for other in others)


class TestUnusedParameters:
    def test_each_rank_gets_the_averages_of_what_the_others_used(self, pool: RpcPool) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            with remote.workers(rank, world):
                for views in (False, True):
                    options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
                    distributed = OurDDP(Branches(RANKS + 1), **options)
                    local = OurDDP(Branches(RANKS + 1), **options)
                    for step in range(3):
                        x = batch(rank, step)
                        got = remote.step(
                            distributed, lambda x=x, ddp=distributed: ddp(x, rank).norm()
                        )
                        local.zero_grad()
                        local(x, rank).norm().backward()
                        expected = gradients(local)
                        for name in ("weight", "bias"):  # nobody used it: zeros, since in a context
                            name = f"module.branch.{RANKS}.{name}"
                            assert expected[name] is None
                            assert not got[name].any()
                            expected[name] = torch.zeros_like(got[name])
                        assert_same(got, expected, hint=step)

        pool.run(run)

    def test_not_allowed_they_are_named_on_all_ranks_and_training_can_go_on(
        self, pool: RpcPool
    ) -> None:
        def run(rank: int, world: int) -> str:
            import remote_parts as remote

            with remote.workers(rank, world):
                ddp = OurDDP(Branches(1))
                message = ""
                for use in ([0], [], [0]):
                    try:
                        got = remote.step(ddp, lambda use=use: ddp(batch(rank), *use).norm())
                        if use:
                            assert_equal_on_all_ranks(got.values())
                        ddp.reducer.raise_deferred()
                    except RuntimeError as error:
                        message = str(error)
                return message

        for message in pool.run(run):
            assert "branch.0.weight" in message
            assert "find_unused_parameters=True" in message

    def test_a_static_graph_may_leave_some_out(self, pool: RpcPool) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            with remote.workers(rank, world):
                distributed = OurDDP(Branches(RANKS), static_graph=True)
                local = OurDDP(Branches(RANKS), static_graph=True)
                for step in range(3):
                    x = batch(rank, step)
                    got = remote.step(distributed, lambda x=x, ddp=distributed: ddp(x, rank).norm())
                    local.zero_grad()
                    local(x, rank).norm().backward()
                    assert_same(got, gradients(local), hint=step)

        pool.run(run)


class TestFailures:
    def test_a_backward_that_raises_on_one_rank_is_told_to_all_and_the_next_one_works(
        self, pool: RpcPool
    ) -> None:
        def run(rank: int, world: int) -> str:
            import remote_parts as remote

            def explode(_gradient: Tensor) -> None:
                raise ValueError("out of luck")

            with remote.workers(rank, world):
                ddp = OurDDP(mlp())
                message = ""
                for step in range(4):
                    x = batch(rank, step).requires_grad_()
                    if step == 1 and rank == 0:
                        x.register_hook(explode)
                    try:
                        got = remote.step(ddp, lambda x=x: ddp(x).norm())
                    except RuntimeError as error:
                        message = str(error)
                    else:
                        assert_equal_on_all_ranks(got.values())
                return message

        first, *others = pool.run(run)
        assert "python_error" in first  # all that distributed autograd says
        assert all("rank 0 raised" in other for other in others)

    def test_what_needs_grad_is_refused_in_a_context(self, pool: RpcPool) -> None:
        def run(rank: int, world: int) -> list[str]:
            import remote_parts as remote

            with remote.workers(rank, world):
                precise = gradsync.MixedPrecision(param_dtype=torch.bfloat16)
                stepped = OurDDP(mlp())
                stepped.optimize_in_backward(torch.optim.SGD, lr=0.1)
                ddps = [OurDDP(mlp(), mixed_precision=precise), stepped]
                return [
                    str(caught(lambda ddp=ddp: remote.step(ddp, lambda: ddp(batch(rank)).norm())))
                    for ddp in ddps
                ]

        for messages in pool.run(run):
            assert "mixed_precision" in messages[0]
            assert "optimizer in the backward" in messages[1]
