"""``ddp.logger``: where functions of torch's note what went wrong with a DDP.

[Note: torch's functions and our logger] Two functions of ``torch.distributed`` take the logger of a
DDP, and the error that they raise is then in its logging data. They are C++ and know torch's logger
alone. When the first DDP of ours is made, each is replaced by one that takes ours as well: it calls
torch's without a logger and notes the error itself. Every other call goes to torch's as it came.
Who has imported one of them by name before that keeps torch's, which refuses our logger.
"""

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from gradsync.ddp.surface import TorchSurface

# The functions, and at which place the logger stands among their arguments.
_TAKE_LOGGERS = {"_compute_bucket_assignment_by_size": 4, "_verify_params_across_processes": 2}


class ErrorLog:
    """Hand it to torch's functions that take a DDP's logger."""

    def __init__(self, ddp: "TorchSurface") -> None:
        self._ddp = weakref.ref(ddp)

    def note(self, error: Exception) -> None:
        """Let the logging data tell of ``error``."""
        ddp = self._ddp()
        if ddp is not None:
            ddp.reducer.failed(error)


@functools.cache
def let_torch_take_ours() -> None:
    """See [Note: torch's functions and our logger]."""
    for name, place in _TAKE_LOGGERS.items():
        if hasattr(dist, name):
            setattr(dist, name, _taking_ours(getattr(dist, name), place))


def _taking_ours(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        log = args[place] if len(args) > place else kwargs.get("logger")
        if not isinstance(log, ErrorLog):
            return function(*args, **kwargs)
        kwargs.pop("logger", None)
        try:
            return function(*args[:place], *args[place + 1 :], **kwargs, logger=None)
        except Exception as error:
            log.note(error)
            raise

    return call
