"""The step's phase machine: gradients become ready, buckets launch in order, all is finalized.

One step as it runs: ``start_forward`` → the user's forward → ``prepare`` → backward: a hook a
parameter calls ``mark_ready`` → a full bucket is packed and launched, strictly in bucket order
→ end of backward: ``finalize`` launches what is left, waits, and writes the gradients back.

[Note: no graph walk] Which parameters a backward will reach is not looked for. What has not
fired when the backward ends was not used on this rank. Its buckets launch then, in order, on
every rank alike, and the trailer of the last one tells what was used elsewhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.autograd.profiler import record_function
from torch.nn import Parameter

from gradsync.ddp import messages
from gradsync.ddp.autograd import (
    EndOfBackward,
    GradientWatch,
    accumulates,
    in_nested_backward,
    watch_outputs,
)
from gradsync.ddp.bucket import Bucket, Packing, Slot
from gradsync.ddp.collectives import all_reduce, broadcast, is_foreign, wait
from gradsync.ddp.plan import MIB, BucketCaps, Item, Plan, initial_plan, make_plan
from gradsync.ddp.rollcall import (
    Incident,
    RollCall,
    Statement,
    has_incident,
    trailer_size,
    usage_counts,
    write_trailer,
)
from gradsync.ddp.route import Router
from gradsync.ddp.special_buckets import SoloBucket, SparseBucket, make_buckets
from gradsync.ddp.usage import Unreached, find_unreached, settle_unused, used_here
from gradsync.ddp.verdicts import Verdicts
from gradsync.errors import (
    ArgumentError,
    GraphChangedError,
    ReadyTwiceError,
    StateError,
)


class Phase(Enum):
    """Where a step stands.

    IDLE → ARMED by ``prepare``; IDLE or ARMED → BACKWARD when a backward reaches the module's
    outputs, ARMED → BACKWARD also by the first gradient; BACKWARD → FINALIZE → IDLE when that
    backward ends, well or by an exception.

    [Note: hidden outputs] If the outputs are in an object that we do not look into, a step may
    begin with a gradient inside a nested backward, whose end is not that of the step. Then ARMED
    → NESTED, and → BACKWARD by the first gradient outside, or by the last one of all.
    """

    IDLE = auto()  # gradients stay local: nothing asked for a reduction
    ARMED = auto()  # a synchronising forward has run
    NESTED = auto()  # gradients arrive, buckets launch, and the step's end is not in sight
    BACKWARD = auto()  # gradients arrive, buckets launch
    FINALIZE = auto()  # all gradients are there


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
        self.packing = Packing(as_views=options.as_views)
        self.static_graph = static_graph
        self.phase = Phase.IDLE
        self.step = 0  # reductions begun
        self.buckets_reduced = 0  # in the last step
        self.has_rebuilt = False
        self.graph_is_static = True  # so far every step used the same parameters
        self.last_error: str | None = None
        self._device = self.slots[0].param.device
        # of this step
        self._arrivals: list[Slot] = []  # in the order of their gradients
        self._next = 0  # the next bucket to launch
        self._unreached = Unreached()
        self._incidents = Incident(0)
        self._unseen: list[SoloBucket] = []  # nothing is packed yet, see [Note: lending]
        # from step to step
        self._forwards = 0  # since the last reduction
        self._outputs_seen = False  # of the last forward that armed us
        self._order: list[int] | None = None  # of the first step's gradients, for the rebuild
        self._used_anywhere: list[bool] | None = None  # what a static graph uses, once known
        self._unused_before: list[Slot] | None = None
        self._frozen: list[Slot] = []
        self._rows: dict[Slot, Tensor] = {}  # of sparse gradients, where they are announced
        self._verdicts = Verdicts()
        self._router: Router | None = None
        self._set_group(group)
        self._install(initial_plan(self._items(), self.caps.initial))
        self._watches = [GradientWatch(slot.param, self._hook(slot)) for slot in self.slots]

    # ---------------------------------------------------------------- construction

    @property
    def caps(self) -> BucketCaps:
        """How large buckets may grow."""
        return self.options.caps(self._will_rebuild)

    @property
    def _will_rebuild(self) -> bool:
        return self.static_graph or not self.options.find_unused

    @property
    def _solo_bytes(self) -> float:
        """From which size on a gradient has a bucket for itself, and is not copied."""
        return max(self.caps.cap_bytes / 4, MIB)

    @property
    def _learning(self) -> bool:
        """Is this the first step of a static graph, in which its shape is recorded?"""
        return self.static_graph and self._used_anywhere is None

    @property
    def _tail(self) -> Tensor:
        return self.buckets[-1].tail

    def _set_group(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.world = group.size()
        self.rank = group.rank()
        self.packing.scale = 1.0 / self.world
        self._alone = self.world == 1 and not is_foreign(group)

    def reset(self, group: dist.ProcessGroup) -> None:
        """Start anew with ``group``: what was learned, and a step under way, are forgotten."""
        self._end_step()
        self._set_group(group)
        self.has_rebuilt = False
        self._order = None
        self._verdicts = Verdicts()
        self._used_anywhere = None
        self._router = None
        for slot in self.slots:
            slot.due = 1
        self._install(initial_plan(self._items(), self.caps.initial))

    def take_over(self, old: "Reducer") -> None:
        """Go on where ``old`` has been, with other parameters."""
        self.step, self._forwards = old.step, old._forwards
        self._incidents = old._incidents
        unsynced = {slot.param for slot in old.slots if slot.used_unsynced}
        for slot in self.slots:
            slot.used_unsynced = slot.param in unsynced
        old.remove_hooks()

    def set_static_graph(self) -> None:
        """Take the promise that all steps will be alike."""
        if self.step > 0:
            raise self.failed(StateError(messages.STATIC_GRAPH_TOO_LATE))
        self.static_graph = True
        self._install(initial_plan(self._items(), self.caps.initial))

    def expect_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Announce the rows of sparse gradients, by parameter; they hold until set anew."""
        by_name = {slot.name: slot for slot in self.slots if slot.sparse}
        for name in rows:
            if name not in by_name:
                raise self.failed(ArgumentError(messages.no_sparse_parameter(name, list(by_name))))
        self._rows = {by_name[name]: each for name, each in rows.items()}
        self._announce_rows()

    def _announce_rows(self) -> None:
        for bucket in self.buckets:
            if isinstance(bucket, SparseBucket) and bucket.slots[0] in self._rows:
                bucket.expect_rows(self._rows[bucket.slots[0]])

    def remove_hooks(self) -> None:
        """Let go of the parameters: no gradient is noticed from now on."""
        for watch in self._watches:
            watch.remove()
        self._watches = []

    def _items(self) -> list[Item]:
        return [
            Item(
                slot.nbytes,
                (slot.param.dtype, slot.param.device),
                alone=slot.sparse or slot.nbytes >= self._solo_bytes,
            )
            for slot in self.slots
        ]

    def _install(self, plan: Plan) -> None:
        with_usage = self._learning or self.options.find_unused
        self.buckets = make_buckets(
            plan,
            self.slots,
            self.packing,
            solo_bytes=self._solo_bytes,
            extra=trailer_size(len(self.slots), with_usage=with_usage),
        )
        self._announce_rows()
        suits = Router.suits(self.group, self.buckets)
        self._router = (self._router or Router(self.group)) if suits else None
        self._arm()

    def _arm(self) -> None:
        """Wait for the gradients of a new step."""
        for slot in self._arrivals:
            slot.fires = 0
        self._arrivals.clear()
        self.packing.lent.clear()
        self.packing.kept.clear()
        self._next = 0
        for bucket in self.buckets:
            bucket.arm()
        self._unseen = [
            bucket
            for bucket in self.buckets
            if isinstance(bucket, SoloBucket) and bucket.slots[0].lendable is None
        ]

    # ---------------------------------------------------------------- forward

    def start_forward(self) -> None:
        """Before a forward whose gradients will be reduced."""
        if self.phase is Phase.BACKWARD:
            raise self.failed(StateError(messages.FORWARD_IN_BACKWARD))
        if self.phase is Phase.NESTED:
            self.finalize()
            raise self.failed(StateError(messages.HIDDEN_OUTPUTS))
        self.raise_deferred()
        if self._order is not None:
            self.rebuild()
        if self._frozen:
            self._thaw()
        if not self._forwards and (not self._alone or self.options.as_views):
            for bucket in self.buckets:  # before the forward fills the memory
                if type(bucket) is Bucket:
                    bucket.allocate()
        self._forwards += 1

    def raise_deferred(self) -> None:
        """Raise what the backwards since the last forward have left to say."""
        error = self._verdicts.take(self.rank, self.step, static_graph=self.static_graph)
        if error is not None:
            raise self.failed(error)

    def forward_failed(self) -> None:
        """A forward raised. If no other rank's did, the ranks are out of step now."""
        self._incidents |= Incident.FORWARD_FAILED

    def prepare(self, outputs: object) -> None:
        """After a forward whose gradients will be reduced: the next backward is ours."""
        self._outputs_seen = watch_outputs(outputs, self._on_outputs)
        self.phase = Phase.ARMED

    def disarm(self) -> None:
        """After a forward whose gradients stay local.

        A backward through the outputs of an earlier forward is still reduced.
        """
        if self.phase is Phase.ARMED and self._outputs_seen:
            self.phase = Phase.IDLE

    def rebuild(self) -> bool:
        """Replan in the order of rank 0's first backward; False if that is not due."""
        if self._order is None:
            return False
        order, self._order = self._order, None
        if not self._alone:
            shared = torch.tensor(order, dtype=torch.int64, device=self._device)
            work = broadcast(self.group, shared, 0)
            wait(work, self.group, lambda: "the broadcast of rank 0's order of gradients")
            order = shared.tolist()
        self._install(make_plan(self._items(), order, self.caps.rebuilt))
        self.has_rebuilt = True
        return True

    def _thaw(self) -> None:
        """Wait again for parameters that were frozen and require gradients now."""
        for slot in self._frozen:
            slot.frozen = not slot.param.requires_grad
            slot.due = int(not slot.frozen)
            slot.bucket.refresh()
        self._frozen = [slot for slot in self._frozen if slot.frozen]
        self._arm()

    # ---------------------------------------------------------------- backward

    def _hook(self, slot: Slot) -> Callable[[object, object], None]:
        """What runs for every gradient of every step: keep it short."""
        reducer, backward, arrived = self, Phase.BACKWARD, self._arrivals.append

        def mark_ready(_inputs: object, _outputs: object) -> None:
            if reducer.phase is not backward and not reducer._begins_with(slot):
                return
            arrived(slot)
            slot.fires = fires = slot.fires + 1
            if fires != slot.due:
                reducer._fired_otherwise(slot)
                return
            bucket = slot.bucket
            if slot.eager:
                reducer._pack_large(slot)
            bucket.pending -= 1
            if not bucket.pending:
                reducer._launch_full()

        return mark_ready

    def _on_outputs(self, node: Node | None) -> None:
        """Autograd has come to the outputs of a synchronising forward."""
        if self.phase is not Phase.IDLE and self.phase is not Phase.ARMED:
            return
        # Without a gradient for us there is nothing to reduce, unless the others have some.
        if any(watch.will_fire() for watch in self._watches) or (
            self.options.find_unused and accumulates(node)
        ):
            self._begin()

    def _begins_with(self, slot: Slot) -> bool:
        """A gradient came outside a reduction: does it begin one?"""
        if self.phase is Phase.ARMED and in_nested_backward():
            self.phase = Phase.NESTED
            self.step += 1
        elif self.phase is Phase.ARMED:
            self._begin()
        elif self.phase is not Phase.NESTED:
            slot.used_unsynced = True
            return False
        elif not in_nested_backward():
            self._await_end()
        return True

    def _begin(self) -> None:
        self.step += 1
        self._await_end()

    def _await_end(self) -> None:
        self.phase = Phase.BACKWARD
        EndOfBackward.schedule(self.finalize, self._abandon)

    def _fired_otherwise(self, slot: Slot) -> None:
        """A slot fired, and it is not the time that makes it ready."""
        if self._learning or slot.fires < slot.due:
            return
        if self.static_graph:
            lacking = [each for each in self.slots if each.fires < each.due]
            self._verdicts.deferred = messages.graph_changed(
                self.rank, self.step, {self.rank: lacking}
            )
            raise self.failed(GraphChangedError(messages.newly_used(self.rank, slot)))
        raise self.failed(ReadyTwiceError(messages.ready_twice(self.rank, slot)))

    def _pack_large(self, slot: Slot) -> None:
        if self._learning or self._unseen:
            return
        if not self._alone or self.options.as_views:
            with torch.no_grad():
                slot.bucket.pack_large(slot)

    def _launch_full(self) -> None:
        """Launch the buckets that are full, up to the first that is not."""
        if self._learning:
            return  # any gradient may come a second time
        buckets = self.buckets
        while not self._unseen and self._next < len(buckets) and not buckets[self._next].pending:
            self._launch(buckets[self._next])
        if self.phase is Phase.NESTED and not any(bucket.pending for bucket in buckets):
            self._await_end()

    def _launch(self, bucket: Bucket) -> None:
        if not self._alone or self.options.as_views:
            with torch.no_grad():  # under create_graph=True gradients have a graph
                bucket.pack()
        if not self._alone:
            self._send(bucket)
        self._next += 1

    def _send(self, bucket: Bucket) -> None:
        if bucket.extra:
            used = used_here(self.slots, self.buckets) if bucket.extra > 1 else None
            write_trailer(bucket.tail, incident=bool(self._incidents), used=used)
        if self._router is None:
            bucket.work = all_reduce(self.group, bucket.payload)
        else:
            bucket.work = self._router.start(bucket)

    def _abandon(self) -> None:
        """The backward raised: end the step as far as the other ranks are concerned."""
        self.phase = Phase.FINALIZE
        try:
            self._give_up()
        except RuntimeError as error:  # nobody to raise it to: the engine is cleaning up
            self._verdicts.deferred = error
        finally:
            self._end_step()

    def _give_up(self) -> None:
        """Peers wait for the buckets that we have not sent: send zeros, and say so."""
        self._incidents |= Incident.ABANDONED
        if not self._alone:
            for bucket in self.buckets[self._next :]:
                bucket.zero()
                self._send(bucket)
            for _ in self._wait_for_buckets():
                pass
            self._call_roll().wait()

    # ---------------------------------------------------------------- end of backward

    def finalize(self) -> None:
        """All gradients of this backward are there: reduce what is left and write back."""
        self.phase = Phase.FINALIZE
        try:
            with torch.no_grad():
                self._finish_step()
        except Exception:
            if self._next < len(self.buckets):
                self._give_up()
            raise
        finally:
            self._end_step()

    def _finish_step(self) -> None:
        if self.options.find_unused or self._next < len(self.buckets):
            with record_function("search_unused_parameters"):
                self._look_for_unused()
        for solo in self._unseen:
            solo.look()
        for bucket in self.buckets[self._next :]:
            self._launch_late(bucket)
        for bucket in self._wait_for_buckets():
            bucket.unpack()
        statements = self._hear_statements()
        if self._unreached.stale or any(bucket.missing for bucket in self.buckets):
            settle_unused(
                self.buckets,
                self._unreached.stale,
                self._usage(statements),
            )
        error = self._verdicts.judge(self.rank, self.step, statements, self.slots)
        if error is not None:
            raise self.failed(error)
        self._remember()

    def _wait_for_buckets(self) -> Iterator[Bucket]:
        """The buckets that were launched, each as soon as it is reduced."""
        self.buckets_reduced = 0
        for bucket in self.buckets:
            if bucket.work is not None:
                wait(bucket.work, self.group, partial(self._describe, bucket))
                if not bucket.skipped:
                    self.buckets_reduced += 1
                    yield bucket
        if self._router is not None:
            self._router.done()

    def _look_for_unused(self) -> None:
        self._unreached = found = find_unreached(self.slots)
        if not self.static_graph:
            for slot in found.frozen:
                slot.due = 0
                slot.frozen = True
                slot.bucket.refresh()
                slot.bucket.release(slot)
            self._frozen = found.frozen
        if found.unused and not self.options.find_unused and not self._learning:
            self._incidents |= Incident.UNUSED

    def _launch_late(self, bucket: Bucket) -> None:
        """At the end of the backward: with what is there."""
        if not self.options.skip_unused or bucket.reached:
            self._launch(bucket)
            return
        bucket.skip()
        if bucket.extra and not self._alone:
            self._send(bucket)
        self._next += 1

    def _hear_statements(self) -> list[Statement]:
        """What the ranks say, if any of them has something to report."""
        if self._alone:
            return [self._statement()] if self._incidents else []
        return self._call_roll().wait() if has_incident(self._tail) else []

    def _usage(self, statements: Sequence[Statement]) -> list[bool]:
        """For each parameter, whether any rank used it in this step."""
        if self._alone:
            return used_here(self.slots, self.buckets)
        if self.buckets[-1].extra > 1:
            return [count > 0 for count in usage_counts(self._tail).tolist()]
        if statements:
            return [any(flags) for flags in zip(*(s.used for s in statements), strict=True)]
        return self._used_anywhere or used_here(self.slots, self.buckets)

    def _remember(self) -> None:
        """Keep what later steps need to know of this one."""
        unused = self._unreached.unused
        if self._unused_before is not None and unused != self._unused_before:
            self.graph_is_static = False
        self._unused_before = unused
        if self._learning:
            self._used_anywhere = self._usage([])
            self._order = self._observed_order()
            for slot in self.slots:
                slot.due = slot.fires
            for bucket in self.buckets:
                bucket.refresh()
        elif self._will_rebuild and not self.has_rebuilt:
            self._order = self._observed_order()

    def _observed_order(self) -> list[int]:
        """In the order in which gradients were complete; those that never were come last."""
        last = {slot.index: at for at, slot in enumerate(self._arrivals)}
        return sorted(range(len(self.slots)), key=lambda i: last.get(i, len(self._arrivals)))

    def _end_step(self) -> None:
        for slot in self.slots:
            slot.used_unsynced = False
        self._unreached = Unreached()
        self._incidents = Incident(0)
        self._forwards = 0
        self.phase = Phase.IDLE
        self._arm()

    # ---------------------------------------------------------------- what is told

    def _statement(self) -> Statement:
        unused = {slot.index for slot in self._unreached.unused}
        return Statement(
            self._incidents,
            self._forwards,
            used_here(self.slots, self.buckets),
            [index in unused for index in range(len(self.slots))],
        )

    def _call_roll(self) -> RollCall:
        return RollCall(self.group, self._device, self._statement(), self.step)

    def _describe(self, bucket: Bucket) -> str:
        return (
            f"step {self.step}: the reduction of bucket {bucket.index} of {len(self.buckets)} "
            f"({bucket.describe()})"
        )

    def failed(self, error: Exception) -> Exception:
        """Remember ``error`` for the logging data, and hand it back to be raised."""
        self.last_error = f"{type(error).__name__}: {error}"
        return error

    def check_finalized(self) -> None:
        """Raise if the last backward was not reduced."""
        self.raise_deferred()
        if self.phase is Phase.BACKWARD:
            raise self.failed(StateError(messages.NOT_FINALIZED))

    def _get_local_used_map(self) -> Tensor:
        """For torch's callers: how many ranks used each parameter, where that is looked for."""
        if self.buckets[-1].extra > 1 and not self._alone:
            return usage_counts(self._tail)
        return torch.zeros(len(self.slots), dtype=torch.int32)

    def _ddp_graph_static(self) -> bool:
        """For torch's callers: did every step so far use the same parameters?"""
        return self.graph_is_static
