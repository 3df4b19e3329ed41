"""torch.compile around the wrapper, inside it and around the step; split graphs; overlap."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from oracles import DDP, History, TorchDDP, assert_same, loss_of, sgd
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from gradsync import patch_torch, unpatch_torch
from gradsync.testing import WorkerPool

pytestmark = pytest.mark.timeout(100)

LIMIT = 90.0
WIDTH = 520  # a layer is a little more than 1 MiB: with buckets of that size, a graph

OPTIONS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}
WAYS = [
    *(("wrapper", each) for each in OPTIONS),
    *(("module", each) for each in ("plain", "unused")),
    *(("blocks", each) for each in ("plain", "views")),
    *(("step", each) for each in ("plain", "static")),
]

Around = Callable[[nn.Module, int], AbstractContextManager[Any]]


class Net(nn.Module):
    """Four layers, of which the last is small."""

    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = checkpoint(self.second, x, use_reentrant=False) if self.checkpointed else self.second(x)
        return self.last(torch.tanh(self.third(torch.tanh(x))))


class Checkpointed(Net):
    checkpointed = True


class Choice(nn.Module):
    """Few parameters, of which a call may leave some unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(WIDTH, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, layers: int = 2) -> Tensor:
        if layers > 0:
            x = torch.tanh(self.first(x))
        return self.second(x) if layers > 1 else x * 2


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, WIDTH, generator=generator)


@contextmanager
def fresh(**config: Any) -> Iterator[None]:
    """Nothing compiled before, and nothing left for the next test."""
    from torch import _dynamo, _inductor  # their configs cannot be pickled, as the pool would

    inductor = {
        "compile_threads": 1,  # more would be processes, and outlive the test
        "_fuse_ddp_communication": False,  # python_reducer sets these two for good
        "_fuse_ddp_bucket_size": 25,
    }
    rules = _dynamo.trace_rules
    inlined = set(rules.LEGACY_MOD_INLINELIST)  # to which torch's class adds itself, for good
    _dynamo.reset()
    try:
        with _dynamo.config.patch(**config), _inductor.config.patch(inductor):
            yield
    finally:
        rules.LEGACY_MOD_INLINELIST.intersection_update(inlined)
        rules.get_legacy_mod_inlinelist.cache_clear()
        _dynamo.reset()


def compiled_backward(backend: Any = "aot_eager", **how: Any) -> AbstractContextManager[None]:
    return compiled_autograd._enable(lambda graph: torch.compile(graph, backend=backend, **how))


def always(context: Callable[[], AbstractContextManager[Any]]) -> Around:
    return lambda _ddp, _step: context()


UNCHANGED = always(nullcontext)


def build(
    cls: type[nn.Module],
    way: str,
    model: nn.Module,
    backend: Any = "aot_eager",
    **options: Any,
) -> tuple[nn.Module, Callable[..., Tensor]]:
    """A DDP, and the function that does forward and backward of a step."""
    if way == "module":
        model = torch.compile(model, backend=backend)
    if way == "blocks":
        model.first = torch.compile(model.first, backend=backend, fullgraph=True)
        model.third = torch.compile(model.third, backend=backend, fullgraph=True)
    ddp = cls(model, **{"bucket_cap_mb": 1, **options})
    call = torch.compile(ddp, backend=backend) if way == "wrapper" else ddp

    def step(*inputs: Any) -> Tensor:
        loss = loss_of(call(*inputs))
        loss.backward()
        return loss

    return ddp, torch.compile(step, backend=backend) if way == "step" else step


def train(
    rank: int,
    cls: type[nn.Module],
    way: str,
    *,
    make_model: Callable[[], nn.Module] = Net,
    backend: Any = "aot_eager",
    steps: int = 3,
    around: Around = UNCHANGED,
    arguments: Callable[[int], tuple[Any, ...]] = lambda step: (),
    **options: Any,
) -> History:
    ddp, step = build(cls, way, make_model(), backend, **options)
    history = History()
    optimizer = sgd(ddp.parameters())
    for index in range(steps):
        with around(ddp, index):
            step(batch(rank, index), *arguments(index))
        history.record_grads(ddp)
        optimizer.step()
        optimizer.zero_grad()
        history.record_weights(ddp)
    for each in (history.grads, history.weights):
        each[:] = [{n.replace("_orig_mod.", ""): t for n, t in one.items()} for one in each]
    return history


def check(
    rank: int,
    way: str,
    *,
    config: dict[str, Any] | None = None,
    around: Around = UNCHANGED,
    around_eager: Around = UNCHANGED,
    against_torch: bool = True,
    **how: Any,
) -> None:
    """Ours compiled gives what ours gives in eager mode, and torch's compiled the same way."""
    with fresh(**(config or {})):
        ours = train(rank, DDP, way, around=around, **how)
    with fresh():
        eager = train(rank, DDP, "eager", around=around_eager, **how)
    ours.assert_equal(eager, bitwise=False, what="eager mode")
    if against_torch:
        with fresh(**(config or {})):
            theirs = train(rank, TorchDDP, way, around=around, **how)
        ours.assert_equal(theirs, bitwise=True, what="torch's DDP, compiled the same way")


def skip_sync(ddp: nn.Module, step: int) -> AbstractContextManager[None]:
    return ddp.no_sync() if step % 2 == 0 else nullcontext()


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
                assert TorchDDP._get_active_ddp_module() is not None
                assert DDP._get_active_ddp_module() is not None
                raise KeyError("inside")

        def run(rank: int, world: int) -> None:
            with pytest.raises(KeyError, match="inside"):
                DDP(Fails(2, 2))(torch.ones(1, 2))
            assert TorchDDP._get_active_ddp_module() is None
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
