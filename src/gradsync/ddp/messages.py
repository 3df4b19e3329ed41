"""The longer error messages of the reducer.

Where programs and tests match on a sentence of torch's, that sentence stands; ours follow it.
"""

from collections.abc import Mapping, Sequence

from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]

from gradsync.ddp.bucket import Slot
from gradsync.errors import GraphChangedError, UnusedParametersError

STATIC_GRAPH_TOO_LATE = (
    "_set_static_graph() should be called before training loop starts and after "
    "DistributedDataParallel is constructed; here a backward has already been reduced. Pass "
    "static_graph=True to the constructor."
)

NOT_FINALIZED = (
    "Expected to have finished reduction in the prior iteration before starting a new one: the "
    "last backward is still running."
)

HIDDEN_OUTPUTS = (
    "the last backward ran inside reentrant checkpoints and did not reach every parameter, and the "
    "module's outputs are in an object that is not looked into: its end could not be seen in time, "
    "so its gradients were used before they were reduced. Return tensors, or lists, tuples, dicts "
    "or dataclasses of them, or checkpoint with use_reentrant=False."
)

HOOK_TWICE = (
    "{} can only be called once: this DistributedDataParallel has a hook already. Wrap the module "
    "anew for another one."
)

HOOK_IN_BACKWARD = (
    "register_comm_hook should be called before calling backward: a backward is running. Register "
    "the hook right after the construction."
)

FORWARD_IN_BACKWARD = (
    "a forward of this module began while a backward of it was still running in another "
    "thread. Forward and backward of one DistributedDataParallel must take turns; wrap a second "
    "module for a second thread."
)

TWO_BACKWARDS = (
    "a backward came to this module while another one, under distributed autograd, was still "
    "running through it. Backwards of one DistributedDataParallel must take turns, in the same "
    "order on all ranks; wrap a second module for a second thread. A reentrant checkpoint is such "
    "a backward too, and leaves its gradients outside the context: use use_reentrant=False."
)

IN_CONTEXT = (
    "{} and torch.distributed.autograd exclude each other: it works on .grad, and under "
    "distributed autograd gradients are in a context. Call loss.backward() outside of one, or "
    "leave it out."
)


def unused_parameters(
    rank: int, step: int, left_out: Mapping[int, Sequence[Slot]]
) -> UnusedParametersError:
    """``left_out`` holds, for each rank with unused parameters, those."""
    lines = [
        "Expected to have finished reduction in the prior iteration before starting a new one: "
        f"in step {step} some parameters received no gradient.",
        *_not_received(rank, left_out),
        "Make sure that all `forward` function outputs participate in calculating loss on every "
        "rank. If these parameters are meant to go unused in some steps, allow it by passing the "
        "keyword argument `find_unused_parameters=True` to DistributedDataParallel.",
    ]
    if get_debug_level() == DebugLevel.OFF:
        lines.append(
            "To have torch check collectives as well, set the environment variable "
            "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
        )
    return UnusedParametersError("\n".join(lines))


def graph_changed(
    rank: int, step: int, left_out: Mapping[int, Sequence[Slot]]
) -> GraphChangedError:
    """Parameters that had gradients in the first step have none, or fewer, now."""
    lines = [
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "This error indicates that your training graph has changed in this iteration, e.g., one "
        "parameter is used in first iteration, but then got unused in the second iteration. this "
        "is not compatible with static_graph set to True.",
        *_not_received(rank, left_out),
        f"This was step {step}. Leave static_graph=True out, or make every step use the same "
        "parameters.",
    ]
    return GraphChangedError("\n".join(lines))


def no_sparse_parameter(name: str, known: Sequence[str]) -> str:
    """Rows were announced for something else."""
    return (
        f"_set_sparse_metadata: {name} is no parameter with sparse gradients; there "
        f"{'are ' + ', '.join(known) if known else 'is none'}."
    )


def newly_used(rank: int, slot: Slot) -> str:
    """A parameter has more gradients than in the first step."""
    return (
        "Your training graph has changed in this iteration, e.g., one parameter is unused in "
        "first iteration, but then got used in the second iteration. this is not compatible with "
        f"static_graph set to True.\nOn rank {rank}, parameter {slot.name} (index {slot.index}) "
        f"got {slot.fires} gradient(s), in the first step {slot.due}. Leave static_graph=True "
        "out, or make every step use the same parameters the same number of times."
    )


def ready_twice(rank: int, slot: Slot) -> str:
    """A gradient came twice in one backward."""
    return (
        "Expected to mark a variable ready only once. On rank "
        f"{rank}, parameter {slot.name} (index {slot.index}) got its gradient twice in one "
        "backward pass. Either a reentrant checkpoint runs over it more than once (use "
        "use_reentrant=False, or pass static_graph=True if every step has the same graph), or it "
        "is used by another backward that runs inside this one."
    )


def abandoned(rank: int, step: int, gone: Sequence[int]) -> str:
    """The backward of other ranks raised."""
    return (
        f"rank {rank}, step {step}: the backward of {_ranks(gone)} raised an exception, so the "
        "gradients of this step are incomplete on every rank. What that rank printed says why. To "
        "go on, drop this step on all ranks: zero_grad(), no optimizer step."
    )


def out_of_step(rank: int, step: int, failed: Sequence[int]) -> str:
    """A forward raised on some ranks only."""
    return (
        f"rank {rank}, step {step}: a forward of {_ranks(failed)} raised an exception and was not "
        "repeated by the other ranks: the ranks have reduced gradients of different batches. To "
        "go on, drop this step on all ranks: zero_grad(), no optimizer step; and skip a bad batch "
        "on all ranks together."
    )


def _not_received(rank: int, left_out: Mapping[int, Sequence[Slot]], most: int = 8) -> list[str]:
    """Lines for each rank, our own first."""
    lines = []
    ranks = sorted(left_out, key=lambda each: (each != rank, each))
    for each in ranks[:most]:
        indices = " ".join(str(slot.index) for slot in left_out[each])
        names = ", ".join(slot.name for slot in left_out[each])
        lines += [
            f"Parameter indices which did not receive grad for rank {each}: {indices}",
            f"Parameters which did not receive grad for rank {each}: {names}",
        ]
    if len(ranks) > most:
        lines.append(f"({len(ranks) - most} more ranks left parameters out.)")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
