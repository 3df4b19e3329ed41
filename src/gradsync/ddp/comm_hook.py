"""Communication hooks: a function of the user's reduces each bucket, in place of the all-reduce.

``CommHook`` takes the place of ``Summation`` in the reducer. A hook gets the sums of this rank,
not scaled, and returns a future with what becomes of the gradients: it divides by the world size
itself if it wants an average. What the ranks report of a step ([Note: the trailer]) is none of a
hook's business: it travels in a bucket of its own.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType
from torch._C._distributed_c10d import GradBucket as TorchGradBucket
from torch.nn import Parameter

from gradsync.ddp.bucket import Bucket
from gradsync.ddp.collectives import LocalWork, Work, all_reduce, wait
from gradsync.ddp.route import Summation
from gradsync.errors import ArgumentError, HookTypeError, StateError

Hook = Callable[[Any, Any], "torch.futures.Future[Any]"]


class GradBucket:
    """What a hook sees of a bucket: the interface of ``torch.distributed.GradBucket``.

    >>> import torch, gradsync
    >>> def tell(state, bucket):
    ...     print(bucket.index(), bucket.is_last(), bucket.buffer().shape)
    ...     future = torch.futures.Future()
    ...     future.set_result(bucket.buffer())
    ...     return future
    >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> ddp.register_comm_hook(None, tell)
    >>> ddp(torch.ones(1, 4)).sum().backward()
    0 True torch.Size([10])
    """

    def __init__(self, bucket: Bucket, *, is_last: bool) -> None:
        self._bucket = bucket
        self._buffer = bucket.payload
        self._is_last = is_last

    def __repr__(self) -> str:
        return f"GradBucket({self._bucket.index}, {self._bucket.describe()})"

    def index(self) -> int:
        """Its place in the order in which buckets are reduced."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """The gradients of this rank side by side; not divided by the world size."""  # 1D
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """The same as views with the parameters' shapes."""
        return self._bucket.views_of(self._buffer)

    def parameters(self) -> list[Parameter]:
        """The parameters that the gradients belong to, in the same order."""
        return [slot.param for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Is it the last one of this backward?"""
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Let ``buffer`` be the gradients from now on; it may have another dtype."""
        self._buffer = buffer


class HookWork(LocalWork):
    """A bucket in the hands of a hook."""

    def __init__(self, future: "torch.futures.Future[Any]", bucket: Bucket) -> None:
        self._future = future
        self._bucket = bucket

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def wait(self) -> None:
        result = self._future.wait()
        if isinstance(result, Sequence) and len(result) == 1:
            result = result[0]  # the future of a collective holds a list
        if not isinstance(result, Tensor):
            raise StateError(
                f"the future of the communication hook holds {type(result).__name__}; it has to "
                "hold one tensor, the new value of bucket.buffer()."
            )
        self._bucket.receive(result)


class _SumAfterAll(LocalWork):
    """A sum that begins when it is waited for: the last of a step, after all hooks.

    A hook may issue collectives from a callback, whenever that runs. Ours must not come in
    between on one rank and later on another.
    """

    def __init__(self, summation: Summation, bucket: Bucket) -> None:
        self._summation = summation
        self._bucket = bucket

    def wait(self) -> None:
        wait(
            self._summation.start(self._bucket),
            self._summation.group,
            lambda: "the sum of what the ranks report",
        )


class CommHook:
    """Reduces buckets by a hook."""

    def __init__(self, group: dist.ProcessGroup, hook: Hook, state: object) -> None:
        self.group = group
        self.hook = hook
        self.state = state
        self._others = Summation(group)

    def start(self, bucket: Bucket) -> Work:
        """Hand a bucket to the hook; raises what the hook raises, with the bucket's name."""
        if not bucket.slots:
            return _SumAfterAll(self._others, bucket)
        try:
            future = self.hook(self.state, GradBucket(bucket, is_last=bucket.is_last))
        except Exception as error:
            error.add_note(self.describe(bucket))
            raise
        if not isinstance(future, torch.futures.Future | torch._C.Future):
            raise HookTypeError(
                f"the communication hook must return a torch.futures.Future, got "
                f"{type(future).__name__}. {self.describe(bucket)}"
            )
        return HookWork(future, bucket)

    def describe(self, bucket: Bucket) -> str:
        """Which hook, rank and bucket, for messages."""
        return (
            f"(communication hook {name_of(self.hook)} on rank {self.group.rank()}, bucket "
            f"{bucket.index}: {bucket.describe()})"
        )

    def done(self) -> None:
        """All buckets of a step are reduced."""
        self._others.done()


def name_of(hook: object) -> str:
    """What a hook is called."""
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    return str(name)


def check_hook(hook: object) -> None:
    """Raise if ``hook`` cannot be one, with the words that torch has for it."""
    if not callable(hook):
        raise HookTypeError(
            f"Communication hook must be callable, got {type(hook).__name__}. It is called as "
            "hook(state, bucket) and returns a torch.futures.Future."
        )
    signature = inspect.signature(hook)
    parameters = signature.parameters
    positional = [
        each for each in parameters.values() if each.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    if len(positional) < 2 and not any(
        each.kind is inspect.Parameter.VAR_POSITIONAL for each in positional
    ):
        raise ArgumentError(
            f"Communication hook: {name_of(hook)} takes {len(positional)} arguments, and is called "
            "with two: state and bucket."
        )
    bucket = parameters.get("bucket")
    if bucket is not None and bucket.annotation not in (
        inspect.Parameter.empty, TorchGradBucket, GradBucket, "dist.GradBucket", "GradBucket",
    ):  # fmt: skip
        raise ArgumentError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned = signature.return_annotation
    if returned is not inspect.Signature.empty and not (
        returned == torch.futures.Future[torch.Tensor] or isinstance(returned, str)
    ):
        raise ArgumentError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        )


def sum_hook(group: dist.ProcessGroup, bucket: GradBucket) -> "torch.futures.Future[Any]":
    """The sum of a bucket over the ranks, as a future of its buffer."""
    future: torch.futures.Future[list[Tensor]] = all_reduce(group, bucket.buffer()).get_future()
    return future.then(lambda done: done.value()[0])


def builtin_hook(kind: object) -> Hook:
    """Torch's built-in hooks, which average: by name, in full or in half precision."""
    if not isinstance(kind, BuiltinCommHookType):
        raise ArgumentError(
            f"comm_hook_type must be a torch.distributed.BuiltinCommHookType, got {kind!r}."
        )
    compress = kind == BuiltinCommHookType.FP16_COMPRESS

    def hook(group: Any, bucket: Any) -> "torch.futures.Future[Any]":
        buffer = bucket.buffer()
        wire = (buffer.half() if compress else buffer).div_(group.size())
        future: torch.futures.Future[Any] = all_reduce(group, wire).get_future()
        return future.then(lambda done: buffer.copy_(done.value()[0]))

    hook.__qualname__ = hook.__name__ = str(kind)
    return hook
