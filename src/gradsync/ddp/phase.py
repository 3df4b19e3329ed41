"""Where a step stands: the states of the reducer and what leads from one to the next."""

from enum import Enum, auto


class Phase(Enum):
    """Where a step stands.

    IDLE → ARMED by ``prepare``; IDLE or ARMED → BACKWARD when a backward reaches the module's
    outputs, ARMED → BACKWARD also by the first gradient; BACKWARD → FINALIZE → IDLE when that
    backward ends, well or by an exception.

    [Note: hidden outputs] If the outputs are in an object that we do not look into, a step may
    begin with a gradient inside a nested backward, whose end is not that of the step. Then ARMED
    → NESTED, and → BACKWARD by the first gradient outside, or by the last one of all.

    Under compiled autograd nobody calls us at the end of the backward: see [Note: compiled
    autograd]. Then there is COMPILED in place of BACKWARD, and the last gradient ends the step.

    Under distributed autograd there is DISTRIBUTED in place of BACKWARD: gradients are in a
    context, and several threads can bring them, one at a time.
    """

    IDLE = auto()  # gradients stay local: nothing asked for a reduction
    ARMED = auto()  # a synchronising forward has run
    NESTED = auto()  # gradients arrive, buckets launch, and the step's end is not in sight
    BACKWARD = auto()  # gradients arrive, buckets launch
    COMPILED = auto()  # the same, and it is known how many will come
    DISTRIBUTED = auto()  # the same, in a context of distributed autograd
    FINALIZE = auto()  # all gradients are there


BACKWARD_RUNS = (Phase.BACKWARD, Phase.COMPILED, Phase.DISTRIBUTED)
