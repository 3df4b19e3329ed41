"""All that we touch of autograd's private side: nodes, hooks, engine callbacks.

Every other file goes through the few functions here, so that a change in torch's engine is a
change in this file.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed import rpc
from torch.nn import Parameter

RPC_AVAILABLE = rpc.is_available()
if RPC_AVAILABLE:
    from torch.distributed.rpc import RRef

_engine = torch.autograd.Variable._execution_engine
_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id


class GradientWatch:
    """A hook that runs when the gradient of one parameter has been accumulated.

    [Note: AccumulateGrad] The hook sits on the parameter's AccumulateGrad node, and the node
    is kept alive here, since the parameter itself refers to it only weakly. A hook on the node
    also fires under distributed autograd, where ``register_post_accumulate_grad_hook`` does not.
    It is called with (grad_inputs, grad_outputs); the gradient is None where it is undefined.
    """

    __slots__ = ("_handle", "_node")

    def __init__(self, parameter: Parameter, hook: Callable[[Any, Any], None]) -> None:
        with torch.enable_grad():
            node = parameter.expand_as(parameter).grad_fn
        assert node is not None, "only a parameter that requires grad can be watched"
        accumulate = node.next_functions[0][0]
        assert accumulate is not None
        self._node: Node = accumulate
        self._handle = self._node.register_hook(hook)

    def remove(self) -> None:
        """Take the hook off."""
        self._handle.remove()


def watch_outputs(outputs: object, hook: Callable[[Any], None]) -> bool:
    """Run ``hook`` when a backward pass reaches ``outputs``; False if none can be seen.

    The hook runs in the outermost backward that goes through the outputs, before any
    parameter behind them gets its gradient.
    """
    found = False
    for tensor in find_tensors(outputs):
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(hook)
            found = True
    return found


def find_tensors(value: object) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, mappings, dataclasses and owned RRefs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from find_tensors(getattr(value, field.name, None))
    elif RPC_AVAILABLE and isinstance(value, RRef) and value.is_owner():
        yield from find_tensors(value.local_value())


class EndOfBackward:
    """Runs ``finish`` when the current backward ends, ``abandon`` when it dies instead.

    [Note: a backward that raises] The engine drops its callbacks, uncalled, when a backward
    raises. Nothing else refers to this object, so it is deleted right then, before the
    exception reaches the caller of ``backward``: that is how we learn of it in time to keep
    our promises to the other ranks.
    """

    __slots__ = ("_abandon", "_finish")

    def __init__(self, finish: Callable[[], None], abandon: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._abandon = abandon

    @classmethod
    def schedule(cls, finish: Callable[[], None], abandon: Callable[[], None]) -> None:
        """Only valid on a thread that is inside a backward pass."""
        _engine.queue_callback(cls(finish, abandon))

    def __call__(self) -> None:
        finish, self._finish = self._finish, None
        assert finish is not None, "the engine calls back once"
        finish()

    def __del__(self) -> None:
        if self._finish is not None:
            self._abandon()


def in_backward() -> bool:
    """Is this thread inside a backward pass (as in the recomputation of a checkpoint)?"""
    return _graph_task_id() != -1
