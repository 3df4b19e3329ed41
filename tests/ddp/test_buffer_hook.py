"""Buffer hooks: a function of the user's makes the buffers equal, before or after the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from replicas import CLASSES, OurDDP, assert_equal_on_all_ranks, assert_same, batch, caught, weights
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BufferCommHookLocation

from gradsync import ArgumentError
from gradsync.testing import WorkerPool

LIMIT = 40.0
PRE, POST = _BufferCommHookLocation.PRE_FORWARD, _BufferCommHookLocation.POST_FORWARD


class Marked(nn.Module):
    """Its buffers tell how often, and with what, the forward has run."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(4, 2)
        self.register_buffer("mark", torch.full((2,), float(rank)))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.mark.tolist()
        self.calls += 1
        return self.layer(x)


class Calls:
    """A hook that sums ``mark`` over the ranks, and what it was given."""

    def __init__(self, *, futures: bool = False) -> None:
        self.given: list[list[str]] = []
        self.grad_mode: list[bool] = []
        self._futures = futures

    def __call__(self, state: Any, buffers: dict[str, Tensor]) -> Any:
        assert state == "state"
        self.given.append(sorted(buffers))
        self.grad_mode.append(torch.is_grad_enabled())
        if not self._futures:
            dist.all_reduce(buffers["mark"])
            return None
        return [dist.all_reduce(buffers["mark"], async_op=True).get_future()]


class TestAgainstTorch:
    @pytest.mark.parametrize("futures", [False, True])
    @pytest.mark.parametrize("where", [PRE, POST])
    def test_it_runs_when_and_with_what_torchs_class_runs_it(
        self, pool: WorkerPool, where: _BufferCommHookLocation, futures: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            histories = []
            for cls in CLASSES:
                ddp = cls(Marked(rank), init_sync=False)
                hook = Calls(futures=futures)
                ddp._register_buffer_comm_hook("state", hook, where)
                history: list[Any] = []

                def note(ddp=ddp, history=history, hook=hook) -> None:
                    state = [ddp.module.mark.tolist(), ddp.module.calls.item()]
                    history.append([len(hook.given), *state])

                for step in range(3):
                    ddp(batch(rank, step)).sum().backward()
                    note()
                with ddp.no_sync():
                    ddp(batch(rank)).sum().backward()
                    ddp(batch(rank)).sum().backward()
                ddp(batch(rank)).sum().backward()
                note()
                ddp.eval()
                with torch.no_grad():
                    ddp(batch(rank))
                    ddp(batch(rank))
                ddp.train()
                ddp(batch(rank)).sum().backward()
                ddp(batch(rank)).sum().backward()
                note()
                history += [
                    hook.given,
                    hook.grad_mode,
                    weights(ddp)["module.layer.weight"].tolist(),
                ]
                histories.append(history)
            assert histories[0] == histories[1]
            assert ["calls", "mark"] in hook.given
            assert not any(hook.grad_mode)

        pool.run(run, timeout=LIMIT, group_timeout=10)

    def test_the_broadcast_does_not_run_as_well(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for cls in CLASSES:
                ddp = cls(Marked(rank), init_sync=False)
                ddp._register_buffer_comm_hook(None, lambda state, buffers: None, PRE)
                for step in range(3):
                    ddp(batch(rank, step)).sum().backward()
                assert ddp.module.mark.tolist() == [rank, rank]
                plain = cls(Marked(rank), init_sync=False)
                plain(batch(rank)).sum().backward()
                assert plain.module.mark.tolist() == [0, 0]

        pool.run(run, timeout=LIMIT)

    def test_without_buffers_or_with_those_left_alone_it_never_runs(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for cls in CLASSES:
                for build, options in (
                    (lambda: nn.Linear(4, 2), {}),
                    (Marked, {"forward_sync_buffers": False}),
                ):
                    for where in (PRE, POST):
                        ddp = cls(build(), **options)
                        hook = Calls()
                        ddp._register_buffer_comm_hook("state", hook, where)
                        for step in range(2):
                            ddp(batch(rank, step)).sum().backward()
                        assert not hook.given

        pool.run(run, timeout=LIMIT)

    def test_a_hook_that_averages_statistics_gives_torchs_model(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            def average(state: Any, buffers: dict[str, Tensor]) -> list[Any]:
                floats = [b for b in buffers.values() if b.is_floating_point()]
                for buffer in floats:
                    buffer.data.div_(world)  # unseen by autograd, which has saved it
                futures = [dist.all_reduce(b, async_op=True).get_future() for b in floats]
                if state is PRE:  # the forward is about to change them
                    torch.futures.wait_all(futures)
                return futures

            for where in (PRE, POST):
                ended = []
                for cls in CLASSES:
                    torch.manual_seed(3)
                    ddp = cls(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
                    ddp._register_buffer_comm_hook(where, average, where)
                    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
                    for step in range(4):
                        optimizer.zero_grad()
                        ddp(batch(rank, step)).square().mean().backward()
                        optimizer.step()
                    ended.append(weights(ddp))
                assert_same(*ended, hint=where)
                if where is POST:
                    assert_equal_on_all_ranks(ended[1].values())

        pool.run(run, timeout=LIMIT)


class TestFutures:
    def test_they_are_waited_for_by_the_end_of_the_backward(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            import threading

            for where in (PRE, POST):
                ddp = OurDDP(Marked())
                fulfilled: list[float] = []

                def slowly(state, buffers, fulfilled=fulfilled):
                    future: Any = torch.futures.Future()

                    def fulfil() -> None:
                        fulfilled.append(1.0)
                        future.set_result(None)

                    threading.Timer(0.3, fulfil).start()
                    return [future]

                ddp._register_buffer_comm_hook(None, slowly, where)
                for step in range(2):
                    output = ddp(batch(rank, step))
                    assert len(fulfilled) == step  # not by the end of the forward
                    output.sum().backward()
                    assert len(fulfilled) == step + 1

        pool.run(run, timeout=LIMIT)

    def test_one_that_fails_fails_the_backward(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            def fails(state, buffers):
                future: Any = torch.futures.Future()
                future.set_exception(ValueError("no luck"))
                return [future]

            ddp = OurDDP(Marked())
            ddp._register_buffer_comm_hook(None, fails)
            assert "no luck" in str(caught(ddp(batch(rank)).sum().backward, ValueError))
            ddp.buffer_hook = None
            ddp.zero_grad()
            ddp(batch(rank)).sum().backward()
            assert_equal_on_all_ranks(p.grad for p in ddp.parameters())

        pool.run(run, timeout=LIMIT, group_timeout=10)


class TestRegistration:
    def test_what_is_not_callable_or_no_location_is_refused(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(Marked())
            register = ddp._register_buffer_comm_hook
            assert "callable" in str(caught(lambda: register(None, "hook"), AssertionError))
            error = caught(lambda: register(None, Calls(), "PRE_FORWARD"), ArgumentError)
            assert "comm_hook_location" in str(error)
            ddp(batch(rank)).sum().backward()

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_the_default_is_after_the_forward(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            seen = []
            for cls in CLASSES:
                ddp = cls(Marked(1 + rank), init_sync=False)
                ddp._register_buffer_comm_hook("state", Calls())
                ddp(batch(rank)).sum().backward()
                seen.append([ddp.module.seen, ddp.module.mark.tolist()])
            assert seen[0] == seen[1] == [[1.0 + rank] * 2, [3.0, 3.0]]

        pool.run(run, timeout=LIMIT)
