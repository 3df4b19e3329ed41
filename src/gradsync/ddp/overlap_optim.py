"""Optimizers that step inside the backward: as soon as a bucket is reduced.

Torch marks such parameters itself (``_apply_optimizer_in_backward``) with the optimizers to run,
one for each parameter. We take its hooks off, which would run before the reduction, and run the
optimizers after it.

``torch.distributed.optim`` is imported late: it takes long, and warns of TorchScript.
"""

from collections.abc import Iterable, Sequence

from torch.nn import Parameter
from torch.optim import Optimizer

from gradsync.ddp.bucket import Slot
from gradsync.errors import ArgumentError


def check(chosen: Sequence[object], trained: Sequence[Parameter]) -> None:
    """Raise ``ArgumentError`` for parameters that would never be stepped, or twice."""
    known = {id(param) for param in trained}
    strangers = sum(id(param) not in known for param in chosen)
    if strangers or not chosen:
        raise ArgumentError(
            f"parameters: {strangers} of the {len(chosen)} given are none that this "
            "DistributedDataParallel reduces. Pass some of ddp.parameters() that are neither "
            "frozen nor ignored, or leave it out for all."
        )
    if any(hasattr(param, "_in_backward_optimizers") for param in chosen):
        raise ArgumentError(
            "parameters: some are stepped in the backward by an optimizer already. Change that "
            "one's param_groups in place of adding a second."
        )


def mark(
    optimizer: type[Optimizer], parameters: Iterable[Parameter], arguments: dict[str, object]
) -> None:
    """Have each of ``parameters`` stepped in the backward by an optimizer of its own."""
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(optimizer, parameters, arguments, register_hook=False)


def take_hooks_off(parameters: Iterable[Parameter]) -> bool:
    """Are any of ``parameters`` to be stepped in the backward? Then it is our task from now on."""
    marked = [param for param in parameters if hasattr(param, "_in_backward_optimizers")]
    if marked:
        from torch.distributed.optim import apply_optimizer_in_backward as torchs
    for param in marked:
        for handle in torchs.param_to_optim_hook_handle_map.pop(param, []):
            handle.remove()
    return bool(marked)


def step(slots: Sequence[Slot]) -> None:
    """Step the parameters whose gradients are reduced, and drop the gradients."""
    for slot in slots:
        param = slot.param
        if param.grad is not None and hasattr(param, "_in_backward_optimizers"):
            for optimizer in param._in_backward_optimizers:
                optimizer.step()
            param.grad = None
