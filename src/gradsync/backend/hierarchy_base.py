"""Between several places: what ranks agree on, and who is told what when something goes wrong.

[Note: words first]
Before anything else the ranks of a place, and then the leaders, tell each other in words what they
are about to do: gloo does not compare, and mixes up messages or ends the process. It costs the
leaders one exchange of 128 bytes.

[Note: the first reason] stands in board.py's store. Ranks fail because of each other, so whoever
has failed posts why, and then raises what stands there: the first reason that anybody gave.
"""

import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store

from gradsync.backend._native import State
from gradsync.backend.board import GRACE_SECONDS, Board
from gradsync.backend.engines import Engines
from gradsync.backend.flows import Clock, connect, is_late, lost
from gradsync.backend.lane import Lane, Task
from gradsync.backend.members import Member, is_alive
from gradsync.backend.notices import Told, first_line
from gradsync.backend.shared_memory import SharedMemory, Started
from gradsync.errors import (
    AbortedError,
    CollectiveMismatchError,
    DeadlineError,
    FaultError,
    PeerLostError,
)

TEXT_BYTES = 128
ORPHAN_SECONDS = 2.0  # for which a flow may go on after a rank of it has ended


class HierarchyBase(Lane):
    """Base of ``Hierarchy``: all ranks of ``places``, without their collectives.

    ``memory`` is what the ranks of our own place share. ``local`` are all ranks of this machine.
    """

    def __init__(
        self,
        store: Store,
        own: Member,
        places: Sequence[Sequence[Member]],
        memory: SharedMemory,
        timeout: timedelta,
        local: Sequence[Member],
    ) -> None:
        self._own = own
        self._places = places
        self._local = local
        self._world = sum(map(len, places))
        self._here = next(index for index, place in enumerate(places) if own in place)
        self._is_leader = memory.rank == 0
        self._all_lead = len(places) == self._world
        self._saw_end: float | None = None  # when we saw that a rank of this machine has ended
        leaders = PrefixStore("leaders/", store)
        self._engines = Engines(leaders, self._here, len(places), timeout)
        if self._is_leader:
            connect(self._engines, local)
        super().__init__("gradsync-hosts", memory, places[self._here])
        notices = PrefixStore("board/", store)
        self._board = Board(notices, self._here, self, is_leader=self._is_leader)

    # ---------------------------------------------------------------- what is agreed on

    def _started(
        self,
        name: str,
        run: Callable[[Clock], None],
        kept: object,
        seconds: float,
        later: bool,
        finish: Callable[[], object] | None = None,
    ) -> Started:
        clock = Clock(seconds)

        def agree_and_run() -> None:
            self._agree(name, clock)
            run(clock)

        task = self.start(lambda: Task(self.issued, name, agree_and_run))
        return Started(task, kept, finish, later)

    def _agree(self, text: str, clock: Clock) -> None:
        """[Note: words first]."""
        self.memory.agree(text, clock.left, later=False).handle.wait()
        if not self._is_leader:
            return
        all_words = self._exchange(f"{self._board.progress} {text}", clock)
        if any(words != all_words[0] for words in all_words):
            told = "; ".join(
                f"{place[0].label}: {_said(words)}"
                for place, words in zip(self._places, all_words, strict=True)
            )
            raise CollectiveMismatchError(
                f"collective {self._board.progress} is not the same on all ranks: {told}."
            )

    def _exchange(self, text: str, clock: Clock) -> list[bytes]:
        """What all leaders say, ours among them."""
        words = text.encode()[: TEXT_BYTES - 1].ljust(TEXT_BYTES, b"\0")
        own = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in self._places]
        options = AllgatherOptions()
        options.timeout = clock.timeout
        flow = self._engines.gloo().allgather([rows], [own], options)
        self.await_flow(flow, clock, needs_neighbours=True)
        return [bytes(row.tolist()) for row in rows]

    # ---------------------------------------------------------------- what goes wrong

    def begin(self, task: Task) -> None:
        """Tell other places, if they ask, how far this one is."""
        self._board.progress = task.number
        super().begin(task)
        if self._board.notice is not None:
            raise self._board.notice

    def look(self, *, needs_neighbours: bool) -> None:
        """Raise also what other places have told."""
        if self._board.notice is not None and self.stop is None:
            raise self._board.notice
        super().look(needs_neighbours=needs_neighbours)
        if needs_neighbours:
            self._look_at_others()

    def _look_at_others(self) -> None:
        """Who has ended may have done its part before. If not, that cuts the flow, and is known at
        once; but a child of that process, made by a fork, keeps its connections open.
        """
        ended = self._ended_here()
        if ended is None:
            return
        if self._saw_end is None:
            self._saw_end = time.monotonic()
        if time.monotonic() - self._saw_end > ORPHAN_SECONDS:
            raise lost(ended, "the group", "")

    def missing(self) -> list[int]:
        """For the board: who of this place has not come to what is under way, or is to come."""
        is_busy = self.ended < self.issued
        positions = self.memory.context.positions()
        own = positions[self.memory.rank]
        return [
            member.rank
            for member, at in zip(self.neighbours, positions, strict=True)
            if at < own or (at == own and not is_busy)
        ]

    def look_after_neighbours(self) -> tuple[Told, int] | None:
        """For the board: has one ended while we compute? [Note: after] in board.py."""
        number = self._board.progress
        if self.ended < self.issued or self.ended < number or self.stop or self.broken:
            return None
        states = self.memory.context.states()
        for member, (state, _) in zip(self.neighbours, states, strict=True):
            if state is State.PRESENT and not is_alive(member) and self.ended == self.issued:
                return lost(member, f"a collective after {number}", ""), number
        return None

    def drop_everything(self, notice: Told) -> None:
        """For the board: others have given up. So must who waits here, be it for a neighbour."""
        self.memory.context.fail(str(notice))
        self.memory.context.abort()

    def explain(self, task: Task, error: Exception) -> Exception:
        """What happened, as one rank has found out and told all others."""
        if isinstance(error, CollectiveMismatchError) and self._all_lead:
            return error  # all know, and nobody has begun: the group can be used on
        reason = self._reason(task, error)
        self.give_up(reason)  # at once: neighbours wait for us
        if self.stop is None and self._board.post(reason):
            reason = self._board.read() or reason  # [Note: the first reason]
        self.broken = reason
        return reason

    def _reason(self, task: Task, error: Exception) -> Told:
        if self.stop is not None:
            return self.stop
        if self._board.notice is not None:
            return self._board.notice
        if isinstance(error, CollectiveMismatchError):
            text = re.sub(r"^collective \d+", f"collective {task.number}", str(error))
            return CollectiveMismatchError(f"{text} The group cannot be used any more.")
        if isinstance(error, AbortedError) and "aborted the group" not in str(error):
            self.abort()  # by another thread of ours
            return error
        if isinstance(error, DeadlineError) and not self._is_leader:
            # Our leader is late, since it waits for another place: it will know for which.
            return self._board.read(3 * GRACE_SECONDS) or error
        if isinstance(error, PeerLostError | DeadlineError):
            return self._of_all(task, error)  # the native part has told of its part of it
        if isinstance(error, AbortedError):
            return error
        if isinstance(error, FaultError):  # a neighbour gave up, for a reason that it has posted
            return self._board.read() or error
        return self._roll_call(task, error)

    def _of_all(self, task: Task, error: PeerLostError | DeadlineError) -> Told:
        """What neighbours have found in a part of a task, as one of the whole task."""
        members = {member.rank: member for member in self._local}
        if isinstance(error, PeerLostError):
            known = members.get(-1 if error.rank is None else error.rank)
            how = "has left the group" if "has left the group" in str(error) else "has ended"
            return error if known is None else lost(known, task.name, "", how=how)
        who = ", ".join(members[rank].label for rank in error.ranks if rank in members)
        text = f"{task.name}: the deadline has passed. Not arrived: {who or 'not known'}."
        return DeadlineError(text, ranks=error.ranks)

    def _roll_call(self, task: Task, error: Exception) -> Told:
        """A flow is cut, or has not come in time. Whose fault is it?"""
        reason = first_line(error)
        ended = self._ended_here()
        if ended is not None:
            return lost(ended, task.name, reason)
        answers = self._board.roll_call(len(self._places))
        if self._board.notice is not None:
            return self._board.notice
        ended = self._ended_here()  # which is seen a little later than the end of its connections
        if ended is not None:
            return lost(ended, task.name, reason)
        if is_late(reason):
            late: list[Member] = []
            for index, answer in answers.items():
                place = self._places[index]
                late += (
                    place[:1]
                    if answer is None
                    else [member for member in place if member.rank in answer.missing]
                )
            text = f"{task.name}: the deadline has passed (timeout in the network). Not arrived: "
            who = ", ".join(member.label for member in late) or "not known"
            return DeadlineError(f"{text}{who}.", ranks=[member.rank for member in late])
        absent = [index for index, answer in answers.items() if answer is None]
        if absent:
            leader = self._places[absent[0]][0]
            how = "does not answer any more, and has closed its connection,"
            return lost(leader, task.name, reason, how=how)
        # All answer: who gave up knows more, and may be a little later to say so.
        told = self._board.read() if answers else None
        if told is not None:
            return told
        leaders = ", ".join(place[0].label for place in self._places)
        unknown = f" No more is known, as the store fails: {self._board.trouble}."
        return FaultError(
            f"{task.name} failed in the flow between {leaders}: {reason}."
            f"{unknown if self._board.trouble else ''}"
        )

    def _ended_here(self) -> Member | None:
        return next((member for member in self._local if not is_alive(member)), None)

    # ---------------------------------------------------------------- the end

    def abort(self) -> None:
        """Make what is under way fail, here and in other places."""
        if self.stop is None:
            super().abort()
            self._board.post(AbortedError(f"{self._own.label} aborted the group."))

    def close(self) -> None:
        """End the thread. What is still under way fails."""
        super().close()
        self._board.close()
        self._engines.shutdown()


def _said(words: bytes) -> str:
    """What another leader has sent, without the number in front."""
    text = words.rstrip(b"\0").decode(errors="replace")
    return "".join(each for each in text if each.isprintable()).partition(" ")[2]
