"""Checks the protocol of csrc by trying every interleaving of its ranks, for small programs.

A rank is a list of steps, each as large as one access to shared memory (program.py). What shared
memory holds follows from how far each rank is, also the two words that they all count up, ticks and
pieces; so the state of the whole is where each rank stands, and which shares of a reduction in
place it has taken. `explore` visits all of them and fails on the first in which

- a rank finds in a slot anything but the data of its collective, written to the end, when it begins
  to read or when it ends (so nobody writes what another reads, or reads too early or too late),
- a share of a reduction in place is reduced twice, or not at all,
- a rank takes a peer for lost that had done all it was waited for,
- nobody can go on though somebody has not ended, or the ranks could go on for ever.

docs/shared-memory.md tells the protocol; protocol.pml is the same model for spin. Run as a script,
this checks the scenarios below and prints how many states they have: `make model`.
"""

import sys
import time
from collections.abc import Callable, Iterable
from itertools import pairwise

from program import OPS, PIECES, RIGHT, TICKS, Place, Program, Variant

WRITING = "being written"

# ------------------------------------------------------------------------------- all interleavings

ALIVE, IDLE, DEAD, LEFT, LOST, ABORTED = range(6)  # from DEAD on a rank is gone
# Of a wait, see sync.cc and members.cc.
LOAD, LOOK, JUDGE, AGAIN, ADD, SLEEP, ASLEEP, SUBTRACT = range(8)
PHASES = ("load", "look", "judge", "again", "add", "sleep", "asleep", "subtract")

# Of a reduction in place: its number, and the shares that a rank has taken, has reduced, and has
# told the others of.
Shares = tuple[int, int, int, int]
NONE: Shares = (0, 0, 0, 0)

# Where a rank stands: its next step; in a wait what next, the word that it saw (and after it has
# counted, whether it was the last), and who was gone when it looked (the bits above: who of them by
# an abort); whether it lives, its shares.
Stand = tuple[int, int, int, int, int, Shares]
AT, PHASE, SEEN, GONE, LIFE, SHARES = range(6)


class ProtocolError(AssertionError):
    """The protocol is wrong; the message tells the last steps that led there."""


