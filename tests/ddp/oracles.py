"""Train the same model with ours, with torch's DDP and in one process, and compare.

All three see the same data: a rank its own batch, the single process the batches of all ranks
joined. Losses are means over the batch, so the average of the ranks' gradients is the gradient
of the joined batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_leaves

from gradsync import DistributedDataParallel as DDP

FEATURES = 6
ROWS = 4

Model = nn.Module
Step = Callable[[Model, Tensor, int], Any]

# By dtype: what rounding may differ by between sums in another order.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 2e-5, torch.complex64: 2e-5}


class Net(nn.Module):
    """Three layers, which one stands in for most models where the model does not matter."""

    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width, dtype=dtype)
        self.second = nn.Linear(width, width, dtype=dtype)
        self.last = nn.Linear(width, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def batch(step: int, rank: int, features: Sequence[int] = (FEATURES,)) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, *features, generator=generator)


def loss_of(output: Any) -> Tensor:
    """A mean over the batch that every tensor in ``output`` has a part in."""
    terms = [t.abs().square().mean().double() for t in tree_leaves(output) if torch.is_tensor(t)]
    return torch.stack(terms).sum()


def plain_step(model: Model, x: Tensor, _index: int) -> None:
    loss_of(model(x)).backward()


def bare(model: Model) -> Model:
    while isinstance(model, (DDP, TorchDDP)):
        model = model.module
    return model


def no_sync(model: Model) -> AbstractContextManager[None]:
    return model.no_sync() if isinstance(model, (DDP, TorchDDP)) else nullcontext()


def seeded(make_model: Callable[[], Model]) -> Model:
    """The same initial weights wherever it is called."""
    torch.manual_seed(5)
    return make_model()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass
class History:
    """Gradients and weights after each step, by parameter name."""

    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)

    def record_grads(self, model: Model) -> None:
        self.grads.append({n: _copy(p.grad) for n, p in bare(model).named_parameters()})

    def record_weights(self, model: Model) -> None:
        self.weights.append({n: p.detach().clone() for n, p in bare(model).named_parameters()})

    def assert_equal(self, other: History, *, bitwise: bool, what: str) -> None:
        for kind in ("grads", "weights"):
            ours, theirs = getattr(self, kind), getattr(other, kind)
            assert len(ours) == len(theirs), what
            for step, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
                assert mine.keys() == its.keys(), what
                for name in mine:
                    where = f"{kind} of {name} after step {step}, compared with {what}"
                    assert_same(mine[name], its[name], bitwise=bitwise, what=where)


def assert_same(mine: Tensor | None, its: Tensor | None, *, bitwise: bool, what: str) -> None:
    if mine is None or its is None:
        assert mine is its, f"{what}: one is None: {mine} and {its}"
        return
    assert mine.stride() == its.stride() or 0 in mine.shape or not bitwise, (
        f"{what}: strides {mine.stride()} and {its.stride()}"
    )
    tolerance = 0.0 if bitwise else _TOLERANCE.get(mine.dtype, 1e-9)
    torch.testing.assert_close(
        mine, its, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def train(
    model: Model,
    batch_of: Callable[[int], Tensor],
    *,
    step: Step = plain_step,
    steps: int = 3,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    set_to_none: bool = True,
) -> History:
    history = History()
    optim = optimizer(model.parameters())
    for index in range(steps):
        optim.zero_grad(set_to_none=set_to_none)
        step(model, batch_of(index), index)
        history.record_grads(model)
        optim.step()
        history.record_weights(model)
    return history


def check(
    rank: int,
    world: int,
    make_model: Callable[[], Model] = Net,
    *,
    ddp: dict[str, Any] | None = None,
    against: Sequence[str] = ("torch", "single"),
    features: Sequence[int] = (FEATURES,),
    dtype: torch.dtype = torch.float32,
    bitwise: bool | None = None,
    **how: Any,
) -> History:
    """Train with ours and with the oracles named in ``against``; return our history.

    Other ranks than 0 start from other weights: it is the wrapper that makes the replicas equal.
    torch's DDP is compared bitwise for two ranks, where a sum has but one order; for more the
    order depends on where in the buffer an element lies.
    """

    def own(step: int) -> Tensor:
        return batch(step, rank, features).to(dtype)

    def joined(step: int) -> Tensor:
        return torch.cat([batch(step, r, features) for r in range(world)]).to(dtype)

    model = seeded(make_model)
    if rank > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    ours = train(DDP(model, **(ddp or {})), own, **how)
    if "torch" in against:
        oracle = train(TorchDDP(seeded(make_model), **(ddp or {})), own, **how)
        exact = world <= 2 if bitwise is None else bitwise
        ours.assert_equal(oracle, bitwise=exact, what="torch's DDP")
    if "single" in against:
        oracle = train(seeded(make_model), joined, **how)
        ours.assert_equal(oracle, bitwise=False, what="single-process training")
    return ours


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
