"""Names of torch's DDP that callers use and that have no part in a training step.

Kept apart so that the wrapper shows the step and nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs
from torch.nn.parameter import Parameter

from gradsync.ddp.buffers import list_buffers, named_buffers
from gradsync.ddp.collectives import Broadcaster
from gradsync.ddp.logging_data import logging_data
from gradsync.ddp.stats import Stats, collect
from gradsync.errors import ArgumentError

if TYPE_CHECKING:
    import weakref

    from gradsync.ddp.reducer import Reducer


class TorchSurface(nn.Module):
    """Base of ``DistributedDataParallel``: what torch's class has besides."""

    module: nn.Module
    reducer: "Reducer"
    process_group: dist.ProcessGroup
    parameters_to_ignore: set[str]
    dim: int
    device_type: str
    use_side_stream_for_tensor_copies: bool
    forward_sync_buffers: bool
    broadcast_bucket_size: int
    _ddp_sink_clone: bool
    _unhook: "weakref.finalize[Any, Any]"

    def _managed_parameters(self) -> list[tuple[str, Parameter]]:
        """Parameters that DDP looks after, each once, under its first name not ignored."""
        found: dict[Parameter, str] = {}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            if name not in self.parameters_to_ignore:
                found.setdefault(param, name)
        return [(name, param) for param, name in found.items()]

    def _build_params_for_reducer(self) -> tuple[list[Parameter], list[bool]]:
        """The parameters to reduce, and for each whether its gradient will be sparse."""
        sparse = {
            param
            for submodule in self.module.modules()
            if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse
            for param in submodule.parameters(recurse=False)
        }
        parameters = [p for _, p in self._managed_parameters() if p.requires_grad]
        return parameters, [param in sparse for param in parameters]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[Parameter]) -> dict[int, str]:
        """The name of each of ``parameters``, which must be all that are reduced."""
        index_of = {param: index for index, param in enumerate(parameters)}
        names = {}
        for name, param in self._managed_parameters():
            if param.requires_grad:
                if param not in index_of:
                    raise ArgumentError(
                        f"Param with name {name} found in module parameters, but not DDP "
                        "parameters."
                    )
                names[index_of[param]] = name
        if len(names) != len(index_of):
            raise ArgumentError(
                "Expected param to name mapping to cover all parameters, but got conflicting "
                f"lengths: {len(index_of)} vs {len(names)}."
            )
        return names

    @property
    def broadcast_buffers(self) -> bool:
        """Old name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are kept equal; programs may replace them, so they are listed anew."""
        return list_buffers(self.module, self.parameters_to_ignore)

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The same by name."""
        return named_buffers(self.module, self.parameters_to_ignore)

    def _remove_autograd_hooks(self) -> None:
        """Let go of the module's parameters: no backward is reduced from now on."""
        self._unhook()

    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, Tensor]) -> None:
        """Announce which rows the sparse gradients of all ranks together have, by parameter.

        Their values are then reduced without an exchange of indices. Holds until set anew, and has
        to be the same on all ranks.
        """
        self.reducer.expect_rows(global_unique_ids)

    def _check_reducer_finalized(self) -> None:
        """Raise if the last backward was not reduced."""
        self.reducer.check_finalized()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """For torch's sake: outputs are passed on as they are, never cloned."""
        self._ddp_sink_clone = val

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Facts about this object under the names that torch's logging data has."""
        return logging_data(self)  # type: ignore[arg-type]

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """For torch's callers: overwrite ``tensors`` with those of one rank."""
        Broadcaster(buffer_size).run(
            self.process_group, tensors, authoritative_rank, lambda: "a broadcast of tensors"
        )

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """For buffer hooks: the broadcast that there is without a hook."""
        self._distributed_broadcast_coalesced(
            self.modules_buffers if bufs is None else bufs,
            self.broadcast_bucket_size if bucket_size is None else bucket_size,
            authoritative_rank,
        )

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """How often the times in the logging data are renewed, after the first ten steps."""
        if sample_rate < 1:
            raise self.reducer.failed(
                ArgumentError(
                    "DDP runtime logging sample rate should be equal or greater than 1, got "
                    f"{sample_rate!r}."
                )
            )
        self.reducer.clock.sample_rate = sample_rate

    def stats(self) -> Stats:
        """Buckets, bytes and times of this rank; see ``gradsync.Stats``.

        >>> import torch, gradsync
        >>> gradsync.DistributedDataParallel(torch.nn.Linear(4, 2)).stats().bytes
        40
        """
        return collect(self.reducer)

    @property
    def bucket_bytes_cap(self) -> int:
        """The bucket size that was asked for, in bytes."""
        return self.reducer.layout.caps.cap_bytes

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """The sizes of ``bucket_cap_mb_list`` in bytes."""
        return list(self.reducer.layout.caps.caps_given)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.has_rebuilt

    @property
    def _module_parameters(self) -> list[Parameter]:
        return [param for _, param in self._managed_parameters()]

    @property
    def _distributed_rank(self) -> int:
        return self.process_group.rank()

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int]) -> Any:
        """For torch's callers: split inputs along ``dim`` over devices."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """For torch's callers: move inputs to a device."""
        device = torch.device(self.device_type, device_id)
        return _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)

    def gather(self, outputs: Any, output_device: int) -> Any:
        """For torch's callers: join outputs along ``dim`` on a device."""
        return gather(outputs, output_device, dim=self.dim)

    @staticmethod
    def _get_data_parallel_params(
        module: nn.Module, named_params: bool = False
    ) -> Iterator[Parameter | tuple[str, Parameter]]:
        """The parameters of ``module`` that are not marked as ignored."""
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Before wrapping: parameters and buffers, by full name, for DDP to leave alone."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]
