"""Mixed precision: forward and backward in a low dtype, parameters and optimizer in the full one.

From the beginning of a forward to the end of its backward, the ``.data`` of each parameter is a
low-precision copy, so that recomputed checkpoints see it too; at all other times it is the full
tensor. Gradients are reduced in a dtype of their own (``CastBucket``) and end up in the full one.

[Note: new nodes] Autograd gives a parameter whose ``.data`` changes dtype a new AccumulateGrad
node, so gradients have to be watched anew after each change. That is why the parameters stay low
between two forwards that one backward may follow: both must accumulate into the same nodes.

[Note: graphs] A graph may refer to a parameter by itself and not by its value: a convolution does.
So each graph keeps the copies that it was made with, and a backward through it brings them back
if the parameters are full by then (as after the first of two backwards). A graph that is
dropped without a backward lets the parameters be full again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _cast_forward_inputs
from torch.nn import Parameter

from gradsync.ddp.autograd import EndOfBackward, find_tensors, in_backward, watch_outputs
from gradsync.ddp.bucket import to_full_precision
from gradsync.errors import ArgumentError, StateError

_HIDDEN = 0
FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype")


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of DDP's mixed precision; None leaves a kind of tensor as it is.

    Gradients are reduced in ``reduce_dtype``, and without one in ``param_dtype``. Torch's
    ``_MixedPrecision`` has the same fields and can be passed in its place.

    >>> import torch, gradsync
    >>> precision = gradsync.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 2), mixed_precision=precision)
    >>> output = ddp(torch.ones(8, 4))
    >>> output.sum().backward()
    >>> output.dtype, ddp.module.weight.dtype, ddp.module.weight.grad.dtype
    (torch.bfloat16, torch.float32, torch.float32)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


def check_config(config: object, *, delays: bool) -> None:
    """Raise ``ArgumentError`` if ``config`` does not say which dtypes to use."""
    if delays:
        raise ArgumentError(
            "mixed_precision and delay_all_reduce_named_params exclude each other: delayed "
            "parameters would stay in full precision among inputs of the low one."
        )
    for name in FIELDS:
        dtype = getattr(config, name, "missing")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(
                "mixed_precision must be a gradsync.MixedPrecision (or torch's _MixedPrecision) "
                f"of floating dtypes; got {config!r}, whose {name} is {dtype}."
            )


def reduce_dtype(config: Any) -> torch.dtype | None:
    """What gradients are reduced in, if not in the dtype of their parameters."""
    dtype: torch.dtype | None = config and (config.reduce_dtype or config.param_dtype)
    return dtype


class Precision:
    """Switches the parameters of a module between the two dtypes."""

    def __init__(
        self,
        config: Any,
        module: nn.Module,
        parameters: Sequence[Parameter],
        buffers: dict[str, Tensor],
    ) -> None:
        self._dtype: torch.dtype | None = config.param_dtype
        self._buffer_dtype: torch.dtype | None = config.buffer_dtype
        self._parameters = [param for param in parameters if param.is_floating_point()]
        self._full_buffers: dict[str, torch.dtype] = {}
        self.is_low = False
        self._times_entered = 0
        self._pending: set[int] = set()  # graphs that may still be gone through
        self._versions: list[int] = []
        self._lost_changes = False
        self.refresh(buffers)
        # Torch sets an attribute on the hook, which a bound method does not take.
        module.register_state_dict_post_hook(partial(self._after_state_dict))
        module.register_load_state_dict_pre_hook(self._before_load)

    def refresh(self, buffers: dict[str, Tensor]) -> None:
        """Take the tensors as they are now for the full ones, and cast the buffers."""
        for param in self._parameters:
            param._fp_param = param.data  # type: ignore[attr-defined]
            param._mp_param = self._nothing(param)  # type: ignore[attr-defined]
        for name, buffer in buffers.items():
            if self._buffer_dtype not in (None, buffer.dtype) and buffer.is_floating_point():
                self._full_buffers[name] = buffer.dtype
                buffer.data = buffer.to(self._buffer_dtype)

    def _nothing(self, param: Parameter) -> Tensor:
        return torch.empty(0, dtype=self._dtype or param.dtype, device=param.device)

    def cast_inputs(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The floating tensors among the inputs in the low dtype."""
        if self._dtype is None:
            return inputs, kwargs
        cast: tuple[tuple[Any, ...], dict[str, Any]] = _cast_forward_inputs(
            self._dtype, *inputs, **kwargs
        )
        return cast

    def enter(self) -> bool:
        """Switch to the low dtype, before a forward; False if nothing changed."""
        if self.is_low and self._were_changed():
            self.leave()
        if self._lost_changes:
            self._lost_changes = False
            raise StateError(_LOST_CHANGES)
        if self.is_low or self._dtype is None:
            return False
        self._times_entered += 1
        self._switch([param.data.to(self._dtype) for param in self._parameters])
        return True

    def _switch(self, copies: list[Tensor]) -> None:
        for param, low in zip(self._parameters, copies, strict=True):
            param._fp_param = param.data  # type: ignore[attr-defined]
            param._mp_param = low  # type: ignore[attr-defined]
            param.data = low
        self._versions = [param._version for param in self._parameters]
        self.is_low = True

    def after_forward(self, outputs: object) -> None:
        """Stay low for the backward that may follow, if there is something to go back through."""
        if self.is_low and torch.is_grad_enabled():
            graph = _Graph(self)
            if watch_outputs(outputs, graph):
                self._pending.add(graph.key)
            elif not any(True for _ in find_tensors(outputs)):  # in an object we do not look into
                self._pending.add(_HIDDEN)
        self.leave_if_done()

    def leave_if_done(self) -> None:
        """Switch back unless a backward may follow."""
        if not self._pending:
            self.leave()

    def leave(self) -> None:
        """Switch back to full precision, gradients too."""
        self._pending.clear()
        if not self.is_low:
            return
        self.is_low = False
        self._lost_changes |= self._were_changed()
        for param in self._parameters:
            to_full_precision(param)
            param._mp_param = self._nothing(param)  # type: ignore[attr-defined]
            if param.grad is not None and param.grad.dtype != param.dtype:
                param.grad = param.grad.to(param.dtype)

    def _were_changed(self) -> bool:
        """Has the program written to the low copies? Those that were reduced are full by now."""
        return any(
            param._version != version and param.dtype == self._dtype != param._fp_param.dtype  # type: ignore[attr-defined]
            for param, version in zip(self._parameters, self._versions, strict=True)
        )

    def _resume(self, graph: "_Graph") -> None:
        """A backward begins to go through ``graph``."""
        if graph.times_entered != self._times_entered:
            raise StateError(_OLD_GRAPH)
        if not self.is_low:
            self._switch(graph.copies)
            EndOfBackward.schedule(self.leave, self.leave)

    def _dropped(self, graph: "_Graph") -> None:
        """``graph`` is gone: there will be no backward through it."""
        if graph.key in self._pending:
            self._pending.discard(graph.key)
            if not in_backward():  # which has an end of its own
                self.leave_if_done()

    def _before_load(self, *_: object) -> None:
        self.leave()  # or the low copies would be loaded, and dropped

    def _after_state_dict(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object
    ) -> None:
        """Parameters and buffers are saved in full precision at any time."""
        if self.is_low:
            for name, param in module.named_parameters(remove_duplicate=False):
                full = getattr(param, "_fp_param", None)
                # With keep_vars it is the parameter itself that is asked for.
                if full is not None and state.get(prefix + name, param) is not param:
                    state[prefix + name] = full
        for name, dtype in self._full_buffers.items():
            if prefix + name in state:
                state[prefix + name] = state[prefix + name].to(dtype)


class _Graph:
    """The low copies that a graph was made with; it is the graph that refers to this object."""

    def __init__(self, precision: Precision) -> None:
        self.key = id(self)
        self.times_entered = precision._times_entered
        self.copies = [param.data for param in precision._parameters]
        self._precision = precision

    def __call__(self, _node: object) -> None:
        self._precision._resume(self)

    def __del__(self) -> None:
        self._precision._dropped(self)


_LOST_CHANGES = (
    "mixed_precision: parameters were changed in place between a forward and the end of its "
    "backward, where they are low-precision copies, and the change is lost. Step the optimizer "
    "after the backward, and run forwards that no backward follows under torch.no_grad()."
)

_OLD_GRAPH = (
    "mixed_precision: a backward goes through the outputs of a forward after another backward and "
    "another forward. Its gradients would not be reduced. Run the backwards of a forward before "
    "the next forward."
)
