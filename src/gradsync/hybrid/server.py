"""``ParameterServer``: keeps parts of tables, answers lookups and applies gradients.

It outlives its trainers: when one dies the others are told, and a new set of trainers that connects
finds the tables as they were left.
"""

import threading
from collections.abc import Callable

from gradsync.errors import ArgumentError, StateError
from gradsync.hybrid.shard import Shard, TableSpec
from gradsync.hybrid.sockets import Address, Listener
from gradsync.hybrid.transport import Later, Message, Peer


class ParameterServer:
    """Serves parts of tables to the trainers that know ``token``.

    ``hybrid.run`` and ``hybrid.start_servers`` make these in processes of their own; in the process
    at hand one can be made for tests.

    >>> from gradsync import hybrid
    >>> server = hybrid.ParameterServer("server0", token="secret")
    >>> address = server.listen()
    >>> server.close()
    """

    def __init__(self, name: str, *, token: str) -> None:
        self.name = name
        self.tables: dict[str, Shard] = {}
        self._token = token
        self._listener: Listener | None = None
        self._lock = threading.Lock()
        self._generation: str | None = None
        self._trainers: list[str] = []  # of this generation
        self._gone: set[str] = set()  # those of them that have taken their leave
        self._broken: str | None = None  # why this generation cannot finish its step
        self._ended = threading.Event()
        self._operations: dict[str, Callable[[Peer, Message], Message | Later | None]] = {
            "begin": self._begin,
            "leave": self._leave,
            "create": self._create,
            "lookup": self._lookup,
            "push": self._push,
            "drop": self._drop,
            "describe": self._describe,
            "read": self._read,
            "write": self._write,
            "set_version": self._set_version,
            "stop": self._stop,
        }

    # ---------------------------------------------------------------- lifecycle

    def listen(self, ip: str = "127.0.0.1") -> Address:
        """Begin to serve, on threads of this process.

        >>> from gradsync import hybrid
        >>> server = hybrid.ParameterServer("server0", token="secret")
        >>> server.listen().ip
        '127.0.0.1'
        >>> server.close()
        """
        self._listener = Listener(self.handle, self._token, ip=ip, left=self._left)
        return self._listener.address

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server is told to stop; False if it was not in time.

        >>> from gradsync import hybrid
        >>> hybrid.ParameterServer("server0", token="secret").wait(timeout=0)
        False
        """
        return self._ended.wait(timeout)

    def close(self) -> None:
        """Let go of all clients and stop.

        >>> from gradsync import hybrid
        >>> server = hybrid.ParameterServer("server0", token="secret")
        >>> server.close(); server.wait(timeout=0)
        True
        """
        self._ended.set()
        if self._listener is not None:
            self._listener.close()

    def handle(self, peer: Peer, message: Message) -> Message | Later | None:
        """Do what a message asks for; this is what a transport calls.

        >>> from gradsync import hybrid
        >>> from gradsync.hybrid.transport import Message, Peer
        >>> server = hybrid.ParameterServer("server0", token="secret")
        >>> server.handle(Peer("master", ""), Message("describe")).values
        {'tables': []}
        """
        operation = self._operations.get(message.op)
        if operation is None:
            raise ArgumentError(f"there is no operation {message.op!r}")
        return operation(peer, message)

    def _stop(self, peer: Peer, message: Message) -> None:
        self._ended.set()

    # ---------------------------------------------------------------- trainers come and go

    def _begin(self, peer: Peer, message: Message) -> None:
        """A trainer has come; the first one of a new generation ends the old one."""
        with self._lock:
            if peer.generation == self._generation:
                return
            self._generation = peer.generation
            self._trainers = list(message.values["trainers"])
            self._gone = set()
            self._broken = None
            for shard in self.tables.values():
                shard.begin(self._trainers)

    def _leave(self, peer: Peer, message: Message) -> None:
        if not self._is_current(peer):
            return
        with self._lock:
            self._gone.add(peer.name)
            for shard in self.tables.values():
                shard.leave(peer.name)
            if message.values.get("stops") and len(self._gone) == len(self._trainers):
                self._ended.set()

    def _left(self, peer: Peer) -> None:
        """The connection of a trainer has ended."""
        if not self._is_current(peer) or peer.name in self._gone:
            return
        with self._lock:
            self._broken = f"{peer.name} has ended without taking its leave"
            for shard in self.tables.values():
                shard.give_up(self._broken)

    def _is_current(self, peer: Peer) -> bool:
        return peer.generation == self._generation and peer.name in self._trainers

    def _check_current(self, peer: Peer) -> None:
        if not self._is_current(peer) and peer.name != "master":
            raise StateError(f"{self.name} works for other trainers now, not for {peer.name}.")

    # ---------------------------------------------------------------- tables

    def _shard(self, message: Message) -> Shard:
        name = message.values["table"]
        if name not in self.tables:
            known = ", ".join(self.tables) or "none"
            raise ArgumentError(f"there is no table {name!r} on {self.name}; there is: {known}.")
        return self.tables[name]

    def _create(self, peer: Peer, message: Message) -> Message:
        spec = TableSpec.from_dict(message.values["spec"])
        with self._lock:
            shard = self.tables.get(spec.name)
            if shard is None:
                shard = self.tables[spec.name] = Shard(spec, message.values["index"])
                shard.begin(self._trainers)
                for name in self._gone:
                    shard.leave(name)
            elif different := spec.differs_from(shard.spec):
                raise ArgumentError(
                    f"table {spec.name} is there already and is another one: asked for was "
                    f"{'; '.join(different)}. Give the new one another name, or make them the same."
                )
        return Message("created", {"version": shard.version})

    def _lookup(self, peer: Peer, message: Message) -> Message | Later:
        self._check_current(peer)
        shard = self._shard(message)
        answer = shard.lookup(message.tensors[0], message.values["version"])
        if self._broken is not None and not isinstance(answer, Message):
            shard.give_up(self._broken)
        return answer

    def _push(self, peer: Peer, message: Message) -> None:
        self._check_current(peer)
        half = len(message.tensors) // 2
        self._shard(message).push(
            peer.name,
            message.tensors[:half],
            message.tensors[half:],
            commit=message.values["commit"],
        )

    def _drop(self, peer: Peer, message: Message) -> None:
        self._shard(message).drop(peer.name)

    # ---------------------------------------------------------------- checkpoints

    def _describe(self, peer: Peer, message: Message) -> Message:
        return Message(
            "tables",
            {
                "tables": [
                    {"spec": each.spec.as_dict(), "version": each.version, "names": each.names}
                    for each in self.tables.values()
                ]
            },
        )

    def _read(self, peer: Peer, message: Message) -> Message:
        shard = self._shard(message)
        return Message("rows", {"version": shard.version}, shard.read(message.tensors[0]))

    def _write(self, peer: Peer, message: Message) -> None:
        self._shard(message).write(message.tensors[0], message.values["names"], message.tensors[1:])

    def _set_version(self, peer: Peer, message: Message) -> None:
        self._shard(message).set_version(message.values["version"])
