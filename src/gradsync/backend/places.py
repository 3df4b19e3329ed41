"""Where tensors lie: the memory that the native part reads and writes.

A tensor is taken as it is if it is contiguous. Any other is copied, and copied back at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from gradsync.backend.work import Finish
from gradsync.errors import ArgumentError


@dataclass(slots=True)
class Places:
    """Stretches of memory: one, or one for each rank."""

    addresses: list[int]
    sizes: Sequence[int]  # in bytes
    kept: object  # whose memory it is
    finish: Finish | None = None  # brings what was written there to the caller's tensors


def address_of(flat: Tensor) -> int:
    """Where its memory is."""
    address = flat.data_ptr()
    if flat.numel() and address == flat.storage_offset() * flat.element_size():  # from nowhere on
        raise ArgumentError(
            f"A tensor of {tuple(flat.shape)}, a {type(flat).__name__}, has no memory that another "
            f"rank could read: it is fake, has been freed, or stands for others inside it."
        )
    return address


def one(flat: Tensor, finish: Finish | None = None) -> Places:
    """A contiguous tensor."""
    return Places([address_of(flat)], (flat.nbytes,), flat, finish)


def each_to_read(tensors: Sequence[Tensor]) -> Places:
    """A place for every tensor."""
    flats = [plain(tensor) for tensor in tensors]
    return Places([address_of(flat) for flat in flats], [flat.nbytes for flat in flats], flats)


def each_to_fill(tensors: Sequence[Tensor]) -> Places:
    """The same, for results."""
    flats, finishes = [], []
    for tensor in tensors:
        flat, finish = to_fill(tensor)
        flats.append(flat)
        if finish is not None:
            finishes.append(finish)
    places = Places([address_of(flat) for flat in flats], [flat.nbytes for flat in flats], flats)
    if finishes:
        places.finish = lambda: [finish() for finish in finishes]
    return places


def parts_to_read(whole: Tensor, sizes: Sequence[int]) -> Places:
    """A place for every part of one tensor, of so many bytes. They are not cut out: that costs."""
    return _parts(plain(whole), sizes)


def parts_to_fill(whole: Tensor, sizes: Sequence[int]) -> Places:
    """The same, for results."""
    flat, finish = to_fill(whole)
    return _parts(flat, sizes, finish)


def _parts(flat: Tensor, sizes: Sequence[int], finish: Finish | None = None) -> Places:
    starts = accumulate(sizes[:-1], initial=address_of(flat))
    return Places(list(starts), sizes, flat, finish)


def in_place(tensor: Tensor) -> tuple[Tensor, Finish | None]:
    """Contiguous memory with the tensor's values; what brings the result back.

    Detached, here and below: it keeps the memory also if the tensor is given another meanwhile.
    """
    tensor = _waited_for(tensor)
    if _is_plain(tensor):
        return _real(tensor.detach()), None
    copy = plain(tensor)
    return _real(copy), lambda: tensor.detach().copy_(copy)


def to_fill(tensor: Tensor) -> tuple[Tensor, Finish | None]:
    """Contiguous memory for a result; what brings it to the tensor."""
    tensor = _waited_for(tensor)
    if _is_plain(tensor):
        return _real(tensor.detach()), None
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return _real(copy), lambda: tensor.detach().copy_(copy)


def plain(tensor: Tensor) -> Tensor:
    """The tensor's values, one after the other: itself, or a copy."""
    tensor = _waited_for(tensor)
    detached = tensor.detach()
    return detached if _is_plain(tensor) else detached.contiguous().resolve_conj().resolve_neg()


def with_memory(arguments: Any) -> Any:
    """Tensors in lists of lists, of which gloo is to read and write the memory."""
    if isinstance(arguments, Tensor):
        tensor = _waited_for(arguments)
        if tensor.is_cpu and tensor.layout == torch.strided:
            address_of(tensor)
        return tensor
    if isinstance(arguments, list | tuple):
        return [with_memory(each) for each in arguments]
    return arguments


def _waited_for(tensor: Tensor) -> Tensor:
    """``tensor`` itself; what is inside if it is the result of a functional collective."""
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
