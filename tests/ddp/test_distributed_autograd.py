"""DDP inside a context of torch.distributed.autograd: gradients are in the context.

The cases of torch's own suite (``ddp_under_dist_autograd_test``) are here, smaller, and more.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
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
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import gradsync
from gradsync.testing import WorkerPool

T = TypeVar("T")

LIMIT = 90.0
RANKS = 3


class RpcPool:
    """Three workers that keep their RPC from test to test; after a failure three new ones."""

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None

    def run(self, fn: Callable[..., T]) -> list[T]:
        self._pool = self._pool or WorkerPool(max_ranks=RANKS)
        try:
            return self._pool.run(fn, ranks=RANKS, timeout=LIMIT)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


@pytest.fixture(scope="module")
def pool(nothing_left_behind: None) -> Iterator[RpcPool]:
    workers = RpcPool()
    yield workers
    workers.close()


def mlp(width: int = 4, hidden: int = 8) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, 2))


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


def assert_close(left: dict[str, Tensor | None], right: dict[str, Tensor | None]) -> None:
    """For two steps of one module: in between its buckets change, and the order of the sums."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name])


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


class TestRemoteModules:
    """Ranks 0 and 1 train, rank 2 holds what is remote; backward runs through all of it."""

    @pytest.mark.parametrize("place", ["below", "above", "between", "inside"])
    def test_local_and_remote_layers_have_the_same_gradients(
        self, pool: RpcPool, place: str
    ) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote
            from torch.distributed.nn import RemoteModule

            trainers = dist.new_group([0, 1])
            with remote.workers(rank, world):
                if rank < 2:
                    far = RemoteModule("w2", remote.layer, (4, 4, 11))
                    near = remote.layer(4, 4, 11)
                    compare(place, far, near, rank, trainers, remote)
                dist.barrier()

        def compare(place, far, near, rank, trainers, remote) -> None:
            def build(middle):
                first, last = remote.layer(4, 4, 12), remote.layer(4, 4, 13)
                wrap = lambda module: OurDDP(module, process_group=trainers)  # noqa: E731
                if place == "below":
                    last = wrap(last)
                    return [last], lambda x: last(middle(x))
                if place == "above":
                    first = wrap(first)
                    return [first], lambda x: middle(first(x))
                if place == "between":
                    first, last = wrap(first), wrap(last)
                    return [first, last], lambda x: last(middle(first(x)))
                whole = wrap(Around(first, middle, last))
                return [whole], whole

            for step in range(2):
                x = batch(rank, step)
                modules, forward = build(near)
                near.zero_grad()
                forward(x).square().sum().backward()
                expected = [gradients(module) for module in modules]
                modules, forward = build(far)
                with dist_autograd.context() as context:
                    dist_autograd.backward(context, [forward(x).square().sum()])
                    for module, wanted in zip(modules, expected, strict=True):
                        assert_same(remote.gradients(module, context), wanted, hint=(place, step))
                    theirs = rpc.rpc_sync(
                        "w2", remote.gradients_of, args=(far.get_module_rref(), context)
                    )
                    for mine, other in zip(near.parameters(), theirs, strict=True):
                        torch.testing.assert_close(mine.grad, other)
                dist.barrier(trainers)

        pool.run(run)

    def test_gradients_of_opposite_examples_cancel_where_ddp_is_and_only_there(
        self, pool: RpcPool
    ) -> None:
        """DDP nowhere, around all, or around the last layer alone; even and uneven inputs."""

        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            trainers = dist.new_group([0, 1])
            with remote.workers(rank, world):
                if rank < 2:
                    table = rpc.remote("w2", remote.Table, args=(2, 3))
                    net = rpc.remote("w2", remote.layer, args=(5, 3, 17))
                    for mode in ("none", "outside", "inside"):
                        train(mode, table, net, rank, trainers, remote)
                dist.barrier()

        def train(mode, table, net, rank, trainers, remote) -> None:
            model = Hybrid(table, net, remote.call)
            if mode == "outside":
                model = OurDDP(model, process_group=trainers)
            elif mode == "inside":
                model.last = OurDDP(model.last, process_group=trainers)
            sign = 1.0 if rank else -1.0
            dense, sparse = torch.tensor([[1.0, -1.0], [2.0, 1.0]]), torch.tensor([0, 1])
            for _ in range(2):
                got = remote.step(model, lambda: (model(dense, sparse) * sign).sum())
                for name, gradient in got.items():
                    averaged = mode == "outside" or (mode == "inside" and "last" in name)
                    assert averaged == (not gradient.any()), (mode, name, gradient)
            if mode != "outside":
                return
            with model.join():
                for extra in range(1 + rank):
                    got = remote.step(model, lambda: (model(dense, sparse) * sign).sum())
                    for name, gradient in got.items():  # rank 1 is alone in its last step
                        assert gradient.any() == bool(extra), (extra, name, gradient)

        pool.run(run)

    def test_replicas_that_are_called_by_others_are_reduced(self, pool: RpcPool) -> None:
        """Rank 0 holds no replica: it calls those of ranks 1 and 2 in one context."""

        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            with remote.workers(rank, world):
                if rank == 0:
                    replicas = [rpc.remote(f"w{r}", remote.replica, args=([1, 2],)) for r in (1, 2)]
                    for step in range(3):
                        with dist_autograd.context() as context:
                            outputs = [
                                rpc.rpc_async(
                                    each.owner(), remote.call, args=(each, batch(r, step))
                                )
                                for r, each in enumerate(replicas)
                            ]
                            loss = sum(output.wait().square().sum() for output in outputs)
                            dist_autograd.backward(context, [loss])
                            found = [
                                rpc.rpc_sync(
                                    each.owner(), remote.gradients_of, args=(each, context)
                                )
                                for each in replicas
                            ]
                        alone = remote.layer(4, 2, seed=5)
                        for r in range(2):
                            (alone(batch(r, step)).square().sum() / 2).backward()
                        for one, other, p in zip(*found, alone.parameters(), strict=True):
                            assert torch.equal(one, other)
                            torch.testing.assert_close(one, p.grad)
                dist.barrier()

        pool.run(run)

    def test_the_distributed_optimizer_steps_with_what_is_reduced(self, pool: RpcPool) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote
            from torch.distributed.nn import RemoteModule
            from torch.distributed.optim import DistributedOptimizer

            trainers = dist.new_group([0, 1])
            with remote.workers(rank, world):
                if rank < 2:
                    far = RemoteModule("w2", remote.Table, (6, 4))
                    ddp = OurDDP(remote.layer(4, 2, 5), process_group=trainers)
                    near, plain = remote.Table(6, 4), remote.layer(4, 2, 5)
                    optimizer = DistributedOptimizer(
                        torch.optim.SGD,
                        [rpc.RRef(p) for p in ddp.parameters()] + far.remote_parameters(),
                        lr=0.1,
                    )
                    with dist_autograd.context() as context:
                        ids = torch.tensor([rank, 2, 4])
                        loss = ddp(far(ids)).square().sum()
                        dist.barrier(trainers)  # both have read the table before it is stepped
                        dist_autograd.backward(context, [loss])
                        optimizer.step(context)
                    for r in range(2):
                        (plain(near(torch.tensor([r, 2, 4]))).square().sum() / 2).backward()
                    torch.optim.SGD(plain.parameters(), lr=0.1).step()
                    for got, wanted in zip(ddp.parameters(), plain.parameters(), strict=True):
                        torch.testing.assert_close(got, wanted)
                    assert_equal_on_all_ranks(ddp.parameters(), trainers)
                dist.barrier()

        pool.run(run)


