"""Messages as bytes: a fixed head, plain values as JSON, then the tensors' memory.

No pickle: what comes from the network is data and never code.
"""

import json
import socket
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.errors import FaultError
from gradsync.hybrid.transport import Message

HEAD = struct.Struct(
    "!4sQQQ"
)  # magic, number of the request (0: a post), bytes of JSON, of tensors
MAGIC = b"gsh1"
_ALIGN = 64
_JOINED = 64 * 1024  # up to this size one copy is cheaper than several calls
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


def encode(message: Message, number: int) -> list[memoryview]:
    """The bytes to send, in few pieces.

    >>> sum(len(piece) for piece in encode(Message("ping"), 1)) > HEAD.size
    True
    """
    described, pieces, size = [], [], 0
    for tensor in message.tensors:
        described.append([str(tensor.dtype), list(tensor.shape)])
        data = _bytes_of(tensor.detach().contiguous())
        pieces.append(data)
        padding = -len(data) % _ALIGN
        if padding:
            pieces.append(memoryview(bytes(padding)))
        size += len(data) + padding
    text = json.dumps([message.op, message.values, described], separators=(",", ":")).encode()
    head = HEAD.pack(MAGIC, number, len(text), size) + text
    if size <= _JOINED:
        return [memoryview(b"".join([head, *pieces]))]
    return [memoryview(head), *pieces]


def decode(text: bytes | bytearray, body: Tensor) -> Message:
    """The message whose JSON is ``text`` and whose tensors are views into ``body``.

    >>> decode(b'["ping",{},[]]', torch.empty(0, dtype=torch.uint8)).op
    'ping'
    """
    op, values, described = json.loads(text)
    tensors, offset = [], 0
    for name, shape in described:
        dtype = _DTYPES[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        tensors.append(body[offset : offset + size].view(dtype).view(shape))
        offset += size + -size % _ALIGN
    return Message(op, values, tensors)


def open_head(head: bytes | bytearray) -> tuple[int, int, int]:
    """Number, bytes of JSON, bytes of tensors.

    >>> open_head(HEAD.pack(MAGIC, 7, 14, 0))
    (7, 14, 0)
    """
    magic, number, text, body = HEAD.unpack(head)
    if magic != MAGIC:
        raise FaultError("what came is no message of gradsync.hybrid: a stranger has connected")
    return number, text, body


def send(connection: socket.socket, pieces: Sequence[memoryview]) -> None:
    """Send all, on a blocking socket.

    >>> left, right = socket.socketpair()
    >>> send(left, encode(Message("ping"), 3)); receive(right)
    (3, Message(op='ping', values={}, tensors=[]))
    """
    for piece in pieces:
        connection.sendall(piece)


def receive(connection: socket.socket) -> tuple[int, Message] | None:
    """The next message with its number, on a blocking socket; None at its end.

    >>> left, right = socket.socketpair()
    >>> left.close(); receive(right) is None
    True
    """
    head = bytearray(HEAD.size)
    if not _fill(connection, memoryview(head)):
        return None
    number, text_size, size = open_head(head)
    text, body = bytearray(text_size), torch.empty(size, dtype=torch.uint8)
    if not _fill(connection, memoryview(text)) or not _fill(connection, writable(body)):
        return None
    return number, decode(text, body)


def writable(body: Tensor) -> memoryview:
    """The memory of a tensor of bytes.

    >>> len(writable(torch.empty(5, dtype=torch.uint8)))
    5
    """
    return memoryview(body.numpy())  # type: ignore[arg-type]


def _fill(connection: socket.socket, buffer: memoryview) -> bool:
    while len(buffer):
        count = connection.recv_into(buffer)
        if not count:
            return False
        buffer = buffer[count:]
    return True


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
