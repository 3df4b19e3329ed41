"""The step's phase machine: gradients become ready, buckets launch in order, all is finalized.

One step as it runs: ``start_forward`` → the user's forward → ``prepare`` → backward: a hook a
parameter calls ``mark_ready`` → a full bucket is packed and launched, strictly in bucket order
→ end of backward: ``finalize`` launches what is left, waits, and writes the gradients back.

[Note: no graph walk] Which parameters a backward will reach is not looked for. What has not
fired when the backward ends was not used on this rank. Its buckets launch then, in order, on
every rank alike, and the trailer of the last one tells what was used elsewhere.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.autograd.profiler import record_function

from gradsync.ddp import messages
from gradsync.ddp.autograd import (
    EndOfBackward,
    NoGrad,
    accumulates,
    backward_number,
    in_backward,
    in_compiled_autograd,
    in_distributed_backward,
    in_nested_backward,
    watch_outputs,
)
from gradsync.ddp.bucket import Slot
from gradsync.ddp.comm_hook import CommHook
from gradsync.ddp.distributed_autograd import (
    IN_GRAD,
    InContext,
    Placeholders,
    errors_logged,
    log,
)
from gradsync.ddp.futures import result_of
from gradsync.ddp.phase import BACKWARD_RUNS, Phase
from gradsync.ddp.reducer_base import ReducerBase
from gradsync.ddp.rollcall import Incident
from gradsync.ddp.usage import settle_unused
from gradsync.errors import (
    CollectiveError,
    GradsyncError,
    GraphChangedError,
    ReadyTwiceError,
    StateError,
)

LATE_END_SECONDS = 60.0


class Reducer(ReducerBase):
    """Averages the gradients of ``parameters`` over the ranks of ``group``.

    Features act on a step from outside: ``queue.reduction`` sums a bucket, ``queue.on_reduced``
    gets each one as soon as it is reduced, ``on_backward_end`` runs at the end of each backward,
    reduced or not.
    """

    # ---------------------------------------------------------------- parameters and group

    def reset(self, group: dist.ProcessGroup) -> None:
        """Start anew with ``group``: what was learned, and a step under way, are forgotten."""
        self._end_step()
        old = self.queue.reduction
        hook = CommHook(group, old.hook, old.state) if isinstance(old, CommHook) else None
        self._set_group(group, hook)
        self._forget()

    def take_over(self, old: "Reducer") -> None:
        """Go on where ``old`` has been, with other parameters."""
        self.queue.step, self.report.forwards = old.step, old.report.forwards
        self.queue.clock = old.clock
        self.report.incidents = old.report.incidents
        if isinstance(old.queue.reduction, CommHook):
            self.register_hook(old.queue.reduction.hook, old.queue.reduction.state)
        unsynced = {slot.param for slot in old.slots if slot.used_unsynced}
        for slot in self.slots:
            slot.used_unsynced = slot.param in unsynced
        old.remove_hooks()

    # ---------------------------------------------------------------- forward

    def await_late_end(self) -> None:
        """Before any forward: let a step of distributed autograd that has raised come to its end.

        Distributed autograd tells the caller that a backward has raised while the threads that ran
        it are still on their way out: we may yet have to end its step, with collectives.
        """
        if self._in_no_context.is_set() or in_backward():
            return
        if not self._in_no_context.wait(LATE_END_SECONDS):
            raise self.failed(StateError(messages.FORWARD_IN_BACKWARD))

    def check_ready(self) -> None:
        """Raise if a forward whose gradients will be reduced cannot begin now."""
        if self.phase in BACKWARD_RUNS:
            raise self.failed(StateError(messages.FORWARD_IN_BACKWARD))
        if self.phase is Phase.NESTED:
            self.finalize()
            raise self.failed(StateError(messages.HIDDEN_OUTPUTS))
        self.raise_deferred()

    def start_forward(self) -> None:
        """Before a forward whose gradients will be reduced, after ``check_ready``."""
        if self._order is not None:
            self.rebuild()
        if self._frozen:
            self._thaw()
        if not self.report.forwards:
            self.queue.allocate()  # before the forward fills the memory
        self.report.forwards += 1
        self.clock.begin_forward()

    def raise_deferred(self) -> None:
        """Raise what the backwards since the last forward have left to say."""
        error = self._verdicts.take(self.rank, self.step, static_graph=self.static_graph)
        if error is not None:
            raise self.failed(error)

    def forward_failed(self) -> None:
        """A forward raised. If no other rank's did, the ranks are out of step now."""
        self.report.incidents |= Incident.FORWARD_FAILED

    def prepare(self, outputs: object, context: int | None = None) -> None:
        """After a forward whose gradients will be reduced: the next backward is ours.

        ``context`` is that of distributed autograd, if the forward was in one.
        """
        self._context = context
        reached = (
            self._on_outputs if context is None else partial(self._on_outputs, context=context)
        )
        self._outputs_seen = watch_outputs(outputs, reached, looks_on=self.options.find_unused)
        self.phase = Phase.ARMED
        self.clock.forward_ended = self.clock.now()

    def tie(self, outputs: Any) -> Any:
        """Outputs of a forward in a context, such that unused parameters get gradients too."""
        if not self.options.find_unused and not self.static_graph:
            return outputs
        if self._placeholders is None:
            self._placeholders = Placeholders(self.slots)
        return self._placeholders.tie(outputs)

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """For torch's pipelines: the backward of ``outputs`` is to be reduced after all.

        They run all forwards inside ``no_sync`` and know only then which backward is the last.
        """
        self.check_ready()
        self.start_forward()
        self.prepare(outputs)

    def disarm(self) -> None:
        """After a forward whose gradients stay local.

        A backward through the outputs of an earlier forward is still reduced.
        """
        if self.phase is Phase.ARMED and self._outputs_seen:
            self.phase = Phase.IDLE

    # ---------------------------------------------------------------- backward

    def _hook(self, slot: Slot) -> Callable[[object, object], None]:
        """What runs for every gradient of every step: keep it short."""
        reducer, backward, arrived = self, Phase.BACKWARD, self._arrivals.append

        def mark_ready(_inputs: object, gradients: object) -> None:
            if reducer.phase is not backward and not reducer._begins_with(slot, gradients):
                return
            arrived(slot)
            slot.fires = fires = slot.fires + 1
            if fires != slot.due:
                reducer._fired_otherwise(slot)
                return
            bucket = slot.bucket
            if slot.eager and not reducer._counting:
                reducer.queue.pack_large(slot)
            bucket.pending -= 1
            if not bucket.pending:
                reducer._launch_full()

        return mark_ready

    def _on_outputs(self, node: Node | None, context: int | None = None) -> None:
        """Autograd has come to the outputs of a synchronising forward."""
        if self._begins_in_context(context):
            return
        if self.phase is not Phase.IDLE and self.phase is not Phase.ARMED:
            return
        # Without a gradient for us there is nothing to reduce, unless the others have some.
        if any(watch.will_fire() for watch in self._watches) or (
            self.options.find_unused and accumulates(node)
        ):
            self._begin()

    def _begins_in_context(self, context: int | None) -> bool:
        """Is it a backward of distributed autograd that has come to us? Then its step begins."""
        if self.phase is not Phase.DISTRIBUTED and (
            context is None
            or not in_distributed_backward()
            or any(watch.will_fire() for watch in self._watches)
        ):
            return False
        with self._lock, errors_logged(self.queue.packing.home):
            if self.phase is Phase.DISTRIBUTED:
                if self._backward != backward_number():
                    raise self.failed(StateError(messages.TWO_BACKWARDS))
            elif self.phase is Phase.IDLE or self.phase is Phase.ARMED:
                assert context is not None
                self._backward = backward_number()
                self.queue.packing.home = InContext(context)
                self._in_no_context.clear()
                self._begin(Phase.DISTRIBUTED)
        return True

    def _arrive(self, slot: Slot, gradients: object) -> None:
        """A gradient came in a context."""
        with self._lock, errors_logged(self.queue.packing.home):
            if self._placeholders is not None and self._placeholders.is_one(slot, gradients):
                return
            self._arrivals.append(slot)
            slot.fires += 1
            if slot.fires != slot.due:
                self._fired_otherwise(slot)
                return
            slot.bucket.pending -= 1
            if not slot.bucket.pending:
                self._launch_full()

    def _begins_with(self, slot: Slot, gradients: object) -> bool:
        """A gradient came outside a reduction: does it begin one?"""
        armed_by = self._context if self.phase is Phase.ARMED else None
        if self._begins_in_context(armed_by):
            self._arrive(slot, gradients)
            return False
        if self.phase is Phase.ARMED and in_nested_backward():
            self.phase = Phase.NESTED
            self.queue.step += 1
            self.clock.begin_backward()
        elif self.phase is Phase.ARMED:
            self._begin()
        elif self.phase is not Phase.NESTED and self.phase is not Phase.COMPILED:
            slot.used_unsynced = True
            if self.on_backward_end is not None and not self._ends_locally:
                self._ends_locally = True
                EndOfBackward.schedule(self._end_locally, self._end_locally)
            return False
        elif self.phase is Phase.NESTED and not in_nested_backward():
            self._await_end()
        return self.phase is not Phase.COMPILED or not self._ends_with(slot)

    def _begin(self, phase: Phase = Phase.BACKWARD) -> None:
        self.queue.step += 1
        self.clock.begin_backward()
        self._await_end(phase)

    def _end_locally(self) -> None:
        """A backward that is not reduced has ended."""
        self._ends_locally = False
        if self.on_backward_end is not None:
            self.on_backward_end()

    def _await_end(self, phase: Phase = Phase.BACKWARD) -> None:
        self.phase = phase
        EndOfBackward.schedule(self.finalize, self._abandon)
        if in_compiled_autograd():
            self.phase = Phase.COMPILED
            self._awaited = sum(watch.will_fire() for watch in self._watches)
            self._awaited -= len(self._arrivals)
            if not self._awaited:
                self.finalize()

    def _ends_with(self, slot: Slot) -> bool:
        """Was this the last gradient, and the step has ended?"""
        self._awaited -= 1
        if self._awaited:
            return False
        self._arrivals.append(slot)
        slot.fires += 1
        if slot.fires != slot.due:
            self._fired_otherwise(slot)
        self.finalize()
        return True

    def _fired_otherwise(self, slot: Slot) -> None:
        """A slot fired, and it is not the time that makes it ready."""
        if self._counting or slot.fires < slot.due:
            return
        if self.static_graph:
            lacking = [each for each in self.slots if each.fires < each.due]
            self._verdicts.deferred = messages.graph_changed(
                self.rank, self.step, {self.rank: lacking}
            )
            raise self.failed(GraphChangedError(messages.newly_used(self.rank, slot)))
        raise self.failed(ReadyTwiceError(messages.ready_twice(self.rank, slot)))

    def _launch_full(self) -> None:
        """A bucket is full: launch what can be."""
        if self._counting:
            return  # any gradient may come a second time
        self.queue.launch_full()
        if self.phase is Phase.NESTED and self.queue.all_full:
            self._await_end()

    def _abandon(self) -> None:
        """The backward raised: end the step as far as the other ranks are concerned.

        If all that this rank had to send has left, the step is whole for them, and so it is here.
        """
        if self.phase is Phase.IDLE:
            return  # it has ended before: see [Note: compiled autograd]
        self.phase = Phase.FINALIZE
        try:
            if self.queue.has_reported:
                with NoGrad():
                    self._finish_step()
            else:
                self._give_up()
        except Exception as error:  # nobody to raise it to: the engine is cleaning up
            if isinstance(error, CollectiveError):  # else a hook that has raised before
                self._verdicts.deferred = error
        finally:
            self._end_step()

    def _give_up(self) -> None:
        """Peers wait for the buckets that we have not sent: send zeros, and say so."""
        self.report.incidents |= Incident.ABANDONED
        zeroed = self.queue.send_zeros()
        if not self.queue.alone:
            statements = self.report.hear()
            used = self.report.used_anywhere(statements, self._used_anywhere)
            with NoGrad():
                self.queue.settle_given_up(zeroed, used)
            if not statements:  # our report had left before: the others know of nothing
                self._remember()

    def _tell(self, error: Exception) -> None:
        """The step ends with ``error``: tell the other ranks.

        If that fails too, a plain RuntimeError of a hook was a collective that failed in it.
        """
        try:
            self._give_up()
        except Exception as failure:  # of another error it says less than that
            is_plain = isinstance(error, RuntimeError) and not isinstance(error, GradsyncError)
            if is_plain and isinstance(failure, CollectiveError):
                raise failure from error

    def shadow(self) -> None:
        """Take part in a step of the other ranks with nothing of our own."""
        if self._order is not None:
            self.rebuild()
        self.queue.step += 1
        self.phase = Phase.FINALIZE
        try:
            with NoGrad():
                self._shadow_step()
        finally:
            self._end_step()

    def _shadow_step(self) -> None:
        self.queue.send_zeros()
        statements = self.report.hear()
        error = self._verdicts.judge(self.rank, self.step, statements, self.slots)
        if error is not None:
            raise self.failed(error)
        if self._learning:
            self._used_anywhere = self.report.used_anywhere(statements, None)
            self._order = self._observed_order()
            self._missed_first_step = True
        elif self.layout.will_rebuild and not self.has_rebuilt:
            self._order = self._observed_order()

    def reduce_now(self) -> None:
        """Reduce the gradients as they are, outside a backward."""
        self.check_ready()
        self.queue.step += 1
        self.phase = Phase.FINALIZE
        self.clock.begin_backward()
        for slot in self.slots:
            slot.used_unsynced = slot.param.grad is not None
            if not slot.used_unsynced:
                self.report.incidents |= Incident.PARTIAL
        self._finalize(self._reduce_rest)

    # ---------------------------------------------------------------- end of backward

    def finalize(self) -> None:
        """All gradients of this backward are there: reduce what is left and write back."""
        self.phase = Phase.FINALIZE
        self._finalize(self._finish_step)

    def _finalize(self, finish: Callable[[], None]) -> None:
        self.clock.computed = self.clock.now()
        try:
            with NoGrad():
                finish()
        except Exception as error:
            log(error, self.queue.packing.home)
            if not self.report.heard and not isinstance(error, CollectiveError):
                self._tell(error)
            raise
        finally:
            self._end_step()

    def _finish_step(self) -> None:
        if self.options.find_unused or not self.queue.all_launched:
            with record_function("search_unused_parameters"):
                self._look_for_unused()
        self._reduce_rest()
        self._remember()

    def _reduce_rest(self) -> None:
        self.queue.launch_rest()
        self.queue.settle_rest()
        for future in self.also_wait_for:
            result_of(future, self.queue.group, lambda: "the buffer hook")
        self.clock.reduced = self.clock.now()
        self.buckets_reduced = self.queue.reduced
        statements = self.report.hear()
        stale = self.report.unreached.stale
        if stale or any(bucket.missing for bucket in self.buckets):
            used = self.report.used_anywhere(statements, self._used_anywhere)
            settle_unused(self.buckets, stale, used, self.queue.packing.home)
            self.queue.settle_missing()
        self.clock.end_step()
        error = self._verdicts.judge(self.rank, self.step, statements, self.slots)
        if error is not None:
            raise self.failed(error)

    def _end_step(self) -> None:
        for slot in self.slots:
            slot.used_unsynced = False
        self.report.clear()
        self.also_wait_for = []
        self.queue.packing.home = IN_GRAD
        self.phase = Phase.IDLE
        self._arm()
        self.queue.set_divisor(self.world)
        if self.on_backward_end is not None:
            self.on_backward_end()
        if not self._in_no_context.is_set():
            self._in_no_context.set()

    # ---------------------------------------------------------------- what is told

    def check_finalized(self) -> None:
        """Raise if the last backward was not reduced."""
        self.raise_deferred()
        if self.phase in BACKWARD_RUNS:
            raise self.failed(StateError(messages.NOT_FINALIZED))
