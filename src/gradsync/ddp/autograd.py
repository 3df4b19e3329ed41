"""All that we touch of autograd's private side: nodes, hooks, engine callbacks.

Every other file goes through the few functions here, so that a change in torch's engine is a
change in this file.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import Node, _engine_run_backward
from torch.distributed import rpc
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

RPC_AVAILABLE = rpc.is_available()
if RPC_AVAILABLE:
    from torch._C._distributed_autograd import _current_context
    from torch._C._distributed_rpc import _is_current_rpc_agent_set
    from torch.distributed.rpc import RRef

_engine = torch.autograd.Variable._execution_engine
_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
_will_execute: Callable[[Node], bool] = torch._C._will_engine_execute_node


class GradientWatch:
    """A hook that runs when the gradient of one parameter has been accumulated.

    [Note: AccumulateGrad] The hook sits on the parameter's AccumulateGrad node, and the node
    is kept alive here, since the parameter itself refers to it only weakly. A hook on the node
    also fires under distributed autograd, where ``register_post_accumulate_grad_hook`` does not.
    It is called with (grad_inputs, grad_outputs); the gradient is None where it is undefined.
    """

    __slots__ = ("_handle", "_node", "_parameter")

    _count: ClassVar = WeakIdKeyDictionary()  # watches on each parameter

    def __init__(self, parameter: Parameter, hook: Callable[[Any, Any], None]) -> None:
        with torch.enable_grad():
            node = parameter.expand_as(parameter).grad_fn
        assert node is not None, "only a parameter that requires grad can be watched"
        accumulate = node.next_functions[0][0]
        assert accumulate is not None
        self._node: Node = accumulate
        self._handle = self._node.register_hook(hook)
        self._parameter = parameter
        self._count[parameter] = self._count.get(parameter, 0) + 1

    @classmethod
    def is_shared(cls, parameter: Parameter) -> bool:
        """Is the parameter watched more than once (as by a DDP around a DDP)?"""
        return bool(cls._count.get(parameter, 0) > 1)

    def will_fire(self) -> bool:
        """Inside a backward pass: will it get to this parameter?"""
        try:
            return _will_execute(self._node)
        except RuntimeError:  # autograd.grad with respect to it, which accumulates nothing
            return False

    def remove(self) -> None:
        """Take the hook off."""
        self._handle.remove()
        self._count[self._parameter] -= 1


class NoGrad:
    """As ``torch.no_grad()``, for a third of the time: every step comes here several times."""

    __slots__ = ("_was_enabled",)

    def __enter__(self) -> None:
        self._was_enabled = torch.is_grad_enabled()
        if self._was_enabled:
            _set_grad_enabled(False)

    def __exit__(self, *_error: object) -> None:
        _set_grad_enabled(self._was_enabled)


def watch_outputs(
    outputs: object, reached: Callable[[Node | None], None], *, looks_on: bool = False
) -> bool:
    """Call ``reached`` when autograd comes to ``outputs``; False if none can be seen.

    It is called in the outermost pass that goes through the outputs, before any parameter
    behind them gets its gradient, with a node that the pass may go on to if it ``looks_on``.
    """
    found = False
    for tensor in find_tensors(outputs):
        # A view that is changed in place gets a new node; that of its base stays in the graph.
        base = tensor._base
        node = tensor.grad_fn if base is None or base.grad_fn is None else base.grad_fn
        if node is not None:
            # Not the node itself: it would refer to itself through the hook, and the graph with
            # all that it has saved would never be freed.
            below = _below(node) if looks_on else None
            node.register_prehook(lambda _gradients, below=below: reached(below))
            found = True
    return found


def accumulates(node: Node | None) -> bool:
    """Is the pass that may go on to ``node`` a backward, and not ``autograd.grad``?

    A backward goes on to every leaf, ``autograd.grad`` only to those that it was asked for.
    """
    leaf = node
    while node is not None:
        leaf, node = node, _below(node)
    try:
        return leaf is None or _will_execute(leaf)
    except RuntimeError:
        return False


def _below(node: Node) -> Node | None:
    return next((each for each, _ in node.next_functions if each is not None), None)


def find_tensors(value: object) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples, dicts, dataclasses and owned RRefs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_tensors(item)
    elif isinstance(value, dict):
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


def owns_memory(tensor: Tensor) -> bool:
    """Is all of the tensor's memory its own? Autograd may let two gradients share one."""
    storage = tensor.untyped_storage()
    return (
        storage.nbytes() == tensor.numel() * tensor.element_size()
        and _references(storage) <= _LONE_REFERENCES
    )


def _references(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


_LONE = torch.zeros(1)
_LONE_REFERENCES = _references(_LONE.untyped_storage())


def in_backward() -> bool:
    """Is this thread inside a backward pass (as in the recomputation of a checkpoint)?"""
    return _graph_task_id() != -1


def in_compiled_autograd() -> bool:
    """Is it compiled autograd that runs this backward?

    [Note: compiled autograd] It takes the place of the engine: it calls our hooks, but drops the
    callbacks that were queued for the end, uncalled, whether all went well or not.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and module.in_compiled_autograd_region


def current_context() -> int | None:
    """The context of distributed autograd that this thread is in.

    Only a thread that runs a forward is in one: those of the backward are not.
    """
    if not RPC_AVAILABLE or not _is_current_rpc_agent_set():
        return None
    try:
        return int(_current_context()._context_id())
    except RuntimeError:  # that is how it says that there is none
        return None


def backward_number() -> int:
    """Tells the backward that runs on this thread from others: under distributed autograd several
    threads can work on one.
    """
    return _graph_task_id()


def in_distributed_backward() -> bool:
    """Is it distributed autograd that runs this backward? Nobody called it from this thread then.

    Neither has the backward of a GPU's thread been called from there: see ``will_fire`` first,
    which is never so in distributed autograd.
    """
    return in_backward() and _depth() == 0


def in_nested_backward() -> bool:
    """Is this thread in a backward that runs inside another (as of a reentrant checkpoint)?"""
    return _depth() > 1


def _depth() -> int:
    """How many calls of backward this thread is in."""
    depth = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        depth += frame.f_code is _engine_run_backward.__code__
        frame = frame.f_back
    return depth
