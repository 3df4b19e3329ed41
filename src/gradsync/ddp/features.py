"""What can be added to a ``DistributedDataParallel``: hooks, uneven inputs, optimizers in backward.

Each method here hands over to the file of its feature.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from gradsync.ddp import overlap_optim
from gradsync.ddp.autograd import in_backward
from gradsync.ddp.buffers import BufferHook
from gradsync.ddp.comm_hook import BuiltinHook, CommHook, Hook, Portable, check_hook
from gradsync.ddp.delayed import DelayedReduction
from gradsync.ddp.join import DDPJoinHook, UnevenInputs
from gradsync.ddp.surface import TorchSurface
from gradsync.ddp.traced import TracedReduction
from gradsync.errors import ArgumentError, HookTypeError, StateError

if TYPE_CHECKING:
    import torch.distributed as dist


class Features(TorchSurface, Joinable):
    """Base of ``DistributedDataParallel``: registration of what is not there by default."""

    device: torch.device
    buffer_hook: BufferHook | None
    _traced: TracedReduction | None = None
    _divide_by_initial_world_size: bool
    _had_uneven_inputs = False  # has been in a join context
    _plain_state_dict: bool
    _passthrough: bool
    _delayed: DelayedReduction | None

    # ---------------------------------------------------------------- hooks

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let ``hook`` reduce each bucket, in place of the averaging all-reduce.

        It is called as ``hook(state, bucket)`` when a bucket is full, ``bucket`` having torch's
        ``GradBucket`` interface, and returns a ``torch.futures.Future`` of the tensor that
        becomes the gradients. Gradients are not divided by the world size before. Once only, and
        not while a backward runs; the hooks of ``gradsync.hooks`` and of
        ``torch.distributed.algorithms.ddp_comm_hooks`` can be used.

        >>> import torch, gradsync
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> ddp.register_comm_hook(None, allreduce_hook)
        >>> ddp(torch.ones(8, 4)).sum().backward()
        >>> ddp.module.bias.grad
        tensor([8., 8.])
        """
        try:
            check_hook(hook)
        except (ArgumentError, HookTypeError) as error:
            raise self.reducer.failed(error) from None
        self._register_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        """Register one of torch's built-in hooks by its type."""
        self._register_hook(self.process_group, BuiltinHook(comm_hook_type))

    def _register_hook(self, state: object, hook: Hook) -> None:
        if not self.reducer.options.mean:
            raise self.reducer.failed(
                StateError(
                    'reduce="sum" and a communication hook exclude each other: the hook decides.'
                )
            )
        if self._traced is not None:
            self._traced.hooks.append((hook, state))
        else:
            self.reducer.register_hook(hook, state)

    @property
    def _comm_hooks(self) -> list[tuple[Hook, object]]:
        reduction = self.reducer.queue.reduction
        return [(reduction.hook, reduction.state)] if isinstance(reduction, CommHook) else []

    def _portable_hooks(self) -> list[tuple[Hook, object]]:
        """The same for another process, which has a process group of its own."""
        return [
            (hook, Portable.OWN_GROUP if state is self.process_group else state)
            for hook, state in self._comm_hooks
        ]

    def _restore_hooks(self, hooks: list[tuple[Hook, object]]) -> None:
        for hook, state in hooks:
            own = state is Portable.OWN_GROUP
            self.reducer.register_hook(hook, self.process_group if own else state)

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: Callable[[Any, dict[str, torch.Tensor]], Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, buffers by name)`` make the buffers equal, before or after forward.

        If it returns a list of futures, they are waited for at the end of the backward.
        """
        if not callable(hook):
            raise AssertionError(f"hook must be callable, got {type(hook).__name__}")
        if not isinstance(comm_hook_location, _BufferCommHookLocation):
            raise ArgumentError(
                "comm_hook_location must be _BufferCommHookLocation.PRE_FORWARD or POST_FORWARD, "
                f"got {comm_hook_location!r}."
            )
        before = comm_hook_location is _BufferCommHookLocation.PRE_FORWARD
        self.buffer_hook = BufferHook(hook, state, before_forward=before)

    # ---------------------------------------------------------------- uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train although some ranks have more batches than others; a context for the loop.

        A rank that is done mirrors the collectives of the others until all are, and then all
        take the model of the last one. With other joinables (``ZeroRedundancyOptimizer``) use
        ``torch.distributed.algorithms.Join([ddp, optimizer])``.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks; with False
                by that of the ranks that still have inputs.
            enable: with False this does nothing.
            throw_on_early_termination: raise on all ranks as soon as one is done, before it has
                to mirror anything: for models with collectives of their own.

        >>> import torch, gradsync
        >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> with ddp.join():
        ...     for batch in (torch.ones(8, 4),):
        ...         ddp(batch).sum().backward()
        >>> ddp.module.bias.grad
        tensor([8., 8.])
        """
        return UnevenInputs(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """For ``Join``: what this module does on a rank that has joined.

        >>> import torch, gradsync
        >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> type(ddp.join_hook(divide_by_initial_world_size=False)).__name__
        'DDPJoinHook'
        """
        divide_by_initial = kwargs.get("divide_by_initial_world_size", True)
        return DDPJoinHook(self, divide_by_initial=divide_by_initial)  # type: ignore[arg-type]

    @property
    def join_device(self) -> torch.device:
        """For ``Join``: where its collectives run."""
        return self.device

    @property
    def join_process_group(self) -> "dist.ProcessGroup":
        """For ``Join``: over which ranks."""
        return self.process_group

    # ---------------------------------------------------------------- beyond torch

    def sync_grads(self) -> None:
        """Reduce the gradients as they are now, without a backward; all ranks have to call it.

        For gradients of ``no_sync`` or set by hand. A parameter that has a gradient on some ranks
        gets the average on all, one that has none anywhere keeps None.

        >>> import torch, gradsync
        >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> with ddp.no_sync():
        ...     ddp(torch.ones(8, 4)).sum().backward()
        >>> ddp.sync_grads()
        >>> ddp.module.bias.grad
        tensor([8., 8.])
        """
        if in_backward():
            raise StateError(
                "sync_grads() was called inside a backward, where gradients are still to come: "
                "call it when backward() has returned."
            )
        self.reducer.reduce_now()
        if self._delayed is not None:
            self._delayed.reduce()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state; names begin with ``module.`` unless ``plain_state_dict``.

        >>> import torch, gradsync
        >>> module = torch.nn.Linear(4, 2)
        >>> list(gradsync.DistributedDataParallel(module, plain_state_dict=True).state_dict())
        ['weight', 'bias']
        """
        # As part of a larger module the names stay torch's: it loads by them.
        if self._plain_state_dict and not args and kwargs.get("destination") is None:
            return self.module.state_dict(**kwargs)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load what ``state_dict`` gave; with ``plain_state_dict``, with or without prefix.

        >>> import torch, gradsync
        >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 2), plain_state_dict=True)
        >>> ddp.load_state_dict({"module.weight": torch.ones(2, 4), "module.bias": torch.ones(2)})
        <All keys matched successfully>
        """
        if not self._plain_state_dict:
            return super().load_state_dict(state_dict, *args, **kwargs)
        if not set(self.module.state_dict()) & set(state_dict):
            state_dict = copy.copy(state_dict)  # with its metadata
            consume_prefix_in_state_dict_if_present(state_dict, "module.")  # type: ignore[arg-type]
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_passthrough" or name == "module" or not self._passthrough:
                raise
            return getattr(self.module, name)

    # ---------------------------------------------------------------- optimizers in backward

    def optimize_in_backward(
        self,
        optimizer: type[Optimizer],
        parameters: Iterable[Parameter] | None = None,
        **arguments: Any,
    ) -> None:
        """Step parameters inside the backward, each bucket as soon as it is reduced.

        ``optimizer`` is made once for each of ``parameters`` (default: all that are trained) with
        ``arguments``. The weights are those of the plain loop. Gradients are None after the
        backward, so they cannot be clipped or accumulated by ``no_sync``.

        >>> import torch, gradsync
        >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> ddp.optimize_in_backward(torch.optim.SGD, lr=0.1)
        >>> before = ddp.module.bias.detach().clone()
        >>> ddp(torch.ones(1, 4)).sum().backward()  # steps as well
        >>> before - ddp.module.bias.detach()
        tensor([0.1000, 0.1000])
        """
        given: object = optimizer
        if not (isinstance(given, type) and issubclass(given, Optimizer)):
            raise ArgumentError(
                f"optimizer must be a class of torch.optim, got {optimizer!r}: it is made here, "
                "once for each parameter."
            )
        trained = [slot.param for slot in self.reducer.slots]
        chosen = trained if parameters is None else list(parameters)
        overlap_optim.check(chosen, trained)
        overlap_optim.mark(optimizer, chosen, arguments)
        self._setup_in_backward_optimizers()

    def _setup_in_backward_optimizers(self) -> None:
        """Run the optimizers of parameters that are marked to be stepped in the backward."""
        if overlap_optim.take_hooks_off(self._module_parameters):
            self.reducer.queue.on_reduced = overlap_optim.step

    def _register_fused_optim(
        self,
        optim: type[Optimizer],
        *args: Any,
        optim_params: Iterable[Parameter] | None = None,
        **kwargs: Any,
    ) -> None:
        """Torch's way to step in the backward: its functional optimizers, as a hook."""
        from torch.distributed.algorithms._optimizer_overlap import optimizer_overlap

        overlapped = optimizer_overlap._as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise StateError(
                f"{optim} does not support overlapped DDP. Use optimize_in_backward, which takes "
                "any optimizer."
            ) from error
