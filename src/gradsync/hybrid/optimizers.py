"""Optimizers that run on the servers, on the rows that a step has touched.

Each is a small frozen description that travels to the servers. The gradients of a row are added up
before the step, those of all trainers together, as a table in one process would have them: so the
results are those of torch.optim.

>>> SGD(lr=0.1).state_shapes(columns=4)
{}
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradsync.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer:
    """Base of the optimizers: how the rows of a table follow their gradients.

    >>> issubclass(SGD, ServerOptimizer)
    True
    """

    lr: float
    by_row: ClassVar[bool] = False  # needs whole rows

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ArgumentError(f"lr must not be negative, got {self.lr!r}.")

    def state_shapes(self, columns: int) -> dict[str, tuple[int, ...]]:
        """What is kept for each row, by name."""
        return {}

    def initial(self, name: str) -> float:
        """What a state begins with."""
        return 0.0

    def update(self, rows: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        """What is added to ``rows``; ``state`` has theirs and is changed in place."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """As plain values."""
        return {"kind": type(self).__name__, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class SGD(ServerOptimizer):
    """As ``torch.optim.SGD`` without momentum.

    >>> SGD(lr=0.5).update(torch.ones(1, 2), torch.ones(1, 2), {}, 1)
    tensor([[-0.5000, -0.5000]])
    """

    def update(self, rows: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        """What is added to ``rows``."""
        return gradient * -self.lr


@dataclass(frozen=True, kw_only=True)
class Adagrad(ServerOptimizer):
    """As ``torch.optim.Adagrad``.

    >>> sorted(Adagrad(lr=0.1).state_shapes(columns=3))
    ['sum']
    """

    lr_decay: float = 0.0
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def state_shapes(self, columns: int) -> dict[str, tuple[int, ...]]:
        """What is kept for each row, by name."""
        return {"sum": (columns,)}

    def initial(self, name: str) -> float:
        """What a state begins with."""
        return self.initial_accumulator_value

    def update(self, rows: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        """What is added to ``rows``."""
        state["sum"].add_(gradient.pow(2))
        std = state["sum"].sqrt().add_(self.eps)
        return gradient.div(std).mul_(-self.lr / (1 + (step - 1) * self.lr_decay))


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(ServerOptimizer):
    """Adagrad with one sum a row, of the mean of the squares: a fraction of the memory.

    >>> RowwiseAdagrad(lr=0.1).state_shapes(columns=64)
    {'sum': ()}
    """

    eps: float = 1e-10
    by_row: ClassVar[bool] = True

    def state_shapes(self, columns: int) -> dict[str, tuple[int, ...]]:
        """What is kept for each row, by name."""
        return {"sum": ()}

    def update(self, rows: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        """What is added to ``rows``."""
        state["sum"].add_(gradient.pow(2).mean(dim=1))
        return gradient.div(state["sum"].sqrt().add_(self.eps)[:, None]).mul_(-self.lr)


@dataclass(frozen=True, kw_only=True)
class Adam(ServerOptimizer):
    """As ``torch.optim.SparseAdam``: rows that a step does not touch stay as they are.

    >>> sorted(Adam(lr=0.1).state_shapes(columns=3))
    ['first', 'second']
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def state_shapes(self, columns: int) -> dict[str, tuple[int, ...]]:
        """What is kept for each row, by name."""
        return {"first": (columns,), "second": (columns,)}

    def update(self, rows: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        """What is added to ``rows``."""
        first, second = state["first"], state["second"]
        first.add_(gradient.sub(first).mul_(1 - self.beta1))
        second.add_(gradient.pow(2).sub_(second).mul_(1 - self.beta2))
        size = self.lr * math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)
        return first.div(second.sqrt().add_(self.eps)).mul_(-size)


_KINDS = {kind.__name__: kind for kind in (SGD, Adagrad, RowwiseAdagrad, Adam)}


def from_description(description: dict[str, Any]) -> ServerOptimizer:
    """The optimizer that ``describe`` described.

    >>> from_description(SGD(lr=0.5).describe())
    SGD(lr=0.5)
    """
    values = dict(description)
    kind = _KINDS[values.pop("kind")]
    return kind(**values)


def coalesce(rows: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Each row once, with the sum of its gradients in the order given.

    >>> coalesce([torch.tensor([2, 0]), torch.tensor([2])], [torch.ones(2, 1), torch.ones(1, 1)])
    (tensor([0, 2]), tensor([[1.],
            [2.]]))
    """
    if len(rows) == 1 and bool((rows[0].diff() > 0).all()):
        return rows[0], gradients[0]
    unique, inverse = torch.unique(torch.cat(rows), return_inverse=True)
    together = torch.cat(gradients)
    total = together.new_zeros((len(unique), *together.shape[1:]))
    return unique, total.index_add_(0, inverse, together)
