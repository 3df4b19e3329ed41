"""Calls of torch's engines, in words: what ranks compare before they go through gloo."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

# What users call it, and which argument all ranks have alike; None: not even the sizes.
CALLS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "reduce_scatter": ("reduce_scatter", 0),
    "_reduce_scatter_base": ("reduce_scatter", 0),
    "broadcast": ("broadcast", 0),
    "allgather": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("all_to_all", None),
    "alltoall_base": ("all_to_all", None),
    "barrier": ("barrier", None),
}
ROOTED = ("broadcast", "reduce", "gather", "scatter")


def in_words(method: str, arguments: tuple[Any, ...], opts: Any) -> str:
    """As in ``all_reduce(max, 5 x bool)``."""
    name, alike = CALLS[method]
    parts = []
    if hasattr(opts, "reduceOp"):
        parts.append(opts.reduceOp.op.name.lower())
    if name in ROOTED:
        parts.append(f"root {opts.rootRank}")
    if alike is not None:
        tensors = list(tensors_in(arguments[alike]))
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        parts.append(f"{describe(tensors[0])}{more}")
    else:
        parts += [_dtype(tensor) for tensor in tensors_in(arguments)][:1]
    return f"{name}({', '.join(parts)})" if parts else name


def describe(tensor: Tensor) -> str:
    """How many of what."""
    layout = str(tensor.layout).removeprefix("torch.")
    kind = "" if layout == "strided" else f", {layout}"
    return f"{tensor.numel()} x {_dtype(tensor)}{kind}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def tensors_in(arguments: Any) -> Iterator[Tensor]:
    """All tensors in lists of lists."""
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, list | tuple):
        for each in arguments:
            yield from tensors_in(each)
