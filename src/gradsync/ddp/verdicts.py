"""What the ranks' statements mean: an error at once, or one for the next forward to raise.

All ranks judge the same statements, so all of them raise, or none.
"""

from collections.abc import Sequence

from gradsync.ddp import messages
from gradsync.ddp.bucket import Slot
from gradsync.ddp.rollcall import Incident, Statement
from gradsync.errors import PeerStepError


class Verdicts:
    """Judges steps, and keeps what is not to be raised in backward.

    Unused parameters are for the next forward, as in torch: one forward may have several
    backwards, and unused is only what none of them reached.
    """

    def __init__(self) -> None:
        self.deferred: Exception | None = None
        self._left_out: dict[int, list[Slot]] = {}  # by rank
        self._judged = False  # has there been a backward since the last forward?

    def judge(
        self, rank: int, step: int, statements: Sequence[Statement], slots: Sequence[Slot]
    ) -> Exception | None:
        """The error to raise at once, if any; ``statements`` are empty in an ordinary step."""
        if not statements:
            self._left_out = {}
            self._judged = True
            return None
        gone = [r for r, said in enumerate(statements) if said.incidents & Incident.ABANDONED]
        if gone:
            return PeerStepError(messages.abandoned(rank, step, gone))
        failed = [
            r for r, said in enumerate(statements) if said.incidents & Incident.FORWARD_FAILED
        ]
        if failed and len({said.forwards for said in statements}) > 1:
            return PeerStepError(messages.out_of_step(rank, step, failed))
        unused = {
            r: [
                slot
                for slot in slots
                if said.unused[slot.index]
                and (not self._judged or slot in self._left_out.get(r, ()))
            ]
            for r, said in enumerate(statements)
        }
        self._left_out = {r: left_out for r, left_out in unused.items() if left_out}
        self._judged = True
        return None

    def take(self, rank: int, step: int, *, static_graph: bool) -> Exception | None:
        """The error that the next forward is to raise, if any; it is forgotten then."""
        error, left_out = self.deferred, self._left_out
        self.deferred, self._left_out, self._judged = None, {}, False
        if error is None and left_out:
            message = messages.graph_changed if static_graph else messages.unused_parameters
            return message(rank, step, left_out)
        return error
