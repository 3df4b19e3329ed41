"""What ranks do in shared memory, step by step: the programs that protocol.py checks.

Each collective is told as in collectives.cc, down to single accesses to what ranks share.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

TICKS, PIECES = "ticks", "pieces"  # the words that ranks wait on

Place = tuple[int, str]  # whose, and what: an announcement, the memory, a part of a slot


@dataclass(frozen=True)
class Variant:
    """The protocol, or one with a mistake in it that the checker has to find."""

    slots: int = 2
    announcements: int = 2
    awaits_rounds: bool = True  # of an exchange
    awaits_chunks: bool = True  # of a reduction through slots
    ends_with_the_last_chunk: bool = True  # and takes no turn after it
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
    hears_of_aborts: bool = True  # also of a rank that has come itself


RIGHT = Variant()


@dataclass
class Program:
    """The steps of one rank. A step is (what, ...)."""

    rank: int
    world: int
    variant: Variant
    steps: list[tuple] = field(default_factory=list)
    clock: int = 0
    turn: int = 0
    sequence: int = 0

    # Each method is one in collectives.cc.

    def write(self, places: dict[Place, object]) -> None:
        """Places of its own or of others', with a tag each."""
        self.steps += [("begin", tuple(places)), ("end", tuple(places.items()))]

    def read(self, places: dict[Place, object]) -> None:
        self.steps += [("check", tuple(places.items()))] * 2  # as reading begins, and as it ends

    def tick(self) -> None:
        self.clock += 1
        steps = [("count", self.clock), ("clock",)]
        if not self.variant.counts_before_clock:
            steps.reverse()
        steps.insert(len(steps) if self.variant.wakes_after_tick else 0, ("ring", TICKS))
        self.steps += steps

    def wait(self) -> None:
        self.steps.append(("await", TICKS, self.clock))

    def post(self, kind: Callable[[int], str], data: dict[Place, object] | None = None) -> None:
        """Announce the next collective; kinds may differ, and are what each rank takes it for."""
        number = self.sequence
        name = f"announcement{number % self.variant.announcements}"
        self.write({(self.rank, name): (number, kind(self.rank)), **(data or {})})
        self.tick()
        self.wait()
        self.read({(peer, name): (number, kind(peer)) for peer in self.others()})

    def next_collective(self) -> tuple[int, int]:
        """Its number, and its first turn."""
        self.sequence += 1
        return self.sequence, self.next_turn()

    def next_turn(self) -> int:
        self.turn += 1
        return self.turn - 1

    def others(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]

    def part(self, owner: int, turn: int, part: int) -> Place:
        """Of a slot: what its owner gives to rank ``part``, or gets from it."""
        return owner, f"slot{turn % self.variant.slots}.{part}"

    def slot(self, owner: int, turn: int, tag: object) -> dict[Place, object]:
        return {self.part(owner, turn, part): tag for part in range(self.world)}

    # Collectives. A tag is the number of one, its round or chunk, and whether it is reduced.

    def exchange(self, rounds: int) -> None:
        """Everybody gives: all kinds but scatter and large all-reduces."""
        number, turn = self.next_collective()
        for each in range(rounds):
            self._round(each, self.slot(self.rank, turn, (number, each, 0)))
            self.read(
                {self.part(peer, turn, self.rank): (number, each, 0) for peer in self.others()}
            )
            turn = self.next_turn() if each + 1 < rounds else turn

    def scatter(self, rounds: int) -> None:
        """Rank 0 alone gives, into the slots of the others."""
        number, turn = self.next_collective()
        for each in range(rounds):
            given = [self.slot(peer, turn, (number, each, 0)) for peer in self.others()]
            data = {place: tag for slot in given for place, tag in slot.items()}
            self._round(each, {} if self.rank else data)
            if self.rank:
                self.read({self.part(self.rank, turn, self.rank): (number, each, 0)})
            turn = self.next_turn() if each + 1 < rounds else turn

    def _round(self, each: int, data: dict[Place, object]) -> None:
        """The first travels with the announcement."""
        if each == 0:
            self.post(lambda _: "exchange", data)
            return
        if data:
            self.write(data)
        self.tick()
        if self.variant.awaits_rounds:
            self.wait()

    def through_slots(self, chunks: int, *, late: bool = False) -> None:
        """``late``: rank 0 has symmetric memory, and all give the first chunk after the post."""
        number, turn = self.next_collective()
        if late:
            first = self.slot(self.rank, turn, (number, 0, 0)) if self.rank else {}
            self.post(lambda _: "through slots", first)
            turn = self.next_turn()
            self.write(self.slot(self.rank, turn, (number, 0, 0)))
            self.tick()
            self.wait()
        else:
            self.post(lambda _: "through slots", self.slot(self.rank, turn, (number, 0, 0)))
        for chunk in range(chunks):
            mine = [self.part(peer, turn, self.rank) for peer in self.others()]
            self.steps.append(("check", tuple((place, (number, chunk, 0)) for place in mine)))
            self.write(dict.fromkeys(mine, (number, chunk, 1)))  # where it has read
            self.steps.append(("check", tuple((place, (number, chunk, 1)) for place in mine)))
            if chunk > 0:
                self._take(turn + 1, (number, chunk - 1, 1))
            if chunk + 1 < chunks:
                self.write(self.slot(self.rank, turn + 1, (number, chunk + 1, 0)))
            self.tick()
            if self.variant.awaits_chunks:
                self.wait()
            if chunk + 1 < chunks:
                turn = self.next_turn()
        if not self.variant.ends_with_the_last_chunk:
            self.next_turn()
        self._take(turn, (number, chunks - 1, 1))

    def _take(self, turn: int, tag: object) -> None:
        """What the others have reduced, out of its own slot."""
        self.read({self.part(self.rank, turn, peer): tag for peer in self.others()})

    def in_place(self, *, new: bool = False) -> None:
        """The caller fills its memory, ranks reduce their shares of all memories, it reads."""
        self.write({(self.rank, "memory"): self.sequence + 1})
        number, _ = self.next_collective()
        self.post(lambda _: "in place")
        if new:  # memory that was never seen: all tell whether they could map it
            turn = self.next_turn()
            self._round(1, self.slot(self.rank, turn, (number, 1, 0)))
            self.read({self.part(peer, turn, self.rank): (number, 1, 0) for peer in self.others()})
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
        self.read({(peer, "memory"): number for peer in self.others()})  # and writes it
        self.steps.append(("done", share, number))

    def mismatch(self, other: int) -> None:
        """Rank ``other`` asks for a scatter, the rest for something else: all throw."""
        is_other = self.rank == other
        self.sequence += 1
        turn = self.turn
        if not is_other or self.variant.all_take_a_turn:
            turn = self.next_turn()
        tag = (self.sequence, 0, 0)
        given = [
            self.slot(rank, turn, tag) for rank in (self.others() if is_other else [self.rank])
        ]
        self.post(
            lambda rank: "scatter" if rank == other else "small",
            {place: tag for slot in given for place in slot},
        )


OPS: dict[str, Callable[[Program], None]] = {
    "small": lambda program: program.exchange(1),
    "exchange of 2 rounds": lambda program: program.exchange(2),
    "exchange of 3 rounds": lambda program: program.exchange(3),
    "small scatter": lambda program: program.scatter(1),
    "scatter of 2 rounds": lambda program: program.scatter(2),
    "reduction of 1 chunk": lambda program: program.through_slots(1),
    "reduction of 2 chunks": lambda program: program.through_slots(2),
    "reduction of 3 chunks": lambda program: program.through_slots(3),
    "reduction, not all with data": lambda program: program.through_slots(2, late=True),
    "reduction in place": Program.in_place,
    "reduction in new memory": lambda program: program.in_place(new=True),
    "mismatch": lambda program: program.mismatch(0),
}
