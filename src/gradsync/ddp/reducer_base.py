"""A reducer between steps: its parameters, buckets and group, and what it has learned of them."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from gradsync.ddp import messages
from gradsync.ddp.autograd import GradientWatch
from gradsync.ddp.bucket import Bucket, Slot
from gradsync.ddp.clock import StepClock
from gradsync.ddp.collectives import broadcast, wait
from gradsync.ddp.comm_hook import BuiltinHook, CommHook, GradBucket, Hook, sum_hook
from gradsync.ddp.distributed_autograd import Placeholders
from gradsync.ddp.layout import Layout, ReducerOptions
from gradsync.ddp.phase import Phase
from gradsync.ddp.report import StepReport
from gradsync.ddp.rollcall import Incident
from gradsync.ddp.usage import find_unreached
from gradsync.ddp.verdicts import Verdicts
from gradsync.errors import StateError


class ReducerBase(ABC):
    """Base of ``Reducer``, which runs the steps; what they keep is set up here."""

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
        self.report = StepReport(self.slots, options)
        self.queue = self.report.queue
        self.layout = Layout(self.slots, self.queue.packing, options)
        self.layout.static_graph = static_graph
        self.phase = Phase.IDLE
        self.has_rebuilt = False
        self.graph_is_static = True  # so far every step used the same parameters
        self.arrival_order: list[int] = []  # of the last step's gradients
        self.unused: list[Slot] = []  # in the last step, on this rank
        self.last_error: str | None = None
        self.on_backward_end: Callable[[], None] | None = None
        self.also_wait_for: list[torch.futures.Future[object]] = []  # at the end of this step
        self.buckets_reduced = 0  # in the last step
        # of this step
        self._arrivals: list[Slot] = []  # in the order of their gradients
        self._awaited = 0  # gradients to come, where that is known
        self._ends_locally = False  # on_backward_end is scheduled
        self._backward = -1  # its number, under distributed autograd
        self._lock = threading.Lock()  # for gradients that several threads bring
        self._in_no_context = threading.Event()  # no step of distributed autograd is under way
        self._in_no_context.set()
        # of the last forward that armed us
        self._outputs_seen = False
        self._context: int | None = None  # of distributed autograd
        self._placeholders: Placeholders | None = None
        # from step to step
        self._order: list[int] | None = None  # of the first step's gradients, for the rebuild
        self._used_anywhere: Sequence[bool] | None = None  # what a static graph uses, once known
        self._missed_first_step = False  # of a static graph: this rank had no inputs then
        self._unused_before: list[Slot] | None = None
        self._frozen: list[Slot] = []
        self._verdicts = Verdicts()
        self._watches: list[GradientWatch] = []
        self._set_group(group)
        self._lay_out()
        self.watch()

    @property
    def static_graph(self) -> bool:
        """Was it promised that all steps are alike?"""
        return self.layout.static_graph

    @property
    def _learning(self) -> bool:
        """Is this the first step of a static graph, in which its shape is recorded?"""
        return self.static_graph and self._used_anywhere is None

    @property
    def _counting(self) -> bool:
        """Is it recorded how often each gradient comes? A rank that had joined does so later."""
        return self._learning or self._missed_first_step

    @property
    def _with_usage(self) -> bool:
        return self._learning or self.options.find_unused

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In the order of their reduction."""
        return self.queue.buckets

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks to average over."""
        return self.queue.group

    @property
    def step(self) -> int:
        """How many reductions have begun."""
        return self.queue.step

    @property
    def clock(self) -> StepClock:
        """The times of the steps."""
        return self.queue.clock

    # ---------------------------------------------------------------- setting up

    def _set_group(self, group: dist.ProcessGroup, hook: CommHook | None = None) -> None:
        self.world = group.size()
        self.rank = group.rank()
        self.queue.set_group(group, hook, alone=not self.slots)
        self.layout.trailer_apart = hook is not None and not hook.carries_report

    def register_hook(self, hook: Hook, state: object) -> None:
        """Let ``hook`` reduce the buckets."""
        if isinstance(self.queue.reduction, CommHook):
            calls = ["register_comm_hook", "register_builtin_comm_hook"]
            if isinstance(hook, BuiltinHook):
                calls.reverse()  # torch names the one that was called first
            raise self.failed(StateError(messages.HOOK_TWICE.format(" or ".join(calls))))
        if self.phase is not Phase.IDLE and self.phase is not Phase.ARMED:
            raise self.failed(StateError(messages.HOOK_IN_BACKWARD))
        self._set_group(self.group, CommHook(self.group, hook, state))
        self._forget()

    def _forget(self) -> None:
        self.has_rebuilt = False
        self._order = None
        self._verdicts = Verdicts()
        self._used_anywhere = None
        self._missed_first_step = False
        for slot in self.slots:
            slot.due = 1
        self._lay_out()

    def set_static_graph(self) -> None:
        """Take the promise that all steps will be alike."""
        if self.step > 0:
            raise self.failed(StateError(messages.STATIC_GRAPH_TOO_LATE))
        self.layout.static_graph = True
        self._lay_out()

    def _lay_out(self) -> None:
        self.queue.install(self.layout.initial(with_usage=self._with_usage))
        self._arm()

    def expect_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Announce the rows of sparse gradients, by parameter; they hold until set anew."""
        self.layout.expect_rows(rows, self.buckets)

    def divide_by(self, ranks: int) -> None:
        """The next step is divided by this and not by the number of ranks."""
        self.queue.set_divisor(ranks)

    def _arm(self) -> None:
        """Wait for the gradients of a new step."""
        for slot in self._arrivals:
            slot.fires = 0
        self._arrivals.clear()
        self.queue.arm()

    def watch(self) -> None:
        """Notice gradients; to be called again when parameters have got new autograd nodes."""
        self.remove_hooks()
        self._watches = [GradientWatch(slot.param, self._hook(slot)) for slot in self.slots]

    @abstractmethod
    def _hook(self, slot: Slot) -> Callable[[object, object], None]:
        """What is to run when ``slot`` gets a gradient."""

    def remove_hooks(self) -> None:
        """Let go of the parameters: no gradient is noticed from now on."""
        for watch in self._watches:
            watch.remove()
        self._watches = []

    # ---------------------------------------------------------------- learning from steps

    def _look_for_unused(self) -> None:
        self.report.unreached = found = find_unreached(self.slots, self.queue.packing.home)
        if not self.static_graph:
            for slot in found.frozen:
                slot.due = 0
                slot.frozen = True
                slot.bucket.refresh()
                slot.bucket.release(slot)
            self._frozen = found.frozen
        if found.unused and not self.options.find_unused and not self._counting:
            self.report.incidents |= Incident.UNUSED

    def _remember(self) -> None:
        """Keep what later steps need to know of this one."""
        unused = self.unused = self.report.unreached.unused
        if self._arrivals:
            self.arrival_order = [slot.index for slot in self._arrivals]
        if self._unused_before is not None and unused != self._unused_before:
            self.graph_is_static = False
        self._unused_before = unused
        if self._counting:
            self._missed_first_step = False
            for slot in self.slots:
                slot.due = slot.fires
            for bucket in self.buckets:
                bucket.refresh()
        if self._learning:
            self._used_anywhere = self.report.used_anywhere([], None)
            self._order = self._observed_order()
        elif self.layout.will_rebuild and not self.has_rebuilt:
            self._order = self._observed_order()

    def _observed_order(self) -> list[int]:
        """In the order in which gradients were complete; those that never were come last."""
        last = {slot.index: at for at, slot in enumerate(self._arrivals)}
        return sorted(range(len(self.slots)), key=lambda i: last.get(i, len(self._arrivals)))

    def rebuild(self) -> bool:
        """Replan in the order of rank 0's first backward; False if that is not due."""
        if self._order is None:
            return False
        order, self._order = self._order, None
        if not self.queue.alone:
            shared = torch.tensor(order, dtype=torch.int64, device=self.buckets[0].device)
            work = broadcast(self.group, shared, 0)
            wait(work, self.group, lambda: "the broadcast of rank 0's order of gradients")
            order = shared.tolist()
        self.queue.install(self.layout.in_order(order, with_usage=self._with_usage))
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

    # ---------------------------------------------------------------- what is told

    def failed(self, error: Exception) -> Exception:
        """Remember ``error`` for the logging data, and hand it back to be raised."""
        self.last_error = f"{type(error).__name__}: {error}"
        return error

    def _get_local_used_map(self) -> Tensor:
        """For torch's callers: how many ranks used each parameter, where that is looked for."""
        counts = self.report.usage_counts()
        if counts is not None:
            return counts
        return torch.zeros(len(self.slots), dtype=torch.int32, device="cpu")

    def _run_allreduce_hook(self, bucket: GradBucket) -> "torch.futures.Future[Tensor]":
        """For torch's callers: the sum of a bucket over the ranks."""
        return sum_hook(self.group, bucket)

    def _ddp_graph_static(self) -> bool:
        """For torch's callers: did every step so far use the same parameters?"""
        return self.graph_is_static