class Checker:
    """All states of ranks that run ``ops`` one after the other, and then leave or do no more.

    Rank ``victim`` may be killed at any time, rank ``aborter`` may abort. Rank ``absent`` computes
    for ever instead of running the last of the ops.
    """

    def __init__(
        self,
        world: int,
        ops: Iterable[str],
        variant: Variant = RIGHT,
        victim: int | None = None,
        *,
        aborter: int | None = None,
        absent: int | None = None,
        leaves: bool = True,
    ) -> None:
        self.world = world
        self.variant = variant
        self.victim = victim
        self.aborter = aborter
        self.steps, self.counts, self.clocks, self.contents = [], [], [], []
        self.begun, self.reduced = [], []  # numbers of reductions in place
        names = list(ops)
        for rank in range(world):
            program = Program(rank, world, variant)
            for name in names[:-1] if rank == absent else names:
                OPS[name](program)
            ends_with = "leave" if leaves and rank != absent else "idle"
            self.steps.append([*program.steps, (ends_with,)])
            self._tabulate(self.steps[-1])

    def _tabulate(self, steps: list[tuple]) -> None:
        """What a rank has written before each of its steps, into its own places and others'."""
        count, clock, begun, reduced, written = 0, 0, 0, 0, {}
        counts, clocks, all_begun, all_reduced, contents = [0], [0], [0], [0], [{}]
        for step in steps:
            if step[0] == "count":
                count += 1
            elif step[0] == "clock":
                clock += 1
            elif step[0] == "begun":
                begun = step[1]
            elif step[0] == "reduced":
                reduced = step[1]
            elif step[0] == "begin":
                written = written | dict.fromkeys(step[1], WRITING)
            elif step[0] == "end":
                written = written | dict(step[1])
            counts.append(count)
            clocks.append(clock)
            all_begun.append(begun)
            all_reduced.append(reduced)
            contents.append(written)
        self.counts.append(counts)
        self.clocks.append(clocks)
        self.begun.append(all_begun)
        self.reduced.append(all_reduced)
        self.contents.append(contents)

    def explore(self) -> int:
        """Visit all states; how many there are."""
        start: tuple[Stand, ...] = tuple((0, LOAD, 0, 0, ALIVE, NONE) for _ in range(self.world))
        on_path, finished = {start}, set()
        path = [(start, iter(self._next(start)))]
        try:
            while path:
                state, following = path[-1]
                after = next(following, None)
                if after is None:
                    on_path.discard(state)
                    finished.add(state)
                    path.pop()
                elif after in on_path:
                    raise ProtocolError("the ranks can go on for ever")
                elif after not in finished:
                    on_path.add(after)
                    path.append((after, iter(self._next(after))))
        except ProtocolError as error:
            raise ProtocolError(f"{error}\n{self._trace(path)}") from None
        return len(finished)

    def _next(self, state: tuple[Stand, ...]) -> list[tuple[Stand, ...]]:
        following = []
        for rank in range(self.world):
            if state[rank][LIFE] != ALIVE:
                continue
            after = self._move(state, rank)
            if after is not None:
                following.append(after)
            if rank == self.victim:
                following.append(_with(state, rank, (*state[rank][:LIFE], DEAD)))
            if rank == self.aborter:
                following.append(self._give_up(state, rank, ABORTED))
        if not following and any(stand[LIFE] == ALIVE for stand in state):
            waiting = [rank for rank in range(self.world) if state[rank][LIFE] == ALIVE]
            raise ProtocolError(f"nobody can go on, and ranks {waiting} have not ended")
        return following

    def _move(self, state: tuple[Stand, ...], rank: int) -> tuple[Stand, ...] | None:
        at = state[rank][AT]
        step = self.steps[rank][at]
        if step[0] == "await":
            return self._move_in_wait(state, rank, *step[1:])
        if step[0] in ("done?", "present?", "look", "take", "done", "tell", "all done"):
            return self._move_in_place(state, rank, *step)
        if step[0] == "check":
            for (owner, name), tag in step[1]:
                found = self._content(state, (owner, name))
                if found != tag:
                    raise ProtocolError(
                        f"rank {rank} reads {name} of rank {owner} and finds {found}, not {tag}"
                    )
        if step[0] == "leave":
            state = self._wake(self._wake(state, TICKS), PIECES)
            return _with(state, rank, (at, LOAD, 0, 0, LEFT))
        if step[0] == "idle":
            return _with(state, rank, (at, LOAD, 0, 0, IDLE))
        was_last = 0
        if step[0] == "count":
            was_last = int(self._word(state, TICKS) + 1 == step[1] * self.world)
        elif step[0] in ("clock", "reduced"):
            was_last = state[rank][SEEN]
        elif step[0] == "ring":
            rings = state[rank][SEEN] or not self.variant.wakes_after_tick
            if rings and self.variant.wakes and self._has_sleepers(state, step[1]):
                state = self._wake(state, step[1])
        return _with(state, rank, (at + 1, LOAD, was_last, 0, ALIVE))

    def _content(self, state: tuple[Stand, ...], place: Place) -> object:
        """Of a place with several writers: what was written last. Tags grow."""
        written = [self.contents[peer][state[peer][AT]].get(place) for peer in range(self.world)]
        if WRITING in written:
            return WRITING
        return max((tag for tag in written if tag is not None), default=None)

    def _move_in_place(
        self, state: tuple[Stand, ...], rank: int, what: str, *facts: int
    ) -> tuple[Stand, ...]:
        at = state[rank][AT]
        if what == "done?":
            number, length = facts
            goes_on = length if self._is_reached(state, PIECES, number) else 1
            return _with(state, rank, (at + goes_on, LOAD, 0, 0, ALIVE))
        if what == "present?":
            return self._ask_who_is_present(state, rank, *facts)
        if what == "all done":
            for share in range(self.world):
                if not self._is_in(state, 2, share, facts[0]):
                    raise ProtocolError(f"rank {rank} finds that share {share} is not reduced")
            return _with(state, rank, (at + 1, LOAD, 0, 0, ALIVE))
        if what == "tell":
            of, taken, done, _ = state[rank][SHARES]
            if of != facts[0] or not done:
                return _with(state, rank, (at + 1, LOAD, 0, 0, ALIVE))
            after = _with(state, rank, (at + 1, LOAD, 0, 0, ALIVE, (of, taken, done, done)))
            was_last = int(self._is_reached(after, PIECES, of))
            return _with(after, rank, (at + 1, LOAD, was_last, 0, ALIVE))
        share, number, *rest = facts
        if what != "done" and self._is_in(state, 1, share, number):
            if what == "take" and not self.variant.takes_at_once:
                raise ProtocolError(f"rank {rank} reduces share {share}, which another has taken")
            return _with(state, rank, (at + rest[0], LOAD, 0, 0, ALIVE))
        of, taken, done, told = state[rank][SHARES]
        if of != number:
            taken = done = told = 0
        if what == "take":
            taken |= 1 << share
        elif what == "done":
            done |= 1 << share
        return _with(state, rank, (at + 1, LOAD, 0, 0, ALIVE, (number, taken, done, told)))

    def _ask_who_is_present(
        self, state: tuple[Stand, ...], rank: int, number: int, length: int
    ) -> tuple[Stand, ...]:
        """Does a rank say that it is gone? Only if not all is done, then, this rank gives up."""
        at, phase, *_ = state[rank]
        if phase == LOAD:
            if not self._mask(state, lambda peer: state[peer][LIFE] > DEAD):
                return _with(state, rank, (at + 1, LOAD, 0, 0, ALIVE))
            return _with(state, rank, (at, JUDGE, 0, 0, ALIVE))
        if self._is_reached(state, PIECES, number):
            if not self.variant.asks_again:
                raise ProtocolError(f"rank {rank} takes a rank for lost, but all was done")
            return _with(state, rank, (at + length, LOAD, 0, 0, ALIVE))
        return self._give_up(state, rank)

    def _is_in(self, state: tuple[Stand, ...], which: int, share: int, number: int) -> bool:
        """Has any rank taken (1), reduced (2) or told of (3) that share of that collective?"""
        return any(
            stand[SHARES][0] == number and stand[SHARES][which] >> share & 1 for stand in state
        )

    def _word(self, state: tuple[Stand, ...], word: str) -> int:
        """What ranks wait on. Of pieces, which follow one another, the last collective counts."""
        if word == TICKS:
            return sum(self.counts[rank][stand[AT]] for rank, stand in enumerate(state))
        number = max(stand[SHARES][0] for stand in state)
        which = 3 if self.variant.counts_what_is_done else 1
        shares = [self._is_in(state, which, each, number) for each in range(self.world)]
        return number * 8 + sum(shares)

    def _is_reached(self, state: tuple[Stand, ...], word: str, goal: int) -> bool:
        if word == TICKS:
            return self._word(state, TICKS) >= goal * self.world
        return self._word(state, PIECES) >= goal * 8 + self.world

    def _has_come(self, state: tuple[Stand, ...], peer: int, word: str, goal: int) -> bool:
        at = state[peer][AT]
        if word == TICKS:
            return self.clocks[peer][at] >= goal
        return self.begun[peer][at] < goal or self.reduced[peer][at] >= goal

    def _move_in_wait(
        self, state: tuple[Stand, ...], rank: int, word: str, goal: int
    ) -> tuple[Stand, ...] | None:
        at, phase, seen, gone, _, _ = state[rank]

        def the_gone() -> int:
            return self._mask(state, lambda peer: state[peer][LIFE] >= DEAD)

        def the_missing() -> int:
            return self._mask(state, lambda peer: not self._has_come(state, peer, word, goal))

        def the_aborters() -> int:
            hears = self.variant.hears_of_aborts
            return self._mask(state, lambda peer: hears and state[peer][LIFE] == ABORTED)

        if phase == LOAD:
            if self._is_reached(state, word, goal):
                return _with(state, rank, (at + 1, LOAD, 0, 0, ALIVE))
            following = LOOK if self.variant.looks_for_the_gone else ADD
            after = (at, following, self._word(state, word), 0, ALIVE)
        elif phase == LOOK:
            first = the_gone if self.variant.looks_for_the_gone_first else the_missing
            after = (at, JUDGE, seen, first() | the_aborters() << self.world, ALIVE)
        elif phase == JUDGE:
            second = the_missing if self.variant.looks_for_the_gone_first else the_gone
            found = gone & second()
            gives_up = found or (gone >> self.world and the_missing())
            after = (at, AGAIN if gives_up else ADD, seen, found, ALIVE)
        elif phase == AGAIN:  # it may have come to the goal without who is gone
            if not self._is_reached(state, word, goal):
                for peer in range(self.world):
                    if gone >> peer & 1 and self._has_come(state, peer, word, goal):
                        raise ProtocolError(f"rank {rank} takes rank {peer} for lost: it had come")
                return self._give_up(state, rank)
            after = (at + 1, LOAD, 0, 0, ALIVE)
        elif phase == ADD:
            after = (at, SLEEP, seen, 0, ALIVE)
        elif phase == SLEEP:  # the kernel compares and goes to sleep in one step
            sleeps = self._word(state, word) == seen or not self.variant.sleeps_only_on_seen
            after = (at, ASLEEP if sleeps else SUBTRACT, seen, 0, ALIVE)
        elif phase == ASLEEP:
            # It also wakes after a while by itself. That has to matter only if a rank is gone: one
            # that it needs, one that died between its count and the ring, or one that has aborted.
            sees_an_end = the_gone() & the_missing() or (the_aborters() and the_missing())
            if not sees_an_end and not (the_gone() and self._is_reached(state, word, goal)):
                return None
            after = (at, SUBTRACT, seen, 0, ALIVE)
        else:
            after = (at, LOAD, 0, 0, ALIVE)
        return _with(state, rank, after)

    def _give_up(self, state: tuple[Stand, ...], rank: int, life: int = LOST) -> tuple[Stand, ...]:
        state = self._wake(self._wake(state, TICKS), PIECES)
        return _with(state, rank, (*state[rank][:LIFE], life))

    def _mask(self, state: tuple[Stand, ...], is_in: Callable[[int], bool]) -> int:
        return sum(1 << peer for peer in range(self.world) if is_in(peer))

    def _waits_on(self, rank: int, stand: Stand) -> str | None:
        step = self.steps[rank][stand[AT]]
        return step[1] if step[0] == "await" else None

    def _has_sleepers(self, state: tuple[Stand, ...], word: str) -> bool:
        """Is the count of those who (are about to) sleep on the word not 0?"""
        return any(
            stand[PHASE] in (SLEEP, ASLEEP, SUBTRACT) and self._waits_on(rank, stand) == word
            for rank, stand in enumerate(state)
        )  # a dead one's too: it stays counted

    def _wake(self, state: tuple[Stand, ...], word: str) -> tuple[Stand, ...]:
        return tuple(
            (stand[AT], SUBTRACT, *stand[SEEN:])
            if stand[PHASE] == ASLEEP
            and stand[LIFE] == ALIVE
            and self._waits_on(rank, stand) == word
            else stand
            for rank, stand in enumerate(state)
        )

    def _trace(self, path: list) -> str:
        lines = []
        for (before, _), (after, _) in pairwise(path[-30:]):
            rank = next(r for r in range(self.world) if before[r] != after[r])
            phase = PHASES[before[rank][PHASE]]
            step = self.steps[rank][before[rank][0]]
            fate = ["", " ends", " dies", " leaves", " gives up", " aborts"][after[rank][LIFE]]
            lines.append(f"  rank {rank}: {step} {phase if step[0] == 'await' else ''}{fate}")
        return "\n".join(lines)


