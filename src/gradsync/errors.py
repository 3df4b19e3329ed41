"""The exceptions that gradsync raises, as one tree.

Two branches. A :class:`UsageError` is a mistake in the program: the message names the
parameter or the argument and the fix, and where programs match on torch's wording, the
wording is torch's. A :class:`FaultError` is a fault of the world (a peer that failed, a
deadline that passed): the program was right, and may recover. Broken invariants of our own
are plain ``assert``.

Every class also derives from the builtin that torch raises in its place, so that
``except RuntimeError`` and ``except ValueError`` of existing programs keep working.
"""

from collections.abc import Iterable

__all__ = [
    "AbortedError",
    "ArgumentError",
    "CollectiveError",
    "CollectiveMismatchError",
    "DeadlineError",
    "FaultError",
    "GradsyncError",
    "GraphChangedError",
    "HookTypeError",
    "ModelMismatchError",
    "PeerLostError",
    "PeerStepError",
    "ReadyTwiceError",
    "ServerLostError",
    "StateError",
    "UnusedParametersError",
    "UsageError",
]


class GradsyncError(Exception):
    """Base of everything that gradsync raises on purpose.

    >>> import gradsync
    >>> issubclass(gradsync.FaultError, gradsync.GradsyncError)
    True
    """


class UsageError(GradsyncError):
    """The program asks for something that cannot work; the message says what to change.

    >>> import gradsync
    >>> issubclass(gradsync.UnusedParametersError, gradsync.UsageError)
    True
    """


class ArgumentError(UsageError, ValueError):
    """An argument has a value that cannot work.

    >>> import gradsync, torch
    >>> try:
    ...     gradsync.DistributedDataParallel(torch.nn.Linear(2, 2), bucket_cap_mb=-1)
    ... except ValueError as error:
    ...     print(type(error).__name__)
    ArgumentError
    """


class HookTypeError(UsageError, TypeError):
    """What was given as a communication hook is not a function.

    >>> import gradsync, torch
    >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(2, 2))
    >>> try:
    ...     ddp.register_comm_hook(None, "allreduce")
    ... except TypeError as error:
    ...     print(type(error).__name__)
    HookTypeError
    """


class StateError(UsageError, RuntimeError):
    """A call came at a time, or on an object, where it cannot work.

    >>> import gradsync, torch
    >>> try:
    ...     gradsync.DistributedDataParallel(torch.nn.ReLU())
    ... except RuntimeError as error:
    ...     print(type(error).__name__)
    StateError
    """


class UnusedParametersError(StateError):
    """Parameters got no gradient though ``find_unused_parameters`` is off.

    Raised on every rank, and names the parameters with the ranks that left them out.

    >>> import gradsync
    >>> issubclass(gradsync.UnusedParametersError, RuntimeError)
    True
    """


class ReadyTwiceError(StateError):
    """A parameter's gradient arrived twice in one backward pass.

    >>> import gradsync
    >>> issubclass(gradsync.ReadyTwiceError, RuntimeError)
    True
    """


class GraphChangedError(StateError):
    """The graph differs from the first step's though ``static_graph=True`` was promised.

    >>> import gradsync
    >>> issubclass(gradsync.GraphChangedError, RuntimeError)
    True
    """


class ModelMismatchError(StateError):
    """The ranks hold different models; names the parameter and two ranks that differ.

    >>> import gradsync
    >>> issubclass(gradsync.ModelMismatchError, RuntimeError)
    True
    """


class CollectiveMismatchError(StateError):
    """The ranks of a group called different collectives; shows what each of them called.

    >>> import gradsync
    >>> issubclass(gradsync.CollectiveMismatchError, RuntimeError)
    True
    """


class FaultError(GradsyncError, RuntimeError):
    """Something outside this program failed: a peer, the network, a deadline.

    >>> import gradsync
    >>> issubclass(gradsync.CollectiveError, gradsync.FaultError)
    True
    """


class CollectiveError(FaultError):
    """A collective failed or timed out; names the step and what was waited for.

    >>> import gradsync
    >>> try:
    ...     raise gradsync.CollectiveError("rank 1, step 7: bucket 0 of 2 failed")
    ... except RuntimeError as error:
    ...     print(error)
    rank 1, step 7: bucket 0 of 2 failed
    """


class PeerStepError(FaultError):
    """Another rank did not finish this step; names the rank and what happened to it.

    >>> import gradsync
    >>> issubclass(gradsync.PeerStepError, gradsync.FaultError)
    True
    """


class PeerLostError(FaultError):
    """A rank has ended, or left the group, while others needed it; names rank, pid and host.

    ``rank`` is its rank in the group; ``host`` and ``pid`` say which process it was.

    >>> import gradsync
    >>> try:
    ...     raise gradsync.PeerLostError("rank 1 has ended", rank=1, host="a", pid=17)
    ... except gradsync.FaultError as error:
    ...     print(error, error.rank, error.host, error.pid)
    rank 1 has ended 1 a 17
    """

    def __init__(
        self, text: str, *, rank: int | None = None, host: str | None = None, pid: int | None = None
    ) -> None:
        super().__init__(text)
        self.rank = rank
        self.host = host
        self.pid = pid


class DeadlineError(FaultError):
    """Ranks have not come to a collective in time; names them.

    ``ranks`` are those in the group that are known not to have come.

    >>> import gradsync
    >>> try:
    ...     raise gradsync.DeadlineError("rank 1 has not arrived", ranks=[1])
    ... except gradsync.FaultError as error:
    ...     print(error, error.ranks)
    rank 1 has not arrived (1,)
    """

    def __init__(self, text: str, *, ranks: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class ServerLostError(FaultError):
    """A parameter server has ended, or cannot be reached; ``name``, ``host`` and ``pid`` say which.

    >>> from gradsync.errors import ServerLostError
    >>> try:
    ...     raise ServerLostError("server1 is gone", name="server1", host="a", pid=17)
    ... except RuntimeError as error:
    ...     print(error, error.name, error.pid)
    server1 is gone server1 17
    """

    def __init__(
        self, text: str, *, name: str | None = None, host: str | None = None, pid: int | None = None
    ) -> None:
        super().__init__(text)
        self.name = name
        self.host = host
        self.pid = pid


class AbortedError(FaultError):
    """A collective was under way when its group was aborted or destroyed.

    >>> import gradsync
    >>> issubclass(gradsync.AbortedError, gradsync.FaultError)
    True
    """