class Around(nn.Module):
    """A DDP around it sees two local layers; what lies between may be anywhere."""

    def __init__(self, first: nn.Module, middle: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.middle = [middle]  # not a submodule: reduced by nobody

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle[0](self.first(x)))


class Hybrid(nn.Module):
    """Torch's own test model: an embedding and a net elsewhere, two layers here."""

    def __init__(self, table: rpc.RRef, net: rpc.RRef, call: object) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.net, self.call = table, net, call
        self.first, self.last = nn.Linear(2, 2), nn.Linear(3, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        rows = rpc.rpc_sync(self.table.owner(), self.call, args=(self.table, sparse))
        both = torch.cat((self.first(dense), rows), 1)
        return self.last(rpc.rpc_sync(self.net.owner(), self.call, args=(self.net, both)))


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


class TestSeveralContexts:
    def test_contexts_that_are_open_together_keep_their_gradients_apart(
        self, pool: RpcPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            def forward(ddp, x, opened):
                with dist_autograd.context() as context:
                    opened.put((context, ddp(x).norm()))
                    assert closed.wait(30)  # the context lives as long as this thread is in it

            with remote.workers(rank, world):
                ddp, local = OurDDP(mlp()), OurDDP(mlp())
                opened, closed = queue.Queue(), threading.Event()
                inputs = [batch(rank, step) for step in range(3)]
                losses, threads = [], []
                for x in inputs:
                    threads.append(threading.Thread(target=forward, args=(ddp, x, opened)))
                    threads[-1].start()
                    losses.append(opened.get(timeout=30))
                for context, loss in reversed(losses):
                    dist_autograd.backward(context, [loss])
                found = [remote.gradients(ddp, context) for context, _ in losses]
                closed.set()
                for thread in threads:
                    thread.join(30)
                for x, got in zip(inputs, found, strict=True):
                    local.zero_grad()
                    local(x).norm().backward()
                    assert_close(got, gradients(local))

        pool.run(run)

    def test_two_threads_train_two_modules_at_once(self, pool: RpcPool) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            def train(index: int, ddp: nn.Module, local: nn.Module) -> None:
                for step in range(6):
                    x = batch(rank, 10 * index + step)
                    got = remote.step(ddp, lambda x=x: ddp(x).norm())
                    local.zero_grad()
                    local(x).norm().backward()
                    assert_same(got, gradients(local), hint=(index, step))
                done.append(index)

            done: list[int] = []
            groups = [dist.new_group() for _ in range(2)]
            with remote.workers(rank, world):
                threads = [
                    threading.Thread(
                        target=train,
                        args=(
                            index,
                            OurDDP(mlp(), process_group=group),
                            OurDDP(mlp(), process_group=group),
                        ),
                    )
                    for index, group in enumerate(groups)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(40)
                assert sorted(done) == [0, 1]

        pool.run(run)

    def test_two_backwards_of_one_module_at_once_are_refused(self, pool: RpcPool) -> None:
        def run(rank: int, world: int) -> str:
            import remote_parts as remote

            class Gate(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x.clone()

                @staticmethod
                def backward(ctx, gradient):
                    reached.set()
                    assert go_on.wait(30)
                    return gradient

            class Gated(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.first, self.last = remote.layer(4, 4, 1), remote.layer(4, 2, 2)
                    self.gated = True

                def forward(self, x: Tensor) -> Tensor:
                    x = self.first(x)
                    return self.last(Gate.apply(x) if self.gated else x)

            reached, go_on = threading.Event(), threading.Event()
            with remote.workers(rank, world):
                ddp = OurDDP(Gated())
                with dist_autograd.context() as one:
                    slow = ddp(batch(rank)).norm()
                    ddp.module.gated = False
                    with ContextOfAnother(ddp, batch(rank)) as (two, quick):
                        first = threading.Thread(target=dist_autograd.backward, args=(one, [slow]))
                        first.start()
                        assert reached.wait(30)
                        caught(lambda: dist_autograd.backward(two, [quick]), RuntimeError)
                        go_on.set()
                        first.join(30)
                    got = remote.gradients(ddp, one)
                    assert_equal_on_all_ranks(got.values())
                return ddp.reducer.last_error  # torch's says nothing

        for message in pool.run(run):
            assert "must take turns" in message

    def test_backwards_without_sync_gather_in_their_context(self, pool: RpcPool) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            with remote.workers(rank, world):
                distributed, local = OurDDP(mlp()), OurDDP(mlp())
                with dist_autograd.context() as context:
                    for step in range(2):
                        with distributed.no_sync():
                            loss = distributed(batch(rank, step)).norm()
                        dist_autograd.backward(context, [loss])
                    dist_autograd.backward(context, [distributed(batch(rank, 2)).norm()])
                    got = remote.gradients(distributed, context)
                with local.no_sync():
                    for step in range(2):
                        local(batch(rank, step)).norm().backward()
                local(batch(rank, 2)).norm().backward()
                assert_same(got, gradients(local))

        pool.run(run)


class ContextOfAnother:
    """A context and a loss in it, made by another thread: a thread can be in one context only."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self._leave, self._entered = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(module, x))

    def _run(self, module: nn.Module, x: Tensor) -> None:
        with dist_autograd.context() as context:
            self.context, self.loss = context, module(x).norm()
            self._entered.set()
            self._leave.wait(60)

    def __enter__(self) -> tuple[int, Tensor]:
        self._thread.start()
        assert self._entered.wait(30)
        return self.context, self.loss

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join(30)


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
