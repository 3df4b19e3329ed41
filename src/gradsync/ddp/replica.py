"""One rank's replica of the module, apart from its steps.

It is made, compared with the other ranks' and set to rank 0's; later it may be pickled, change its
dtype, or move to other ranks. ``DistributedDataParallel`` adds the forward.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group, _rank_not_in_group
from torch.nn.parameter import Parameter

from gradsync.ddp import arguments, traced
from gradsync.ddp.buffers import BufferSync
from gradsync.ddp.collectives import Broadcaster
from gradsync.ddp.compile import skip_our_frames, split_size
from gradsync.ddp.delayed import DelayedReduction, all_names, check_delayed
from gradsync.ddp.error_log import ErrorLog, let_torch_take_ours
from gradsync.ddp.features import Features
from gradsync.ddp.layout import ReducerOptions
from gradsync.ddp.mixed_precision import Precision, check_config, reduce_dtype
from gradsync.ddp.plan import BucketCaps, bucket_caps
from gradsync.ddp.reducer import Reducer
from gradsync.ddp.verify import failures_told, verify_same_model
from gradsync.errors import ArgumentError, StateError


class Replica(Features):
    """Base of ``DistributedDataParallel``, which tells what the arguments mean."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, Parameter]] | None = None,
        param_to_hook_all_reduce: Parameter | None = None,
        mixed_precision: object | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        reduce: Literal["mean", "sum"] = "mean",
        plain_state_dict: bool = False,
        passthrough: bool = False,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        if not isinstance(module, nn.Module):
            raise ArgumentError(f"module must be a torch.nn.Module, got {type(module).__name__}.")
        self.process_group = arguments.resolve_group(module, process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        with failures_told(self.process_group, module) if init_sync else nullcontext():
            arguments.check_flags(
                init_sync=init_sync,
                find_unused_parameters=find_unused_parameters,
                gradient_as_bucket_view=gradient_as_bucket_view,
                static_graph=static_graph,
                skip_all_reduce_unused_params=skip_all_reduce_unused_params,
                batched_grad_copy=batched_grad_copy,
                plain_state_dict=plain_state_dict,
                passthrough=passthrough,
            )
            arguments.check_choice("reduce", reduce, ("mean", "sum"))
            check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce, module)
            if mixed_precision is not None:
                check_config(mixed_precision, delays=delay_all_reduce_named_params is not None)
            arguments.warn_of_deprecated(broadcast_buffers, forward_sync_buffers, check_reduction)
            if not isinstance(dim, int):
                raise ArgumentError(f"dim must be an int, the batch dimension, got {dim!r}.")
            self.parameters_to_ignore: set[str] = set(
                getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            )
            self.module = module
            self.dim = dim
            self._delayed_parameters = list(delay_all_reduce_named_params or ())
            self._delay_trigger = param_to_hook_all_reduce
            self.parameters_to_ignore.update(all_names(self._delayed_parameters, module))
            named = [*self._managed_parameters(), *self._delayed_parameters]
            arguments.check_parameters(named)
            devices = arguments.resolve_devices(named, device_ids, output_device)
            self.device = devices.device
            self.device_type = devices.device.type
            self.is_multi_device_module = devices.is_multi_device
            self.device_ids = devices.device_ids
            self.output_device = devices.output_device

            if forward_sync_buffers is None:
                self.forward_sync_buffers = self._init_sync_buffers = broadcast_buffers is not False
            else:
                self.forward_sync_buffers, self._init_sync_buffers = forward_sync_buffers, True
            self.find_unused_parameters = find_unused_parameters
            self.gradient_as_bucket_view = gradient_as_bucket_view
            self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
            self.batched_grad_copy = batched_grad_copy
            self.static_graph = static_graph
            self.mixed_precision = mixed_precision
            self._precision: Precision | None = None
            self._reduces_to_mean = reduce == "mean"
            self._plain_state_dict = plain_state_dict
            self._passthrough = passthrough
            self._caps = (bucket_cap_mb, bucket_cap_mb_list)
            self.broadcast_bucket_size = 250 * 1024 * 1024
            self.use_side_stream_for_tensor_copies = True
            self.require_backward_grad_sync = True
            self.require_forward_param_sync = True
            self._make_logger()
            self._ddp_sink_clone = True
            self._buffer_sync = BufferSync()
            self.buffer_hook = None
            self._divide_by_initial_world_size = True
            self._lazy_init_ran = False
            if self.static_graph and self.find_unused_parameters:
                arguments.warn_of_static_and_unused()
            self._build_reducer()
        if init_sync:
            self._verify_same_model()
            self._sync_module_states(0, buffers=self._init_sync_buffers)
        if mixed_precision is not None:
            parameters = self._module_parameters
            buffers = self.named_module_buffers
            self._precision = Precision(mixed_precision, module, parameters, buffers)
            self.reducer.on_backward_end = self._precision.leave
        self._delay_reduction()

    # ---------------------------------------------------------------- construction

    def _build_reducer(self) -> None:
        skip_our_frames()
        parameters, sparse = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters)
        options = ReducerOptions(
            caps=partial(_caps, *self._caps),
            find_unused=self.find_unused_parameters,
            as_views=self.gradient_as_bucket_view,
            skip_unused=self.skip_all_reduce_unused_params,
            mean=self._reduces_to_mean,
            reduce_dtype=reduce_dtype(self.mixed_precision),
        )
        options.caps(True)  # bad sizes are noticed before any collective
        self.reducer = Reducer(
            [(names[index], param) for index, param in enumerate(parameters)],
            sparse,
            self.process_group,
            options,
            static_graph=self.static_graph,
        )
        # The hooks on the parameters must not outlive the wrapper: the module may.
        self._unhook = weakref.finalize(self, self.reducer.remove_hooks)
        self._splits = split_size(self.bucket_bytes_cap)
        if self._traced is not None:
            self._traced.remove()
        if traced.is_asked_for():
            self._unhook()
            self._traced = traced.TracedReduction(self)
            self._unhook = weakref.finalize(self, self._traced.remove)
        self._frozen = [p for _, p in self._managed_parameters() if not p.requires_grad]
        self._has_buffers = bool(self.modules_buffers)
        if self._precision is not None:
            self.reducer.on_backward_end = self._precision.leave
        self._lazy_init_ran = False

    def _make_logger(self) -> None:
        """For torch's functions that take one: what they raise is then in the logging data."""
        let_torch_take_ours()
        self.logger = ErrorLog(self)

    def _delay_reduction(self) -> None:
        self._delayed: DelayedReduction | None = None
        if self._delay_trigger is not None:
            self._delayed = DelayedReduction(
                self.process_group,
                [param for _, param in self._delayed_parameters],
                self._delay_trigger,
                mean=self._reduces_to_mean,
            )
            weakref.finalize(self, self._delayed.remove)

    def _verify_same_model(self) -> None:
        verify_same_model(
            self.process_group,
            self._synced_tensors(buffers=self._init_sync_buffers),
            {slot.name for slot in self.reducer.slots if slot.sparse},
            {
                "bucket_cap_mb": _plain(self._caps[0]),
                "bucket_cap_mb_list": [_plain(cap) for cap in self._caps[1] or ()],
                "forward_sync_buffers": self.forward_sync_buffers,
                "find_unused_parameters": self.find_unused_parameters,
                "static_graph": self.static_graph,
                "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
                "mixed_precision": str(self.mixed_precision),
                "reduce": "mean" if self._reduces_to_mean else "sum",
            },
        )

    def _synced_tensors(self, *, buffers: bool) -> list[tuple[str, Tensor]]:
        """What has to be equal on all ranks, by name."""
        more = self.named_module_buffers if buffers else {}
        return [*self._managed_parameters(), *self._delayed_parameters, *more.items()]

    def _sync_module_states(self, source: int, *, buffers: bool) -> None:
        """Overwrite parameters, and buffers if asked to, with those of rank ``source``."""
        if self.process_group.size() > 1:
            Broadcaster(self.broadcast_bucket_size).run(
                self.process_group,
                [tensor for _, tensor in self._synced_tensors(buffers=buffers)],
                source,
                lambda: f"the broadcast of the model from rank {source}",
            )

    # ---------------------------------------------------------------- lifecycle

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        state = copy.copy(self.__dict__)
        state["_pickled_hooks"] = self._portable_hooks()
        for name in (
            "process_group", "device_mesh", "reducer", "_unhook", "_buffer_sync", "_delayed",
            "_traced", "forward", "logger",
        ):  # fmt: skip
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = _get_default_group()
        self._buffer_sync = BufferSync()
        self._lazy_init_ran = False
        self._make_logger()
        self._build_reducer()
        self._restore_hooks(self.__dict__.pop("_pickled_hooks"))
        self._delay_reduction()

    def _check_default_group(self) -> None:
        if not dist.is_initialized() or self.process_group != _get_default_group():
            raise StateError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. That is, when you have called init_process_group and have not "
                "passed process_group argument to DDP constructor"
            )

    def train(self, mode: bool = True) -> Self:
        """Set the module and the wrapper to training, or to evaluation with ``False``.

        >>> import torch, gradsync
        >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(2, 2))
        >>> ddp.train(False).module.training
        False
        """
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep the hooks when parameters change dtype or device (``ddp.double()``).

        Autograd gives such a parameter a new node, which the old hook is not on.
        """
        if self._precision is not None:
            self._precision.leave()
        kinds = [(param.dtype, param.device) for param in self.module.parameters()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._precision is not None:
            self._precision.refresh(self.named_module_buffers)
        if kinds != [(param.dtype, param.device) for param in self.module.parameters()]:
            if self._delayed is not None:
                self._delayed.remove()
                self._delay_reduction()
            before = self.reducer
            self._build_reducer()
            self.reducer.take_over(before)
            self.device = next(self.module.parameters()).device
        return self

    def _unfreeze(self) -> None:
        """Parameters that were frozen at construction train now: reduce them from now on."""
        self.reducer.raise_deferred()
        before = self.reducer
        self._build_reducer()
        self._verify_same_model()
        self.reducer.take_over(before)

    def _set_static_graph(self) -> None:
        """Promise a static graph after construction, before the first backward."""
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        self.reducer.set_static_graph()
        self.static_graph = True
        if self.find_unused_parameters:
            arguments.warn_of_static_and_unused()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Reduce over other ranks from now on; the plan is made anew there.

        Hooks and weights stay. A rank outside the new group keeps its old one.
        """
        if not isinstance(new_process_group, dist.ProcessGroup | dist.GroupMember | int):
            raise ArgumentError(
                "new_process_group must be a torch.distributed.ProcessGroup, got "
                f"{type(new_process_group).__name__}."
            )
        if not _rank_not_in_group(new_process_group):
            self.process_group = new_process_group
        self.reducer.reset(self.process_group)


def _plain(number: float | None) -> float | None:
    """As Python's own number: numpy's cannot be compared as text."""
    return None if number is None else int(number) if number == int(number) else float(number)


def _caps(
    cap_mb: float | None, cap_mb_list: Sequence[float] | None, will_rebuild: bool
) -> BucketCaps:
    return bucket_caps(cap_mb, cap_mb_list, will_rebuild=will_rebuild)
