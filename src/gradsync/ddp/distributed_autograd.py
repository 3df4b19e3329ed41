"""Where gradients are: in ``.grad``, or in a context of ``torch.distributed.autograd``.

A backward under distributed autograd leaves ``.grad`` alone: its gradients are in the context, by
parameter. A step is of one kind or the other, so the buckets are told once a step: they read and
write gradients through a `Home`.

[Note: gradients cannot be added to a context] They can be changed in place, but only a backward
puts them there. A parameter that this rank did not use and another rank did would so never get its
average. Where unused parameters are allowed, `tie` therefore lets each parameter get a gradient of
zeros at the module's outputs. Autograd adds the real gradient to it, if there is one; if not, what
comes is the very tensor that we gave, and the parameter is known to be unused.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.utils import _pytree as pytree

from gradsync.errors import StateError

if TYPE_CHECKING:
    from gradsync.ddp.bucket import Slot


class Home(Protocol):
    """Where the gradients of a step are."""

    holds_views: bool  # a gradient can be replaced by its place in a bucket

    def of(self, slots: "Sequence[Slot]") -> list[Tensor | None]: ...

    def put(self, slot: "Slot", gradient: Tensor) -> None: ...


class InGrad:
    """In ``.grad``, where an ordinary backward leaves them."""

    holds_views = True

    def of(self, slots: "Sequence[Slot]") -> list[Tensor | None]:
        return [slot.param.grad for slot in slots]

    def put(self, slot: "Slot", gradient: Tensor) -> None:
        slot.param.grad = gradient


class InContext:
    """In a context of distributed autograd, where they are changed in place."""

    holds_views = False

    def __init__(self, context: int) -> None:
        self.context = context

    def of(self, slots: "Sequence[Slot]") -> list[Tensor | None]:
        gradients = dist_autograd.get_gradients(self.context)  # type: ignore[attr-defined]
        return [gradients.get(slot.param) for slot in slots]

    def put(self, slot: "Slot", gradient: Tensor) -> None:
        present = self.of([slot])[0]
        if present is None:
            raise StateError(
                f"parameter {slot.name} got no gradient on this rank, and one on another rank. In "
                "a context of distributed autograd it can only be set if the module returns "
                "tensors, or lists, tuples or dicts of them, and a loss depends on one."
            )
        present.copy_(gradient)


IN_GRAD = InGrad()

_logger = logging.getLogger("gradsync")


@contextmanager
def errors_logged(home: Home) -> Iterator[None]:
    """Log errors of the body, see `log`."""
    try:
        yield
    except Exception as error:
        log(error, home)
        raise


def log(error: Exception, home: Home) -> None:
    """Distributed autograd says only that there was a ``python_error``: so log what it was."""
    if isinstance(home, InContext):
        _logger.error("in a backward of distributed autograd: %s", error)


class Placeholders:
    """Gradients of zeros that take no memory: see [Note: gradients cannot be added to a context].

    They are held here, so that autograd does not add to them in place.
    """

    def __init__(self, slots: "Sequence[Slot]") -> None:
        self._zeros = [_nothing(slot) for slot in slots]
        self._params = [slot.param for slot in slots]

    def tie(self, outputs: Any) -> Any:
        """The same outputs, such that a backward from them reaches all parameters."""
        leaves, structure = pytree.tree_flatten(outputs)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if at:
            tied = _Tie.apply(  # type: ignore[no-untyped-call]
                self._zeros, *[leaves[i] for i in at], *self._params
            )
            for i, tensor in zip(at, tied, strict=True):
                leaves[i] = tensor
        return pytree.tree_unflatten(leaves, structure)

    def is_one(self, slot: "Slot", gradients: object) -> bool:
        """Is what autograd has accumulated only what we gave it?"""
        gradient = gradients[0] if isinstance(gradients, tuple) else None
        if not isinstance(gradient, Tensor):
            return False
        if gradient.is_sparse:
            return gradient._nnz() == 0
        nothing = self._zeros[slot.index]
        return not nothing.is_sparse and gradient.data_ptr() == nothing.data_ptr()


def _nothing(slot: "Slot") -> Tensor:
    param = slot.param
    if slot.sparse:
        indices = torch.empty((1, 0), dtype=torch.int64, device=param.device)
        values = torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device)
        return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)
    return torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)


class _Tie(torch.autograd.Function):
    """Passes outputs through, and in the backward gives the parameters behind them zeros."""

    @staticmethod
    def forward(ctx: Any, zeros: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.zeros = zeros
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors[: len(tensors) - len(zeros)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradients, *ctx.zeros
