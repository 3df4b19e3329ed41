"""Count the collectives that a piece of code issues.

[Note: two ways in]
Most collectives pass torch's dispatcher as ``c10d::`` operators, whoever issues them:
``dist.all_reduce``, ``pg.allreduce``, or torch's C++ reducer in a backward pass. A dispatch
mode sees those. A process group written in Python is called directly and never gets there,
so the methods of its class are wrapped for the duration. What such a group passes on to an
inner group is part of the same collective and is not counted again.

Limits. A dispatch mode belongs to a thread: it sees the calling thread and the backward
passes that this thread starts on CPU, but not what other threads issue by themselves, nor
hooks that the autograd engine runs on the thread of a GPU. Python groups are seen from all
threads. Replayed CUDA graphs are not seen.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional")
_NO_COLLECTIVE = {"wait_tensor", "check_for_nan"}
_GROUP_METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


class Collective(NamedTuple):
    """One collective: its name, the bytes this rank handed in, and their dtype.

    >>> Collective("allreduce", 16, torch.float32).op
    'allreduce'
    """

    op: str
    bytes: int
    dtype: torch.dtype | None


class CollectiveCounter:
    """What `count_collectives` has seen so far; ``log`` holds every collective in order.

    >>> counter = CollectiveCounter()
    >>> counter.record("broadcast", torch.zeros(2))
    >>> counter.total, counter.bytes, counter.by_op["broadcast"]
    (1, 8, 1)
    """

    def __init__(self) -> None:
        self.log: list[Collective] = []

    @property
    def total(self) -> int:
        """How many collectives."""
        return len(self.log)

    @property
    def by_op(self) -> Counter[str]:
        """How many of each name, such as ``allreduce``, ``broadcast``, ``allgather_base``."""
        return Counter(entry.op for entry in self.log)

    @property
    def bytes(self) -> int:
        """How many bytes this rank has handed in."""
        return sum(entry.bytes for entry in self.log)

    def clear(self) -> None:
        """Forget everything: count the next step alone."""
        self.log.clear()

    def record(self, op: str, payload: object) -> None:
        """Add one collective; `payload` is a tensor or nested lists of tensors."""
        tensors = list(_tensors(payload)) if op != "barrier" else []
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.log.append(Collective(op, size, tensors[0].dtype if tensors else None))


@contextmanager
def count_collectives() -> Iterator[CollectiveCounter]:
    """Count the collectives issued inside the ``with`` block; limits: see the module.

    >>> with count_collectives() as counted:
    ...     _ = torch.ones(2) + 1
    >>> counted.total
    0
    """
    counter = CollectiveCounter()
    inside = threading.local()
    with _python_groups_wrapped(counter, inside), _Mode(counter, inside):
        yield counter


class _Mode(TorchDispatchMode):
    def __init__(self, counter: CollectiveCounter, inside: threading.local) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter
        self._inside = inside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in _NAMESPACES and not getattr(self._inside, "group", False):
            name = func._schema.name.partition("::")[2]
            if name not in _NO_COLLECTIVE:
                self._counter.record(_plain(name), _handed_in(args))
        return func(*args, **(kwargs or {}))


@contextmanager
def _python_groups_wrapped(counter: CollectiveCounter, inside: threading.local) -> Iterator[None]:
    """[Note: two ways in]."""
    originals = [
        (cls, name, vars(cls)[name])
        for cls in _subclasses(ProcessGroup)
        for name in _GROUP_METHODS
        if name in vars(cls)
    ]
    for cls, name, method in originals:
        setattr(cls, name, _counting(method, name, counter, inside))
    try:
        yield
    finally:
        for cls, name, method in originals:
            setattr(cls, name, method)


def _counting(
    method: Callable[..., Any], name: str, counter: CollectiveCounter, inside: threading.local
) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "group", False):
            return method(group, *args, **kwargs)
        counter.record(_plain(name), _handed_in((*args, *kwargs.values())))
        inside.group = True
        try:
            return method(group, *args, **kwargs)
        finally:
            inside.group = False

    return counted


def _subclasses(cls: type) -> set[type]:
    direct: set[type] = set(cls.__subclasses__())
    return direct.union(*(_subclasses(sub) for sub in direct))


def _handed_in(args: tuple[Any, ...]) -> object:
    """The input: the second argument where the first is the output, else the first."""
    if len(args) > 1 and isinstance(args[1], (torch.Tensor, list, tuple)):
        return args[1]
    return args[0] if args else ()


def _plain(name: str) -> str:
    return name.strip("_").replace("all_", "all")


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
