"""The step's phase machine: gradients become ready, buckets launch in order, all is finalized.

One step as it runs: ``start_forward`` → the user's forward → ``prepare`` → backward: a hook a
parameter calls ``mark_ready`` → a full bucket is packed and launched, strictly in bucket order
→ end of backward: ``finalize`` launches what is left, waits, and writes the gradients back.

[Note: no graph walk] Which parameters a backward will reach is not looked for. What has not
fired when the backward ends was not used on this rank. Its buckets launch then, in order, on
every rank alike, and the trailer of the last one tells what was used elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from gradsync.ddp import messages
from gradsync.ddp.autograd import EndOfBackward, GradientWatch, watch_outputs
from gradsync.ddp.bucket import Bucket, Slot, SparseBucket
from gradsync.ddp.collectives import Work, all_gather, all_reduce, broadcast, is_foreign, wait
from gradsync.ddp.plan import BucketCaps, Item, Plan, initial_plan, make_plan
from gradsync.ddp.trailer import (
    Incident,
    Statement,
    has_incident,
    trailer_size,
    usage,
    usage_counts,
    write_trailer,
)
from gradsync.errors import GraphChangedError, PeerStepError, ReadyTwiceError, StateError


class Phase(Enum):
    """Where a step stands.

    IDLE → ARMED by ``prepare``; IDLE or ARMED → BACKWARD when a backward reaches the module's
    outputs, ARMED → BACKWARD also by the first gradient; BACKWARD → FINALIZE → IDLE when that
    backward ends; BACKWARD → ABANDONED when it raises, and → IDLE once its collectives are in.
    """

    IDLE = auto()  # gradients stay local: nothing asked for a reduction
    ARMED = auto()  # a synchronising forward has run
    BACKWARD = auto()  # gradients arrive, buckets launch
    FINALIZE = auto()  # all gradients are there
    ABANDONED = auto()  # the backward raised; collectives may still be under way


@dataclass(frozen=True)
class ReducerOptions:
    """What the constructor of DDP asked for, as far as the reducer is concerned."""

    caps: Callable[[bool], BucketCaps]  # given whether buckets will be rebuilt
    find_unused: bool = False
    as_views: bool = False
    skip_unused: bool = False


class Reducer:
    """Averages the gradients of ``parameters`` over the ranks of ``group``."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        sparse: Sequence[bool],
        group: dist.ProcessGroup,
        options: ReducerOptions,
        *,
        static_graph: bool = False,
    ) -> None:
        self.slots = [
            Slot(index, name, param, sparse=is_sparse)
            for index, ((name, param), is_sparse) in enumerate(zip(parameters, sparse, strict=True))
        ]
        self.options = options
        self.static_graph = static_graph
        self.phase = Phase.IDLE
        self.step = 0  # reductions begun
        self.buckets_reduced = 0  # in the last step
        self.has_rebuilt = False
        self.graph_is_static = True  # so far the same parameters were used in every step
        self.last_error: str | None = None
        self.arrivals: list[Slot] = []  # of this step, in the order of their gradients
        self._next = 0  # the next bucket to launch
        self._order: list[int] | None = None  # of the first step's gradients
        self._unused_before: tuple[int, ...] | None = None
        self._used_anywhere: list[bool] | None = None  # under a static graph, after its first step
        self._stale: list[tuple[Slot, Tensor]] = []
        self._frozen: list[Slot] = []
        self._unused: list[Slot] = []
        self._incidents = Incident(0)
        self._forwards = 0  # since the last reduction
        self._forward_failed = False
        self._outputs_seen = False
        self._deferred: Exception | None = None
        self._roll: tuple[list[Tensor], Work] | None = None  # a roll call under way
        self.set_group(group)
        self._install(initial_plan(self._items(), self.caps.initial))
        self._watches = [GradientWatch(slot.param, self._hook(slot)) for slot in self.slots]

    # ---------------------------------------------------------------- construction

    @property
    def caps(self) -> BucketCaps:
        return self.options.caps(self._will_rebuild)

    @property
    def _will_rebuild(self) -> bool:
        return self.static_graph or not self.options.find_unused

    @property
    def _learning(self) -> bool:
        """Is this the first step of a static graph, in which its shape is recorded?"""
        return self.static_graph and self._used_anywhere is None

    def set_group(self, group: dist.ProcessGroup) -> None:
        """Reduce over ``group`` from now on; what was learned of the order is forgotten."""
        self.group = group
        self.world = group.size()
        self.rank = group.rank()
        self._scale = 1.0 / self.world
        self._alone = self.world == 1 and not is_foreign(group)

    def reset(self) -> None:
        """Start anew, as after construction: the step under way, if any, is forgotten."""
        self.phase = Phase.IDLE
        self.has_rebuilt = False
        self._order = None
        self._deferred = None
        self._used_anywhere = None
        for slot in self.slots:
            slot.due = 1
        self._install(initial_plan(self._items(), self.caps.initial))

    def set_static_graph(self) -> None:
        if self.step > 0:
            raise self.failed(StateError(messages.STATIC_GRAPH_TOO_LATE))
        self.static_graph = True
        self._install(initial_plan(self._items(), self.caps.initial))

    def remove_hooks(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches = []

    def _items(self) -> list[Item]:
        return [
            Item(
                slot.param.numel() * slot.param.element_size(),
                (slot.param.dtype, slot.param.device),
                alone=slot.sparse,
            )
            for slot in self.slots
        ]

    def _install(self, plan: Plan) -> None:
        """Make the buckets of ``plan``; the last one has the trailer."""
        dense, sparse = [], []
        for indices in plan:
            slots = [self.slots[index] for index in indices]
            if slots[0].sparse:
                sparse.append((len(dense), slots))
            else:
                dense.append(slots)
        extra = trailer_size(len(self.slots), with_usage=self._learning or self.options.find_unused)
        if not dense:
            dense.append([])
        self.buckets: list[Bucket] = []
        for position, slots in enumerate(dense):
            last = position == len(dense) - 1
            # A sparse bucket behind the last dense one goes before it: see [Note: the trailer].
            self.buckets.extend(
                SparseBucket(each)
                for at, (each,) in sparse
                if at == position or (last and at > position)
            )
            like = slots[0].param if slots else self.slots[0].param
            self.buckets.append(Bucket(slots, like, extra=extra if last else 0))
        for index, bucket in enumerate(self.buckets):
            bucket.index = index
        self._arm_buckets()

    def _arm_buckets(self) -> None:
        self._next = 0
        for slot in self.arrivals:
            slot.fires = 0
        self.arrivals = []
        for bucket in self.buckets:
            bucket.arm()

    # ---------------------------------------------------------------- forward

    def start_forward(self) -> None:
        """Before a forward whose gradients will be reduced."""
        if self.phase is Phase.BACKWARD:
            raise self.failed(StateError(messages.FORWARD_IN_BACKWARD))
        self._settle()
        if self._deferred is not None:
            error, self._deferred = self._deferred, None
            raise self.failed(error)
        if self._order is not None:
            self.rebuild()
        if self._frozen:
            self._thaw()
        self._forwards += 1

    def forward_failed(self) -> None:
        """A synchronising forward raised: if only here, the ranks are out of step now."""
        self._forward_failed = True

    def prepare(self, outputs: object) -> None:
        """After a forward whose gradients will be reduced: the next backward is ours."""
        self._outputs_seen = watch_outputs(outputs, self._on_outputs)
        self.phase = Phase.ARMED

    def disarm(self) -> None:
        """After a forward whose gradients stay local: only a backward through the outputs of
        an earlier forward is reduced."""
        if self.phase is Phase.ARMED and self._outputs_seen:
            self.phase = Phase.IDLE

    def rebuild(self) -> bool:
        """Replan in the order of rank 0's first backward; does nothing if that is not due."""
        if self._order is None:
            return False
        order = self._order
        self._order = None
        if not self._alone:
            shared = torch.tensor(order, dtype=torch.int64, device=self.slots[0].param.device)
            work = broadcast(self.group, shared, 0)
            wait(work, self.group, lambda: "the broadcast of rank 0's order of gradients")
            order = shared.tolist()
        self._install(make_plan(self._items(), order, self.caps.rebuilt))
        self.has_rebuilt = True
        return True

    def _thaw(self) -> None:
        for slot in self._frozen:
            if slot.param.requires_grad:
                slot.due = 1
        self._frozen = [slot for slot in self._frozen if not slot.due]
        self._arm_buckets()

    # ---------------------------------------------------------------- backward

    def _hook(self, slot: Slot) -> Callable[[object, object], None]:
        reducer, backward = self, Phase.BACKWARD

        def mark_ready(_inputs: object, _outputs: object) -> None:
            if reducer.phase is not backward and not reducer._begin_by(slot):
                return
            reducer.arrivals.append(slot)
            slot.fires = fires = slot.fires + 1
            if fires != slot.due:
                reducer._fired_otherwise(slot)
                return
            bucket = slot.bucket
            bucket.pending -= 1
            if not bucket.pending and bucket.index == reducer._next:
                reducer._launch_full()

        return mark_ready

    def _on_outputs(self, _gradients: object) -> None:
        if self.phase is Phase.ABANDONED:
            self._settle()
        if self.phase is Phase.IDLE or self.phase is Phase.ARMED:
            self._begin()

    def _begin_by(self, slot: Slot) -> bool:
        """A gradient came outside a reduction: does it begin one?"""
        if self.phase is not Phase.ARMED:
            slot.used_unsynced = True
            return False
        self._begin()
        return True

    def _begin(self) -> None:
        self.phase = Phase.BACKWARD
        self.step += 1
        EndOfBackward.schedule(self.finalize, self._abandon)

    def _fired_otherwise(self, slot: Slot) -> None:
        """A slot fired, and not for the time that makes it ready."""
        if self._learning or 0 < slot.fires < slot.due:
            return
        if self.static_graph:
            self._deferred = self._graph_changed()
            raise self.failed(GraphChangedError(messages.newly_used(self.rank, slot)))
        raise self.failed(ReadyTwiceError(messages.ready_twice(self.rank, slot)))

    def _launch_full(self) -> None:
        if self._learning:
            return  # a parameter may fire again
        buckets = self.buckets
        while self._next < len(buckets) and not buckets[self._next].pending:
            self._launch(buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        """Pack and reduce the next bucket."""
        self._next += 1
        as_views = self.options.as_views
        if self._alone:
            if as_views:
                bucket.pack(1.0, as_views=True)
            return
        if torch.is_grad_enabled():  # under create_graph=True
            with torch.no_grad():
                bucket.pack(self._scale, as_views=as_views)
        else:
            bucket.pack(self._scale, as_views=as_views)
        if bucket.extra:
            self._write_trailer(bucket)
        bucket.work = all_reduce(self.group, bucket.payload)

    def _write_trailer(self, bucket: Bucket) -> None:
        if self._forward_failed:
            self._incidents |= Incident.FORWARD_FAILED
        used = self._used_here() if bucket.extra > 1 else None
        write_trailer(bucket.tail, incident=bool(self._incidents), used=used)

    def _used_here(self) -> list[bool]:
        """For each parameter, whether this rank has a gradient that is not reduced yet."""
        used = [slot.fires > 0 or slot.used_unsynced for slot in self.slots]
        for bucket in self.buckets:
            for slot in bucket.missing:
                used[slot.index] = False
        return used

    def _abandon(self) -> None:
        """The backward raised. Peers wait for our buckets: send zeros, and say so."""
        self.phase = Phase.ABANDONED
        if self._alone:
            return
        self._incidents |= Incident.ABANDONED
        try:
            with torch.no_grad():
                for bucket in self.buckets[self._next :]:
                    bucket.zero()
                    if bucket.extra:
                        self._write_trailer(bucket)
                    bucket.work = all_reduce(self.group, bucket.payload)
                self._next = len(self.buckets)
                self._call_roll()
        except RuntimeError as error:  # nobody to raise it to: we are in the engine's clean-up
            self._deferred = error

    # ---------------------------------------------------------------- end of backward

    def finalize(self) -> None:
        """All gradients of this backward are there: reduce what is left and write back."""
        self.phase = Phase.FINALIZE
        try:
            if self.arrivals or self.options.find_unused or self.static_graph:
                with torch.no_grad():
                    self._finish_step()
        finally:
            self._end_step()

    def _finish_step(self) -> None:
        if self._next < len(self.buckets):
            self._look_for_unused()
            self._launch_rest()
        self._watch_usage()
        launched = [bucket for bucket in self.buckets if bucket.work is not None]
        for bucket in launched:
            wait(bucket.work, self.group, partial(self._describe, bucket))
            bucket.unpack()
        self.buckets_reduced = len(launched)
        statements = None
        if self._alone:
            if self._incidents:
                statements = [self._statement()]
        elif has_incident(self.buckets[-1].tail):
            statements = self._roll_call()
        self._settle_unused(statements)
        if statements is not None:
            self._judge(statements)
        if self._learning:
            self._learn()
        elif self._will_rebuild and not self.has_rebuilt:
            self._order = self._observed_order()

    def _look_for_unused(self) -> None:
        """Sort out the slots that this backward has not reached."""
        for slot in self.slots:
            if slot.fires >= slot.due and slot.fires:
                continue
            if not slot.param.requires_grad:
                if slot.due and not self.static_graph:
                    slot.due = 0
                    self._frozen.append(slot)
            elif slot.fires < slot.due and not slot.used_unsynced:
                self._unused.append(slot)
            if slot.param.grad is not None and not slot.used_unsynced and not slot.fires:
                self._stale.append((slot, slot.param.grad.detach().clone()))
        if self._unused and not self.options.find_unused and not self._learning:
            self._incidents |= Incident.UNUSED

    def _watch_usage(self) -> None:
        unused = tuple(slot.index for slot in self._unused)
        if self._unused_before is not None and unused != self._unused_before:
            self.graph_is_static = False
        self._unused_before = unused

    def _launch_rest(self) -> None:
        for bucket in self.buckets[self._next :]:
            if self.options.skip_unused and bucket.slots and not bucket.extra:
                if not any(slot.fires or slot.used_unsynced for slot in bucket.slots):
                    self._next += 1
                    continue
            self._launch(bucket)

    def _settle_unused(self, statements: list[Statement] | None) -> None:
        """Gradients that this rank had not: those used elsewhere are set, the others kept."""
        missing = [slot for bucket in self.buckets for slot in bucket.missing]
        if not missing and not self._stale:
            return
        used = self._usage(statements)
        for slot in missing:
            if used[slot.index]:
                slot.bucket.give(slot, as_view=self.options.as_views)
        for slot, saved in self._stale:
            if not used[slot.index] and slot.param.grad is not None:
                slot.param.grad.copy_(saved)

    def _usage(self, statements: list[Statement] | None) -> list[bool]:
        """For each parameter, whether any rank used it in this step."""
        if self._alone:
            return self._used_here()
        if self.buckets[-1].extra > 1:
            return usage(self.buckets[-1].tail)
        if statements is not None:
            return [any(flags) for flags in zip(*(s.used for s in statements), strict=True)]
        if self._used_anywhere is not None:
            return self._used_anywhere
        return [False] * len(self.slots)  # frozen ones are missing everywhere

    def _judge(self, statements: list[Statement]) -> None:
        """Somebody has something to report: raise what all ranks raise."""
        gone = [r for r, s in enumerate(statements) if s.incidents & Incident.ABANDONED]
        if gone:
            raise self.failed(PeerStepError(messages.abandoned(self.rank, self.step, gone)))
        failed = [r for r, s in enumerate(statements) if s.incidents & Incident.FORWARD_FAILED]
        if failed and len({s.forwards for s in statements}) > 1:
            raise self.failed(PeerStepError(messages.out_of_step(self.rank, self.step, failed)))
        if any(s.incidents & Incident.UNUSED for s in statements):
            self._deferred = (
                self._graph_changed() if self.static_graph else self._unused_error(statements)
            )

    def _unused_error(self, statements: list[Statement]) -> Exception:
        unused = {
            slot: [rank for rank, said in enumerate(statements) if not said.used[slot.index]]
            for slot in self.slots
            if slot.param.requires_grad and not all(s.used[slot.index] for s in statements)
        }
        return messages.unused_parameters(self.rank, self.step, unused)

    def _graph_changed(self) -> Exception:
        return messages.graph_changed(
            self.rank, [slot for slot in self.slots if slot.fires < slot.due]
        )

    def _learn(self) -> None:
        """The first step of a static graph is over: its shape holds for all further ones."""
        self._used_anywhere = self._usage(None)
        self._order = self._observed_order()
        for slot in self.slots:
            slot.due = slot.fires

    def _observed_order(self) -> list[int]:
        """In the order in which gradients became complete; those that never did come last."""
        last = {slot.index: at for at, slot in enumerate(self.arrivals)}
        return sorted(range(len(self.slots)), key=lambda i: last.get(i, len(self.arrivals)))

    def _end_step(self) -> None:
        for slot in self.slots:
            slot.used_unsynced = False
        self._unused = []
        self._stale = []
        self._roll = None
        self._incidents = Incident(0)
        self._forward_failed = False
        self._forwards = 0
        self.phase = Phase.IDLE
        self._arm_buckets()

    def _settle(self) -> None:
        """Wait for what an abandoned backward has left under way."""
        if self.phase is not Phase.ABANDONED:
            return
        try:
            for bucket in self.buckets:
                if bucket.work is not None:
                    wait(bucket.work, self.group, partial(self._describe, bucket))
            if self._roll is not None:
                wait(self._roll[1], self.group, lambda: f"the roll call of step {self.step}")
        finally:
            self._end_step()

    # ---------------------------------------------------------------- what ranks say

    def _statement(self) -> Statement:
        return Statement(self._incidents, self._forwards, self._used_here())

    def _call_roll(self) -> None:
        self._roll = all_gather(self.group, self._statement().encode(self.slots[0].param.device))

    def _roll_call(self) -> list[Statement]:
        self._call_roll()
        assert self._roll is not None
        answers, work = self._roll
        wait(work, self.group, lambda: f"step {self.step}: the roll call after an incident")
        return [Statement.decode(answer) for answer in answers]

    def _describe(self, bucket: Bucket) -> str:
        names = [slot.name for slot in bucket.slots] or ["nothing but the trailer"]
        span = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return (
            f"step {self.step}: the reduction of bucket {bucket.index} of {len(self.buckets)} "
            f"({span})"
        )

    def failed(self, error: Exception) -> Exception:
        """Remember ``error`` for the logging data, and hand it back to be raised."""
        self.last_error = f"{type(error).__name__}: {error}"
        return error

    def usage_counts(self) -> Tensor:
        """How many ranks used each parameter in the last step, where that is looked for."""
        if self.buckets[-1].extra > 1 and not self._alone:
            return usage_counts(self.buckets[-1].tail)
        return torch.zeros(len(self.slots), dtype=torch.int32)

    def check_finalized(self) -> None:
        """Raise if the last backward is not reduced."""
        if self._deferred is not None:
            raise self.failed(self._deferred)
        if self.phase in (Phase.BACKWARD, Phase.ABANDONED):
            raise self.failed(StateError(messages.NOT_FINALIZED))
