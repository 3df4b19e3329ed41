"""What ranks do in shared memory, step by step: the programs that protocol.py checks.

Each collective is told as in collectives.cc, down to single accesses to what ranks share.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

TICKS, PIECES = "ticks", "pieces"  # the words that ranks wait on


@dataclass(frozen=True)
class Variant:
    """The protocol, or one with a mistake in it that the checker has to find."""

    in_slots: int = 2
    out_slots: int = 2
    announcements: int = 2
    awaits_rounds: bool = True  # of an exchange
    awaits_chunks: bool = True  # of a reduction through slots
    awaits_pieces: bool = True  # of a reduction in place
    takes_at_once: bool = True  # a share of it: looks and takes in one step
    tells_that_it_begins: bool = True
    counts_what_is_done: bool = True  # and not what is taken
    asks_again: bool = True  # whether all is done, when a rank has left
    all_take_a_turn: bool = True  # also where ranks disagree
    counts_before_clock: bool = True
    wakes: bool = True
    wakes_after_tick: bool = True
    sleeps_only_on_seen: bool = True
    looks_for_the_gone: bool = True
    looks_for_the_gone_first: bool = True  # and then at their clocks


RIGHT = Variant()


@dataclass
class Program:
    """The steps of one rank. A step is (what, ...); slots are named by kind and number."""

    rank: int
    world: int
    variant: Variant
    steps: list[tuple] = field(default_factory=list)
    clock: int = 0
    turn: int = 0
    sequence: int = 0

    # Each method is one in collectives.cc.

    def write(self, **tags: object) -> None:
        slots = {name.replace("_", ""): tag for name, tag in tags.items()}
        self.steps += [("begin", tuple(slots)), ("end", tuple(slots.items()))]

    def read(self, slot: str, tags: Callable[[int], object]) -> None:
        expected = tuple((peer, tags(peer)) for peer in range(self.world) if peer != self.rank)
        self.steps += [("check", slot, expected)] * 2  # as reading begins, and as it ends

    def tick(self) -> None:
        self.clock += 1
        steps = [("count", self.clock), ("clock",)]
        if not self.variant.counts_before_clock:
            steps.reverse()
        steps.insert(len(steps) if self.variant.wakes_after_tick else 0, ("ring", TICKS))
        self.steps += steps

    def wait(self) -> None:
        self.steps.append(("await", TICKS, self.clock))

    def post(self, kind: Callable[[int], str], slot: str | None = None) -> None:
        """Announce the next collective; kinds may differ, and are what each rank takes it for."""
        self.sequence += 1
        number = self.sequence
        place = f"announcement{number % self.variant.announcements}"
        tags: dict[str, object] = {place: (number, kind(self.rank))}
        if slot is not None:
            tags[slot] = (number, 0)
        self.write(**tags)
        self.tick()
        self.wait()
        self.read(place, lambda peer: (number, kind(peer)))

    def next_turn(self) -> int:
        self.turn += 1
        return self.turn - 1

    def in_slot(self, turn: int) -> str:
        return f"in{turn % self.variant.in_slots}"

    def out_slot(self, turn: int) -> str:
        return f"out{turn % self.variant.out_slots}"

    # Collectives.

    def small(self) -> None:
        slot = self.in_slot(self.next_turn())
        self.post(lambda _: "small", slot)
        number = self.sequence
        self.read(slot, lambda _: (number, 0))

    def exchange(self, rounds: int) -> None:
        self.next_turn()
        self.post(lambda _: "exchange")
        self._rounds(rounds)

    def all_to_all(self, rounds: int) -> None:
        """Tells the sizes of its pieces in the slot of the turn that it takes as it is posted."""
        slot = self.in_slot(self.next_turn())
        self.post(lambda _: "all_to_all", slot)
        number = self.sequence
        self.read(slot, lambda _: (number, 0))
        self._rounds(rounds)

    def _rounds(self, rounds: int) -> None:
        number = self.sequence
        for each in range(1, rounds + 1):
            slot = self.in_slot(self.next_turn())
            self.write(**{slot: (number, each)})
            self.tick()
            if self.variant.awaits_rounds:
                self.wait()
            self.read(slot, lambda _, each=each: (number, each))

    def through_slots(self, chunks: int) -> None:
        self.next_turn()
        self.post(lambda _: "through slots")
        number = self.sequence
        for chunk in range(1, chunks + 2):
            turn = self.next_turn()
            if chunk <= chunks:
                self.write(**{self.in_slot(turn): (number, chunk)})
            self.tick()
            if self.variant.awaits_chunks:
                self.wait()
            if chunk > 1:
                self.read(self.out_slot(turn - 1), lambda _, of=chunk - 1: (number, of))
            if chunk <= chunks:
                self.read(self.in_slot(turn), lambda _, of=chunk: (number, of))
                self.write(**{self.out_slot(turn): (number, chunk)})

    def in_place(self, *, new: bool = False) -> None:
        """The caller fills its memory, ranks reduce their shares of all memories, it reads."""
        self.write(memory=self.sequence + 1)
        self.next_turn()
        self.post(lambda _: "in place")
        number = self.sequence
        if new:  # memory that was never seen: all tell whether they could map it
            self._rounds(1)
        shares = [(self.rank + i) % self.world for i in range(self.world)]  # its own share first
        at = len(self.steps)
        self.steps += [(), (), ("begun", number if self.variant.tells_that_it_begins else 0)]
        for share in shares:
            self._reduce_share(share)
        self.steps += [("tell", number), ("reduced", number), ("ring", PIECES)]
        if self.variant.awaits_pieces:
            self.steps.append(("await", PIECES, number))
        end = len(self.steps)  # where it goes on if all is done already
        self.steps[at : at + 2] = ("done?", number, end - at), ("present?", number, end - at - 1)
        self.steps.append(("all done", number))

    def _reduce_share(self, share: int) -> None:
        """Unless another has taken it. A share is one piece here."""
        number = self.sequence
        if not self.variant.takes_at_once:
            self.steps.append(("look", share, number, 5))
        self.steps.append(("take", share, number, 4))
        self.read("memory", lambda _: number)  # and writes it: nobody else may touch it meanwhile
        self.steps.append(("done", share, number))

    def mismatch(self, other: int) -> None:
        """Rank ``other`` asks for something large, the others for something small: all throw."""
        is_other = self.rank == other
        slot = None
        if not is_other or self.variant.all_take_a_turn:
            slot = self.in_slot(self.next_turn())
        self.post(lambda rank: "large" if rank == other else "small", None if is_other else slot)


OPS: dict[str, Callable[[Program], None]] = {
    "small": Program.small,
    "exchange": lambda program: program.exchange(1),
    "exchange of 2 rounds": lambda program: program.exchange(2),
    "all to all": lambda program: program.all_to_all(1),
    "reduction of 1 chunk": lambda program: program.through_slots(1),
    "reduction of 2 chunks": lambda program: program.through_slots(2),
    "reduction of 3 chunks": lambda program: program.through_slots(3),
    "reduction in place": Program.in_place,
    "reduction in new memory": lambda program: program.in_place(new=True),
    "mismatch": lambda program: program.mismatch(0),
}
