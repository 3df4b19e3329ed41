"""Mixed precision: forward and backward in a low dtype, parameters and optimizer in the full one.

From the beginning of a forward to the end of its backward, the ``.data`` of each parameter is a
low-precision copy, so that recomputed checkpoints see it too; at all other times it is the full
tensor. Gradients are reduced in a dtype of their own (``CastBucket``) and end up in the full one.

[Note: new nodes] Autograd gives a parameter whose ``.data`` changes dtype a new AccumulateGrad
node, so gradients have to be watched anew after each change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.utils import _cast_forward_inputs
from torch.nn import Parameter

from gradsync.ddp.bucket import to_full_precision
from gradsync.errors import ArgumentError

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


def check_config(config: object) -> None:
    """Raise ``ArgumentError`` if ``config`` does not say which dtypes to use."""
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
        self._parameters = [param for param in parameters if param.is_floating_point()]
        self.is_low = False
        for param in self._parameters:
            param._fp_param = param.data  # type: ignore[attr-defined]
            param._mp_param = self._nothing(param)  # type: ignore[attr-defined]
        self._full_buffers: dict[str, torch.dtype] = {}
        if config.buffer_dtype is not None:
            for name, buffer in buffers.items():
                if buffer.is_floating_point():
                    self._full_buffers[name] = buffer.dtype
                    buffer.data = buffer.to(config.buffer_dtype)
        module.register_state_dict_pre_hook(self._before_state_dict)
        # Torch sets an attribute on the hook, which a bound method does not take.
        module.register_state_dict_post_hook(partial(self._after_state_dict))

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
        if self.is_low or self._dtype is None:
            return False
        for param in self._parameters:
            full = param.data
            param._fp_param = full  # type: ignore[attr-defined]
            param._mp_param = low = full.to(self._dtype)  # type: ignore[attr-defined]
            param.data = low
        self.is_low = True
        return True

    def leave(self) -> None:
        """Switch back to full precision; gradients have followed by then."""
        if not self.is_low:
            return
        self.is_low = False
        for param in self._parameters:
            to_full_precision(param)
            param._mp_param = self._nothing(param)  # type: ignore[attr-defined]

    def _before_state_dict(self, *_: object) -> None:
        self.leave()

    def _after_state_dict(
        self, _module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object
    ) -> None:
        """Buffers are saved in full precision as well."""
        for name, dtype in self._full_buffers.items():
            if prefix + name in state:
                state[prefix + name] = state[prefix + name].to(dtype)
