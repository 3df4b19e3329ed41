"""Several contexts of distributed autograd, open together or in several threads."""

from __future__ import annotations

import queue
import threading

import rpc_pool
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from replicas import OurDDP, assert_equal_on_all_ranks, assert_same, batch, caught, gradients
from rpc_pool import RpcPool, assert_close, mlp
from torch import Tensor, nn

pool = rpc_pool.pool  # in the place of the one that all tests share


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
