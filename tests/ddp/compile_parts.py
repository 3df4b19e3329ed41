"""What the tests of torch.compile share: models, ways to compile a step, and what to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from oracles import DDP, History, TorchDDP, loss_of, sgd
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

LIMIT = 90.0
WIDTH = 520  # a layer is a little more than 1 MiB: with buckets of that size, a graph

OPTIONS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}

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
