"""Communication hooks: a function of the user's reduces each bucket, in place of the all-reduce.

``CommHook`` takes the place of ``Summation`` in the reducer. A hook gets the sums of this rank,
not scaled, and returns a future with what becomes of the gradients: it divides by the world size
itself if it wants an average. What the ranks report of a step ([Note: the trailer]) is none of a
hook's business: it travels in a bucket of its own, unless the hook says that it averages whatever
is in the buffer (``carries_report``, as some of ours do).
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType
from torch._C._distributed_c10d import GradBucket as TorchGradBucket
from torch.nn import Parameter

from gradsync.ddp.bucket import Bucket
from gradsync.ddp.collectives import LocalWork, Work, all_reduce, is_foreign, wait
from gradsync.ddp.futures import result_of
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
    """A bucket in the hands of a hook, or waiting for its turn."""

    def __init__(self, owner: "CommHook", bucket: Bucket) -> None:
        self._owner = owner
        self._bucket = bucket
        self.future: torch.futures.Future[Any] | None = None

    def begin(self) -> None:
        """Call the hook."""
        try:
            self.future = self._call()
        except Exception as error:
            if not isinstance(error, StateError):
                error.add_note(self._owner.describe(self._bucket))
            self.error = error

    def _call(self) -> "torch.futures.Future[Any]":
        owner, bucket = self._owner, self._bucket
        future = owner.hook(owner.state, GradBucket(bucket, is_last=bucket.is_last))
        if not isinstance(future, torch.futures.Future | torch._C.Future):
            raise StateError(  # torch's class and words, which programs look for
                "callback must return a torch.futures.Future object, but got "
                f"{type(future).__name__}. {owner.describe(bucket)}"
            )
        return future

    def is_through(self) -> bool:
        """Has the hook done all it will do with the bucket?"""
        return self.error is not None or (self.future is not None and bool(self.future.done()))

    def is_completed(self) -> bool:
        self._owner.take_turns()
        return self.is_through()

    def wait(self) -> None:
        self._owner.take_turns()
        if self.error is not None:
            raise self.error
        self._owner.check_not_stuck()
        assert self.future is not None, "those before it have been waited for"
        try:
            result = result_of(self.future, self._owner.group, lambda: "the communication hook")
            self._bucket.receive(self._tensor(result))
        except StateError as error:
            raise StateError(f"{error} {self._owner.describe(self._bucket)}") from None
        except Exception as error:
            error.add_note(self._owner.describe(self._bucket))
            raise

    def _tensor(self, result: object) -> Tensor:
        if isinstance(result, Sequence) and len(result) == 1:
            result = result[0]  # the future of a collective holds a list
        if not isinstance(result, Tensor):
            raise StateError(
                f"the future of the communication hook holds {type(result).__name__}; it has to "
                "hold one tensor, the new value of bucket.buffer()."
            )
        return result


class SumAfterAll(LocalWork):
    """A sum that begins when it is waited for: the last of a step, after all hooks.

    A hook may issue collectives from a callback, whenever that runs. Ours must not come in
    between on one rank and later on another.
    """

    def __init__(self, owner: "CommHook", summation: Summation, bucket: Bucket) -> None:
        self._owner = owner
        self._summation = summation
        self._bucket = bucket

    def wait(self) -> None:
        self._owner.check_not_stuck()
        wait(
            self._summation.start(self._bucket),
            self._summation.group,
            lambda: "the sum of what the ranks report",
            by_future=True,
        )


class CommHook:
    """Reduces buckets by a hook.

    [Note: turns] A hook that issues collectives from callbacks (``chains``) gets a bucket only when
    the one before is done. Else the second collective of one and the first of the next would come
    in an order that depends on time, and the ranks would read each other's wrong messages: on gloo
    that ends the process.

    [Note: stuck] The same happens if a hook raises before it has sent anything and we go on to
    the next bucket: the other ranks are still in this one. So nothing is sent any more in this
    step, unless the hook takes the bucket at a second try, with zeros.
    """

    def __init__(self, group: dist.ProcessGroup, hook: Hook, state: object) -> None:
        self.group = group
        self.hook = hook
        self.state = state
        self._others = Summation(group)
        self._chains = chains(hook)
        self._at_once = issues_at_once(hook)
        carries = getattr(hook, "carries_report", None)
        self.carries_report = carries is not None and bool(carries(group.size()))
        self._waiting: list[HookWork] = []  # for their turn
        self._current: HookWork | None = None
        self._last = -1  # the bucket that was started last
        self._stuck: HookWork | None = None
        self._has_failed = False  # in this step

    def start(self, bucket: Bucket) -> Work:
        """Hand a bucket to the hook; raises what the hook raises, if it may be tried again."""
        if not bucket.slots:
            if self._at_once and not self._has_failed and not self._waiting:
                return self._others.start(bucket)  # on its way together with the last bucket
            return SumAfterAll(self, self._others, bucket)
        if bucket.index <= self._last:  # a new step, or a second try
            self._waiting, self._current, self._stuck = [], None, None
            self._has_failed = False
        self._last = bucket.index
        work = HookWork(self, bucket)
        self._waiting.append(work)
        self.take_turns()
        if work.error is not None and self._stuck is work:
            raise work.error
        return work

    def divides(self, bucket: Bucket) -> bool:
        """Is what travels behind the gradients averaged?"""
        return bool(bucket.slots)

    def take_turns(self) -> None:
        """Hand over the next buckets, as far as the hook is through with those before."""
        while self._waiting and self._stuck is None:
            current = self._current
            if self._chains and current is not None and not current.is_through():
                return
            self._current = work = self._waiting.pop(0)
            issued = self._issued()
            work.begin()
            if work.error is not None:
                self._has_failed = True
                if self._issued() == issued:
                    self._stuck = work

    def check_not_stuck(self) -> None:
        """Raise if nothing may be sent any more in this step."""
        if self._stuck is not None:
            raise StateError("the communication hook has failed for an earlier bucket")

    def _issued(self) -> int:
        """How many collectives this rank has issued."""
        if is_foreign(self.group):
            return 0
        number: int = self.group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        return number

    def describe(self, bucket: Bucket) -> str:
        """Which hook, rank and bucket, for messages."""
        return (
            f"(communication hook {name_of(self.hook)} on rank {self.group.rank()}, bucket "
            f"{bucket.index}: {bucket.describe()})"
        )

    def done(self) -> None:
        """All buckets of a step are reduced."""
        self._others.done()


_PUBLISHED = "torch.distributed.algorithms.ddp_comm_hooks."
_AT_ONCE = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")
_CHAINING = ("powerSGD_hook", "quantization_hooks", "ddp_zero_hook")


def chains(hook: object, depth: int = 4) -> bool:
    """Does the hook issue collectives from callbacks? Known of torch's, also inside wrappers."""
    if getattr(hook, "__module__", None) in [_PUBLISHED + name for name in _CHAINING]:
        return True
    inner = [getattr(hook, "func", None), getattr(hook, "__wrapped__", None)]
    for cell in getattr(hook, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            inner.append(cell.cell_contents)
    return depth > 0 and any(callable(each) and chains(each, depth - 1) for each in inner)


def issues_at_once(hook: object) -> bool:
    """Has the hook issued all its collectives when its call for the last bucket returns?

    Known of torch's plainest; others say so by an attribute of this name, as ours do.
    """
    published = sys.modules.get(_PUBLISHED + "default_hooks")
    if any(hook is getattr(published, name, None) for name in _AT_ONCE):
        return True  # not what wraps one: it may do more
    return getattr(hook, "issues_at_once", False) is True


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
    if bucket is not None and not _says_bucket(bucket.annotation):
        raise ArgumentError("Communication hook: bucket annotation should be dist.GradBucket.")
    returned = signature.return_annotation
    if returned is not inspect.Signature.empty and not (
        returned == torch.futures.Future[torch.Tensor] or isinstance(returned, str)
    ):
        raise ArgumentError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        )


