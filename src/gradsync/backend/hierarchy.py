"""Several places: shared memory inside each, one flow of gloo's between them.

A place is a machine, or one rank of a machine whose ranks cannot share memory. Its first rank is
its leader. A tensor goes in chunks: the ranks of a place reduce a chunk into the leader's, the
leaders reduce it over the network, and each leader gives it to its place, while the next chunk is
reduced and the one after it is on the way. What works in another way goes through gloo between all
ranks.

[Note: words first]
Before anything else the ranks of a place, and then the leaders, tell each other in words what they
are about to do: gloo does not compare, and mixes up messages or ends the process. It costs the
leaders one exchange of 128 bytes.

[Note: flows] in flows.py is why the leaders' flows have memory of their own, and never the user's.
"""

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    Store,
)

from gradsync.backend._native import ReduceOp, State
from gradsync.backend.board import GRACE_SECONDS, Board
from gradsync.backend.calls import describe
from gradsync.backend.engines import Engines
from gradsync.backend.flows import Clock, connect, is_late, lost
from gradsync.backend.lane import Call, Lane, Task
from gradsync.backend.members import Member, is_alive
from gradsync.backend.notices import Told, first_line
from gradsync.backend.places import check_memory, in_place
from gradsync.backend.shared_memory import SharedMemory, Started
from gradsync.errors import (
    AbortedError,
    CollectiveMismatchError,
    DeadlineError,
    FaultError,
    PeerLostError,
)

Pieces = tuple[list[int], list[int]]  # bytes to each rank, and from each
CHUNK_BYTES = 4 * 1024 * 1024
TEXT_BYTES = 128
GLOO_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.BAND: dist.ReduceOp.BAND,
    ReduceOp.BOR: dist.ReduceOp.BOR,
    ReduceOp.BXOR: dist.ReduceOp.BXOR,
}
WIDER = {torch.bfloat16: torch.float32, torch.int16: torch.int32}  # what gloo cannot reduce


