"""``DistributedDataParallel``: the module that users wrap theirs in.

The wrapper owns what belongs to a call of the module: buffers, moving inputs, whether this forward
asks for a reduction. How it is made is in ``replica``. Gradients are the reducer's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.autograd.profiler import record_function
from torch.distributed.utils import _to_kwargs

from gradsync.ddp import join, messages
from gradsync.ddp.autograd import current_context, in_backward
from gradsync.ddp.compile import ACTIVE, CompiledFor
from gradsync.ddp.phase import BACKWARD_RUNS
from gradsync.ddp.replica import Replica
from gradsync.errors import StateError

_is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled


class DistributedDataParallel(Replica):
    """Replicates a module over processes and averages the gradients while backward runs.

    It takes the place of ``torch.nn.parallel.DistributedDataParallel``: the same arguments, the
    same numbers. Construction makes all replicas equal to rank 0's, each backward leaves the
    average of all ranks' gradients in ``.grad``. Like torch's, the constructor, a forward that
    is followed by a backward, and that backward are collective: every rank must make them.

    Args:
        module: the module to wrap; all its parameters must exist by now.
        device_ids: the one device of a single-device GPU module, or None (also for CPU).
        output_device: where outputs of a single-device GPU module go; default ``device_ids[0]``.
        dim: the batch dimension for ``scatter`` and ``gather``.
        broadcast_buffers: deprecated, use ``forward_sync_buffers``; False also leaves buffers
            alone at construction.
        init_sync: verify that all ranks hold the same model, and make the replicas equal.
            Without it both are the program's duty.
        process_group: the ranks to average over; default all.
        bucket_cap_mb: gradients are reduced in buckets of about this many MiB; default 25, with
            a first bucket of 1.
        find_unused_parameters: allow parameters that get no gradient in a step. They keep
            their ``.grad`` if no rank used them and get the average if some rank did.
        check_reduction: deprecated, does nothing.
        gradient_as_bucket_view: let ``.grad`` be views into the buckets, which saves a copy and
            the memory of one set of gradients.
        static_graph: the promise that every step uses the same parameters in the same way. It
            allows reentrant checkpoints over a parameter more than once, and unused parameters.
        delay_all_reduce_named_params: parameters, as (name, parameter), that are not reduced in
            buckets but together, when ``param_to_hook_all_reduce`` gets its gradient.
        param_to_hook_all_reduce: see there; best the one whose gradient comes last.
        mixed_precision: a ``gradsync.MixedPrecision``: dtypes to compute and to reduce in.
        device_mesh: a 1-D mesh in place of ``process_group``; may be sliced from a larger one.
        skip_all_reduce_unused_params: do not reduce buckets whose parameters all go unused;
            they have to be the same on all ranks in all steps.
        bucket_cap_mb_list: caps in MiB for the first, second, … bucket; the last one holds for
            the rest.
        batched_grad_copy: accepted for torch's sake; gradients are always copied in batches.
        forward_sync_buffers: before each training forward, set the buffers to rank 0's;
            default True.
        reduce: "mean", or "sum" to leave the gradients undivided. What is left in ``.grad`` from an
            earlier step is summed again: begin each step with ``zero_grad``.
        plain_state_dict: let ``state_dict`` be that of the module, without ``module.`` before the
            names; ``load_state_dict`` then takes both.
        passthrough: let attributes of the module be read through the wrapper.

    Example:
        >>> import torch, gradsync
        >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> ddp(torch.randn(8, 4)).sum().backward()
        >>> ddp.module.bias.grad
        tensor([8., 8.])
    """

    _active_ddp_module: ClassVar[Any] = None  # torch's replicate sets it, in its place

    # ---------------------------------------------------------------- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; the backward of what it returns averages the gradients.

        >>> import torch, gradsync
        >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> ddp(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
        """
        if _is_profiled():
            with record_function("DistributedDataParallel.forward"):
                return self._forward(inputs, kwargs)
        return self._forward(inputs, kwargs)

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.reducer.phase in BACKWARD_RUNS and in_backward():
            inputs, kwargs = self._cast_inputs(inputs, kwargs)
            return self.module(*inputs, **kwargs)  # a checkpoint recomputes us
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        try:
            output = self._run_ddp_forward(*inputs, **kwargs)
        except BaseException:
            if self._asks_for_reduction():
                self.reducer.forward_failed()
            if self._precision is not None:
                self._precision.leave_if_done()
            raise
        return self._post_forward(output)

    def _asks_for_reduction(self) -> bool:
        return self.require_backward_grad_sync and torch.is_grad_enabled()

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._traced is not None:
            return inputs, kwargs
        if not self._lazy_init_ran:
            self._lazy_init()
        self.reducer.await_late_end()
        if self._join_config.enable:
            join.begin_forward(self)
        if self._asks_for_reduction():
            if self._frozen and any(param.requires_grad for param in self._frozen):
                self._unfreeze()
            self.reducer.check_ready()
        if self._syncs_buffers_before_forward():
            self._sync_buffers()
        if self._asks_for_reduction():
            self.reducer.start_forward()
        if self.device_ids:
            moved_inputs, moved_kwargs = _to_kwargs(
                inputs,
                kwargs,
                torch.device(self.device_type, self.device_ids[0]),
                self.use_side_stream_for_tensor_copies,
            )
            inputs, kwargs = moved_inputs[0], moved_kwargs[0]
        if self._precision is not None and self._precision.enter() and torch.is_grad_enabled():
            self.reducer.watch()
        return self._cast_inputs(inputs, kwargs)

    def _cast_inputs(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._precision is None:
            return inputs, kwargs
        return self._precision.cast_inputs(inputs, kwargs)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and let Dynamo know meanwhile for which DDP it compiles."""
        with CompiledFor(self._splits):
            return self._modules["module"](*inputs, **kwargs)  # type: ignore[misc]

    def _post_forward(self, output: Any) -> Any:
        if self._traced is not None:
            return output
        if self.buffer_hook is not None and not self.buffer_hook.before_forward:
            self._sync_buffers()
        if self._asks_for_reduction():
            if not self.require_forward_param_sync:
                self.require_forward_param_sync = True
            context = current_context()
            if context is not None:
                self._check_can_be_in_context()
                output = self.reducer.tie(output)
            self.reducer.prepare(output, context)
        else:
            self.require_forward_param_sync = False
            self.reducer.disarm()
        if self._precision is not None:
            self._precision.after_forward(output)
        if self._delayed is not None:
            self._delayed.after_forward(output)
        return output

    def _check_can_be_in_context(self) -> None:
        """Raise for what needs ``.grad``, which distributed autograd leaves alone."""
        for feature, is_used in (
            ("mixed_precision", self._precision is not None),
            ("an optimizer in the backward", self.reducer.queue.on_reduced is not None),
            ("delay_all_reduce_named_params", self._delayed is not None),
        ):
            if is_used:
                raise self.reducer.failed(StateError(messages.IN_CONTEXT.format(feature)))

    def _lazy_init(self) -> None:
        """Before the first forward: what may have been added since the construction."""
        self._setup_in_backward_optimizers()
        self._lazy_init_ran = True

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return ACTIVE.splits or cls._active_ddp_module

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients local: the first backward outside reduces what has accumulated.

        The forward has to be inside as well: it decides whether its backward is reduced.

        >>> import torch, gradsync
        >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> with ddp.no_sync():
        ...     ddp(torch.randn(8, 4)).sum().backward()
        >>> ddp(torch.randn(8, 4)).sum().backward()
        >>> ddp.module.bias.grad
        tensor([16., 16.])
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---------------------------------------------------------------- buffers and the final model

    def will_sync_module_buffers(self) -> bool:
        """Will the next forward set the buffers to rank 0's?

        True at first and after a forward that asks for a reduction; so the first evaluation
        after training starts from rank 0's buffers, and further ones issue no collective.

        >>> import torch, gradsync
        >>> gradsync.DistributedDataParallel(torch.nn.Linear(2, 2)).will_sync_module_buffers()
        False
        """
        return self.require_forward_param_sync and self.forward_sync_buffers and self._has_buffers

    def _syncs_buffers_before_forward(self) -> bool:
        hook = self.buffer_hook
        return self.will_sync_module_buffers() and (hook is None or hook.before_forward)

    def _sync_buffers(self) -> None:
        """Make the buffers equal, by the hook if there is one."""
        if self.buffer_hook is not None:
            if self.will_sync_module_buffers():
                self.reducer.also_wait_for += self.buffer_hook.run(self.named_module_buffers)
        elif self.process_group.size() > 1:
            joins = self._join_config.enable
            self._sync_module_buffers(join.common_rank(self, candidate=True) if joins else 0)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        if buffers := self.modules_buffers:
            self._buffer_sync.run(
                self.process_group,
                buffers,
                authoritative_rank,
                lambda: (
                    f"the broadcast of buffers before the forward of step {self.reducer.step + 1}"
                ),
            )

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """All ranks have joined: take the model of the last one to do so."""
        self._authoritative_rank = join.common_rank(self, candidate=is_last_joiner)
        self._sync_module_states(self._authoritative_rank, buffers=self.forward_sync_buffers)