def _says_bucket(annotation: object) -> bool:
    """Also as text, which annotations are under ``from __future__ import annotations``."""
    if isinstance(annotation, str):
        return annotation.strip("\"'").rpartition(".")[2] == "GradBucket"
    return annotation in (inspect.Parameter.empty, TorchGradBucket, GradBucket)


def sum_hook(group: dist.ProcessGroup, bucket: GradBucket) -> "torch.futures.Future[Any]":
    """The sum of a bucket over the ranks, as a future of its buffer."""
    future: torch.futures.Future[list[Tensor]] = all_reduce(group, bucket.buffer()).get_future()
    return future.then(lambda done: done.value()[0])


class BuiltinHook:
    """One of torch's built-in hooks, which average: in full or in half precision.

    >>> import torch, gradsync
    >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> ddp._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
    >>> ddp(torch.ones(8, 4)).sum().backward()
    >>> ddp.module.bias.grad
    tensor([8., 8.])
    """

    issues_at_once = True

    def __init__(self, kind: object) -> None:
        if not isinstance(kind, BuiltinCommHookType):
            raise ArgumentError(
                f"comm_hook_type must be a torch.distributed.BuiltinCommHookType, got {kind!r}."
            )
        self._compresses = kind == BuiltinCommHookType.FP16_COMPRESS
        self.__qualname__ = str(kind)

    def __call__(self, group: Any, bucket: Any) -> "torch.futures.Future[Any]":
        """Start averaging ``bucket`` over the ranks of ``group``."""
        buffer = bucket.buffer()
        wire = (buffer.half() if self._compresses else buffer).div_(group.size())
        future: torch.futures.Future[Any] = all_reduce(group, wire).get_future()
        return future.then(lambda done: buffer.copy_(done.value()[0]))


class Portable(Enum):
    """What stands for a state that cannot be pickled."""

    OWN_GROUP = "the process group of the model"
