"""Calls of torch's engines, in words: what ranks compare before they go through gloo."""

import zlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from gradsync.backend.arguments import split

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
        parts += [describe(tensor) for tensor in tensors[:1]]
        if len(tensors) > 1:  # there may be too many to name, so they are compared by a number
            others = zlib.crc32(", ".join(map(describe, tensors)).encode())
            parts.append(f"and {len(tensors) - 1} more ({others:08x})")
    else:
        parts += [_dtype(tensor) for tensor in tensors_in(arguments)][:1]
    return f"{name}({', '.join(parts)})" if parts else name


def piece_sizes(
    method: str, arguments: tuple[Any, ...], size: int
) -> tuple[list[int], list[int]] | None:
    """All-to-all: how many bytes go to each rank, and are expected from each."""
    if method == "alltoall":
        outputs, inputs = arguments
        return [each.nbytes for each in inputs], [each.nbytes for each in outputs]
    if method == "alltoall_base":
        output, source, output_rows, input_rows = arguments
        to_each = split("input", source, input_rows, size)
        return to_each, split("output", output, output_rows, size)
    return None


def describe(tensor: Tensor) -> str:
    """How many of what. Complex numbers are pairs, as torch's functions take them."""
    count = tensor.numel() * (2 if tensor.is_complex() else 1)
    layout = str(tensor.layout).removeprefix("torch.")
    kind = "" if layout == "strided" else f", {layout}"
    return f"{count} x {_dtype(tensor)}{kind}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype.to_real()).removeprefix("torch.")


def tensors_in(arguments: Any) -> Iterator[Tensor]:
    """All tensors in lists of lists."""
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, list | tuple):
        for each in arguments:
            yield from tensors_in(each)