class Hierarchy(Lane):
    """Collectives over the ranks of ``places``; all of them run in order on one thread.

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
        self._desks = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        leaders = PrefixStore("leaders/", store)
        self._engines = Engines(leaders, self._here, len(places), timeout)
        if self._is_leader:
            connect(self._engines, local)
        super().__init__("gradsync-hosts", memory, places[self._here])
        notices = PrefixStore("board/", store)
        self._board = Board(notices, self._here, self, is_leader=self._is_leader)

    # ---------------------------------------------------------------- collectives

    def all_reduce(self, tensor: Tensor, op: ReduceOp, seconds: float, *, later: bool) -> Started:
        """Reduce ``tensor`` in place over all ranks of all places."""
        flat, finish = in_place(tensor)
        check_memory(flat)
        work = flat
        if op is ReduceOp.AVG and flat.dtype is torch.float16:
            work = flat.float()  # the sum of a machine might be too large
        chunks = _chunks(work)
        run = partial(self._all_reduce, chunks, op)
        name = f"all_reduce({op.name.lower()}, {describe(tensor)})"

        def bring_back() -> None:
            if work is not flat:
                flat.copy_(work)
            if finish is not None:
                finish()

        return self._started(name, run, (tensor, work), seconds, later, bring_back)

    def _all_reduce(self, chunks: Sequence[Tensor], op: ReduceOp, clock: Clock) -> None:
        inside = ReduceOp.SUM if op is ReduceOp.AVG else op
        flows: list[tuple[dist.Work, Tensor]] = []
        for index in range(len(chunks) + 1):
            if index < len(chunks):
                chunk = chunks[index]
                self._reduce_here(chunk, inside, clock)
                if self._is_leader:
                    flows.append(self._reduce_between(chunk, index, op, clock))
            if index > 0:
                chunk = chunks[index - 1]
                if self._is_leader:
                    flow, copy = flows.pop(0)
                    self.await_flow(flow, clock, needs_neighbours=True)
                    if op is ReduceOp.AVG:
                        rounding = None if copy.is_floating_point() else "trunc"
                        copy.div_(self._world, rounding_mode=rounding)
                    chunk.copy_(copy)
                self._broadcast_here(chunk, 0, clock)

    def _reduce_between(
        self, chunk: Tensor, index: int, op: ReduceOp, clock: Clock
    ) -> tuple[dist.Work, Tensor]:
        copy = self._desk(index, chunk, WIDER.get(chunk.dtype, chunk.dtype)).copy_(chunk)
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(GLOO_OPS[op])
        options.timeout = clock.timeout
        return self._engines.gloo().allreduce([copy], options), copy

    def broadcast(self, tensor: Tensor, root: int, seconds: float, *, later: bool) -> Started:
        """Overwrite ``tensor`` on all ranks with that of rank ``root`` of the group."""
        flat, finish = in_place(tensor)
        check_memory(flat)
        chunks = _chunks(flat.view(-1).view(torch.uint8))
        source = next(
            index
            for index, place in enumerate(self._places)
            if any(member.rank == root for member in place)
        )
        at = [member.rank for member in self._places[source]].index(root)
        run = partial(self._broadcast, chunks, source, at)
        name = f"broadcast(root {root}, {describe(tensor)})"
        return self._started(name, run, (tensor, flat), seconds, later, finish)

    def _broadcast(self, chunks: Sequence[Tensor], source: int, at: int, clock: Clock) -> None:
        flows: list[tuple[dist.Work, Tensor]] = []
        is_source = self._here == source
        for index in range(len(chunks) + 1):
            if index < len(chunks):
                chunk = chunks[index]
                if is_source:
                    self._broadcast_here(chunk, at, clock)
                if self._is_leader:
                    flows.append(self._broadcast_between(chunk, index, source, clock))
            if index > 0:
                chunk = chunks[index - 1]
                if self._is_leader:
                    flow, copy = flows.pop(0)
                    # The source's neighbours have what they need, and may be gone.
                    self.await_flow(flow, clock, needs_neighbours=not is_source)
                    if not is_source:
                        chunk.copy_(copy)
                if not is_source:
                    self._broadcast_here(chunk, 0, clock)

    def _broadcast_between(
        self, chunk: Tensor, index: int, source: int, clock: Clock
    ) -> tuple[dist.Work, Tensor]:
        copy = self._desk(index, chunk, chunk.dtype)
        if self._here == source:
            copy.copy_(chunk)
        options = BroadcastOptions()
        options.rootRank = source
        options.timeout = clock.timeout
        return self._engines.gloo().broadcast([copy], options), copy

    def _reduce_here(self, chunk: Tensor, op: ReduceOp, clock: Clock) -> None:
        if self.memory.size > 1:
            self.memory.reduce(chunk, op, 0, clock.left, later=False).handle.wait()

    def _broadcast_here(self, chunk: Tensor, root: int, clock: Clock) -> None:
        if self.memory.size > 1:
            self.memory.broadcast(chunk, root, clock.left, later=False).handle.wait()

    def _desk(self, index: int, chunk: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of the leader's for a flow. Two are under way at a time, so there are two."""
        size = chunk.numel() * dtype.itemsize
        if self._desks[index % 2].numel() < size:
            self._desks[index % 2] = torch.empty(size, dtype=torch.uint8)
        return self._desks[index % 2][:size].view(dtype).view(chunk.shape)

    def barrier(self, seconds: float, *, later: bool) -> Started:
        """Wait until all ranks of all places have come here."""

        def leave_together(clock: Clock) -> None:  # all have come, when the leaders have agreed
            self.memory.barrier(clock.left, later=False).handle.wait()

        return self._started("barrier", leave_together, None, seconds, later)

    def collective(
        self,
        name: str,
        call: Call,
        engines: Engines,
        kept: object,
        seconds: float,
        *,
        later: bool,
        pieces: Pieces | None = None,
    ) -> Started:
        """Run ``call`` with gloo between all ranks. ``pieces`` are those of an all-to-all."""

        def run(clock: Clock) -> None:
            # Who passes this knows that the leaders agree, in its own place and so in all.
            self.memory.barrier(clock.left, later=False).handle.wait()
            if pieces is not None:
                self._compare(pieces, engines, clock)
            self.through_gloo(call, engines, clock)

        return self._started(f"{name} through gloo", run, kept, seconds, later)

    def _compare(self, pieces: Pieces, engines: Engines, clock: Clock) -> None:
        """See that every rank expects what the others send: all ranks draw the same conclusion."""
        own = torch.tensor([*pieces[0], *pieces[1]])
        rows = [torch.empty_like(own) for _ in range(self._world)]
        options = AllgatherOptions()
        options.timeout = clock.timeout
        self.through_gloo(lambda gloo: gloo.allgather([rows], [own], options), engines, clock)
        table = torch.stack(rows)  # 2D: what each sends to each, and expects from each
        differs = table[:, : self._world] != table[:, self._world :].t()
        if differs.any():
            source, target = differs.nonzero()[0].tolist()
            names = {each.rank: each.label for place in self._places for each in place}
            raise CollectiveMismatchError(
                f"collective {self._board.progress} is not the same on all ranks: "
                f"{names[source]} sends {table[source, target]} bytes to {names[target]}, which "
                f"expects {table[target, self._world + source]}."
            )

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
        words = f"{self._board.progress} {text}".encode()[: TEXT_BYTES - 1]
        own = torch.frombuffer(bytearray(words.ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)
        all_words = [torch.empty_like(own) for _ in self._places]
        options = AllgatherOptions()
        options.timeout = clock.timeout
        flow = self._engines.gloo().allgather([all_words], [own], options)
        self.await_flow(flow, clock, needs_neighbours=True)
        if not all(torch.equal(each, own) for each in all_words):
            told = "; ".join(
                f"{place[0].label}: {_said(each)}"
                for place, each in zip(self._places, all_words, strict=True)
            )
            raise CollectiveMismatchError(
                f"collective {self._board.progress} is not the same on all ranks: {told}."
            )

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
        self.broken = error = self._reason(task, error)
        self.give_up(error)
        if self.stop is None:
            self._board.post(error)
        return error

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
        members = {member.rank: member for member in self.neighbours}
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


def _chunks(tensor: Tensor) -> list[Tensor]:
    flat = tensor.reshape(-1)  # 1D
    return list(flat.split(max(1, CHUNK_BYTES // flat.element_size()))) if flat.numel() else [flat]


def _said(words: Tensor) -> str:
    """What another leader has sent, without the number in front."""
    text = bytes(words.tolist()).rstrip(b"\0").decode(errors="replace")
    return "".join(each for each in text if each.isprintable()).partition(" ")[2]
