"""Hooks by name, for programs that let their users choose."""

from typing import Any

from gradsync.errors import ArgumentError
from gradsync.hooks.base import Hook
from gradsync.hooks.cast import BF16, FP16
from gradsync.hooks.int8 import Int8
from gradsync.hooks.power_sgd import PowerSGD
from gradsync.hooks.topk import TopK

_HOOKS: dict[str, type[Hook]] = {hook.name: hook for hook in (BF16, FP16, Int8, PowerSGD, TopK)}


def by_name(name: str, **options: Any) -> Hook:
    """The hook called ``name``, made with ``options``.

    >>> import gradsync
    >>> gradsync.hooks.by_name("int8", block=128)
    Int8(block=128)
    """
    if name not in _HOOKS:
        raise ArgumentError(f"there is no hook named {name!r}; the names are {', '.join(_HOOKS)}")
    try:
        return _HOOKS[name](**options)
    except TypeError as error:
        raise ArgumentError(f"the hook {name!r}: {error}") from error


def names() -> tuple[str, ...]:
    """What `by_name` knows.

    >>> import gradsync
    >>> gradsync.hooks.names()
    ('bf16', 'fp16', 'int8', 'power_sgd', 'topk')
    """
    return tuple(_HOOKS)