def _with(state: tuple[Stand, ...], rank: int, stand: tuple) -> tuple[Stand, ...]:
    """The state with another stand of ``rank``, which has the same shares if it tells none."""
    return (*state[:rank], (*stand, *state[rank][len(stand) :]), *state[rank + 1 :])


# ------------------------------------------------------------------------------- what is checked

SMALL = ("small", "small", "small")
SCENARIOS: dict[str, tuple[str, ...]] = {
    "small ones": (*SMALL, "small"),
    "small, then through slots, then small": ("small", "reduction of 2 chunks", "small"),
    "through slots twice": ("reduction of 2 chunks", "reduction of 1 chunk"),
    "many chunks": ("reduction of 3 chunks",),
    "exchanges": ("small", "exchange of 2 rounds", "small", "small"),
    "many rounds": ("exchange of 3 rounds", "exchange of 2 rounds"),
    "scatters": ("small scatter", "scatter of 2 rounds", "small", "small scatter"),
    "through slots, then scatter": ("reduction of 2 chunks", "small scatter", "small"),
    "scatter, then through slots": ("scatter of 2 rounds", "reduction of 2 chunks"),
    "not all with data": ("reduction, not all with data", "small scatter", "small"),
    "in place": ("reduction in place", "reduction in place"),
    "in place, then small": ("reduction in place", "small"),
    "in new memory": ("reduction in new memory", "reduction of 1 chunk"),
    "disagreement": ("mismatch", "small", "mismatch", "small scatter"),
    "disagreement, then through slots": ("mismatch", "reduction of 1 chunk"),
}


def main() -> int:
    total = 0
    began = time.monotonic()
    for world in (2, 3):
        for name, ops in SCENARIOS.items():
            for victim, leaves in ((None, False), (None, True), (0, True), (world - 1, True)):
                start = time.monotonic()
                count = Checker(world, ops, victim=victim, leaves=leaves).explore()
                total += count
                who = "all leave" if leaves else "all stay"
                who = who if victim is None else f"rank {victim} may die"
                took = time.monotonic() - start
                print(f"{world} ranks, {name}, {who}: {count} states, {took:.1f} s", flush=True)
            start = time.monotonic()
            count = Checker(world, ops, aborter=0, absent=world - 1).explore()
            total += count
            took = time.monotonic() - start
            who = f"rank 0 may abort, rank {world - 1} does not come to the last"
            print(f"{world} ranks, {name}, {who}: {count} states, {took:.1f} s", flush=True)
    print(f"{total} states, no error, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
