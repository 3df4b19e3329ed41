"""Keep ``torch.compile`` out of our methods, which are called from frames that it compiles."""

from types import FunctionType


def leave_alone(cls: type) -> type:
    """Let Dynamo run the methods of ``cls``, and what they call, as they are."""
    try:  # without Dynamo itself, whose import takes a second
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:  # before torch 2.8
        return cls
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else member
        if isinstance(function, FunctionType):
            set_code_exec_strategy(function.__code__, skip)
    return cls
