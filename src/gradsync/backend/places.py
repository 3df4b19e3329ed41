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


def check_memory(tensor: Tensor) -> None:
    """Raise if it has none of its own."""
    begin = tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()
    if begin == 0 and tensor.numel():
        raise ArgumentError(
            f"A tensor of {tuple(tensor.shape)}, a {type(tensor).__name__}, has no memory that "
            f"another rank could read: it is fake, has been freed, or stands for others inside it."
        )


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Give ``tensor`` new values, on whatever thread and whatever autograd thinks of it."""
    with torch.inference_mode(tensor.is_inference()):
        tensor.detach().copy_(values)


def address_of(flat: Tensor) -> int:
    """Where its memory is."""
    check_memory(flat)
    return flat.data_ptr()


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
    return _real(copy), lambda: overwrite(tensor, copy)


def to_fill(tensor: Tensor) -> tuple[Tensor, Finish | None]:
    """Contiguous memory for a result; what brings it to the tensor."""
    tensor = _waited_for(tensor)
    if _is_plain(tensor):
        return _real(tensor.detach()), None
    check_memory(tensor)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return _real(copy), lambda: overwrite(tensor, copy)


def plain(tensor: Tensor) -> Tensor:
    """The tensor's values, one after the other: itself, or a copy."""
    tensor = _waited_for(tensor)
    if _is_plain(tensor):
        return tensor.detach()
    check_memory(tensor)
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def to_read(tensor: Tensor) -> Tensor:
    """The same, of real numbers."""
    return _real(plain(tensor))


def for_gloo(arguments: Sequence[Any]) -> tuple[list[Any], Finish | None]:
    """Arguments of a collective as gloo can use them, which goes by addresses alone.

    The tensors of the first one are read and written: what brings them back comes second.
    """
    finishes: list[Finish] = []

    def usable(argument: Any, *, is_written: bool) -> Any:
        if isinstance(argument, list | tuple):
            return [usable(each, is_written=is_written) for each in argument]
        if not isinstance(argument, Tensor):
            return argument
        tensor = _waited_for(argument)
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return tensor
        values = plain(tensor)
        check_memory(values)
        if not _is_plain(tensor) and is_written:
            finishes.append(lambda: overwrite(tensor, values))
        return values

    given = [usable(each, is_written=at == 0) for at, each in enumerate(arguments)]
    return given, (lambda: [finish() for finish in finishes]) if finishes else None


def _waited_for(tensor: Tensor) -> Tensor:
    """``tensor`` itself; what is inside if it is the result of a functional collective."""
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
