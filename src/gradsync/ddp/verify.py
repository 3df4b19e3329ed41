"""Cross-rank checks at construction: do all ranks hold the same model?

One small collective decides it: an all-gather of a digest. Only if the digests differ do the
ranks exchange what they hold, so that every one of them can name the difference. A rank whose
construction fails before that puts its error in the place of the digest.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from gradsync.ddp.collectives import all_gather, wait
from gradsync.errors import ModelMismatchError

LETTER_BYTES = 512
FAILED = -1  # in place of a length


def verify_same_model(
    group: dist.ProcessGroup,
    tensors: Sequence[tuple[str, Tensor]],
    sparse: Collection[str],
    settings: dict[str, object],
) -> None:
    """Raise ``ModelMismatchError`` on every rank of ``group`` if any two ranks differ.

    ``tensors`` are the parameters and buffers by name, ``sparse`` those whose gradients are.
    ``settings`` are constructor arguments that have to agree as well.
    """
    facts = [_facts(name, tensor, name in sparse) for name, tensor in tensors]
    text = json.dumps([facts, settings], sort_keys=True).encode()
    device = tensors[0][1].device
    mine = _letter(len(text), hashlib.sha256(text).digest())
    digests = _exchange(group, mine.to(device), "the comparison of models at construction")
    lengths = [int(digest[0]) for digest in digests]
    if all(torch.equal(digest, mine) for digest in digests):
        return
    if FAILED in lengths:
        failed = lengths.index(FAILED)
        raise ModelMismatchError(
            f"rank {group.rank()}: rank {failed} could not construct its DistributedDataParallel: "
            f"{_read(digests[failed])}"
        )
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = _exchange(group, padded, "the exchange of differing models at construction")
    held = [json.loads(bytes(t[:n].tolist())) for t, n in zip(texts, lengths, strict=True)]
    raise ModelMismatchError(_difference(group.rank(), held))


@contextmanager
def failures_told(group: dist.ProcessGroup, module: nn.Module) -> Iterator[None]:
    """Let the other ranks know when construction fails on this one.

    They are waiting in ``verify_same_model``, or will be. We do not wait for them: if they never
    come, the error must not be held up.
    """
    try:
        yield
    except Exception as error:
        if group.size() > 1:
            letter = _letter(FAILED, str(error).encode())
            parameters = (p for p in module.parameters() if not p.is_meta)
            device = next((p.device for p in parameters), torch.device("cpu"))
            with suppress(RuntimeError):  # the error to see is the other one
                all_gather(group, letter.to(device))
        raise


def _facts(name: str, tensor: Tensor, sparse: bool) -> dict[str, object]:
    return {
        "kind": "parameter" if isinstance(tensor, Parameter) else "buffer",
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "stride": list(tensor.stride()),
        "sparse": sparse,
        "frozen": not tensor.requires_grad,
    }


def _letter(head: int, text: bytes) -> Tensor:
    """A number and the beginning of a text, as what can be gathered."""  # 1D
    letter = torch.zeros(1 + LETTER_BYTES // 8, dtype=torch.int64, device="cpu")
    letter[0] = head
    text = text[:LETTER_BYTES]
    letter[1:].view(torch.uint8)[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return letter


def _read(letter: Tensor) -> str:
    return bytes(letter[1:].view(torch.uint8).tolist()).rstrip(b"\0").decode(errors="ignore")


def _exchange(group: dist.ProcessGroup, tensor: Tensor, what: str) -> list[Tensor]:
    parts, work = all_gather(group, tensor)
    wait(work, group, lambda: what)
    return [part.cpu() for part in parts]


def _difference(
    rank: int, held: Sequence[tuple[list[dict[str, object]], dict[str, object]]]
) -> str:
    """The first difference between rank 0 and the first rank that differs from it."""
    other = next(r for r, each in enumerate(held) if each != held[0])
    (ours, our_settings), (theirs, their_settings) = held[0], held[other]
    head = f"rank {rank}: DistributedDataParallel expects the same model on every rank, but "
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return head + (
                f"{a['kind']} {index} differs between rank 0 and rank {other}: rank 0 has "
                f"{_show(a)}; rank {other} has {_show(b)}.{_in_torchs_words(a, b)}"
            )
    if len(ours) != len(theirs):
        longer, more = (0, ours) if len(ours) > len(theirs) else (other, theirs)
        extra = more[min(len(ours), len(theirs))]
        return head + (
            f"rank 0 has {len(ours)} parameters and buffers and rank {other} has {len(theirs)}: "
            f"the first that only rank {longer} has is {_show(extra)}."
        )
    name = next(key for key in our_settings if our_settings[key] != their_settings.get(key))
    return (
        f"rank {rank}: DistributedDataParallel expects the same arguments on every rank, but "
        f"{name} is {our_settings[name]!r} on rank 0 and {their_settings.get(name)!r} on rank "
        f"{other}."
    )


def _in_torchs_words(ours: dict[str, object], theirs: dict[str, object]) -> str:
    """What torch says of the same difference: programs look for it."""
    for fact, word in (("shape", "sizes"), ("stride", "strides")):
        if ours[fact] != theirs[fact]:
            return f" It appears not to match {word} of the same param in process 0."
    return ""


def _show(fact: dict[str, object]) -> str:
    notes = ""
    if fact["kind"] == "parameter":
        notes = ", frozen" if fact["frozen"] else ", trainable"
    notes += ", sparse gradient" if fact["sparse"] else ""
    return (
        f"{fact['name']} of shape {fact['shape']}, {fact['dtype']}, strides {fact['stride']}{notes}"
    )
