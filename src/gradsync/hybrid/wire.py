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
_TEXT = 32 * 1024  # bytes of JSON at most
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


def open_head(head: bytes | memoryview) -> tuple[int, int, int]:
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
    >>> send(left, encode(Message("ping"), 3))
    >>> Inbox(right).receive()
    (3, Message(op='ping', values={}, tensors=[]))
    """
    for piece in pieces:
        connection.sendall(piece)


class Inbox:
    """Takes messages from a socket, small ones with one call for all that has come.

    >>> left, right = socket.socketpair()
    >>> left.close(); Inbox(right).receive() is None
    True
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = memoryview(bytearray(_JOINED + 4096))
        self._begin = self._end = 0  # of what has come and is not taken
        self._large: tuple[int, bytes, Tensor] | None = None  # a message of which a part has come
        self._missing = memoryview(b"")  # of its tensors

    def read(self) -> bool:
        """Take what has come, once; False at the end of the connection."""
        if len(self._missing):
            count = self._socket.recv_into(self._missing)
            self._missing = self._missing[count:]
            return count > 0
        if self._begin:  # make room
            left = self._end - self._begin
            self._buffer[:left] = bytes(self._buffer[self._begin : self._end])
            self._begin, self._end = 0, left
        count = self._socket.recv_into(self._buffer[self._end :])
        self._end += count
        return count > 0

    def next(self) -> tuple[int, Message] | None:
        """A message that is complete, with its number; None if there is none yet."""
        if self._large is not None:
            if len(self._missing):
                return None
            (number, text, body), self._large = self._large, None
            return number, decode(text, body)
        here = self._end - self._begin
        if here < HEAD.size:
            return None
        at = self._begin + HEAD.size
        number, text_size, size = open_head(self._buffer[self._begin : at])
        if text_size > _TEXT:
            raise FaultError(f"a message with {text_size} bytes of values is none of ours")
        if here < HEAD.size + text_size:
            return None
        text = bytes(self._buffer[at : at + text_size])
        at += text_size
        body = torch.empty(size, dtype=torch.uint8)
        count = min(size, self._end - at)
        if count:
            memory = writable(body)
            memory[:count] = self._buffer[at : at + count]
        self._begin = at + count
        if count < size:
            self._large, self._missing = (number, text, body), memory_from(body, count)
            return None
        return number, decode(text, body)

    def receive(self) -> tuple[int, Message] | None:
        """The next message, on a blocking socket; None at its end."""
        while (found := self.next()) is None:
            if not self.read():
                return None
        return found


def writable(body: Tensor) -> memoryview:
    """The memory of a tensor of bytes.

    >>> len(writable(torch.empty(5, dtype=torch.uint8)))
    5
    """
    return memoryview(body.numpy())  # type: ignore[arg-type]


def memory_from(body: Tensor, start: int) -> memoryview:
    """The memory of a tensor of bytes, from one of them on.

    >>> len(memory_from(torch.empty(5, dtype=torch.uint8), 3))
    2
    """
    return writable(body)[start:]


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
