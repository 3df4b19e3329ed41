"""Checks of the constructor's arguments and of the module that is to be wrapped."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _get_device_index
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import Parameter, UninitializedParameter

from gradsync.errors import ArgumentError, StateError


@dataclass(frozen=True)
class Devices:
    """Where the module is, and where its inputs and outputs go."""

    device: torch.device
    is_multi_device: bool
    device_ids: list[int] | None
    output_device: int | None


def check_flags(**flags: object) -> None:
    """Raise for switches that are neither on nor off: "no" would count as yes."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"{name} must be True or False, got {value!r}.")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise for a value that is not among ``choices``."""
    if value not in choices:
        raise ArgumentError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}."
        )


def warn_of_deprecated(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None, check_reduction: bool
) -> None:
    """Warn of arguments that torch has deprecated."""
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        warnings.warn(
            "Both `broadcast_buffers` and `forward_sync_buffers` were given: `broadcast_buffers` "
            "is deprecated and ignored.",
            FutureWarning,
            stacklevel=3,
        )
    elif broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers`; but note that "
            "`broadcast_buffers=False` also leaves buffers alone at construction, and "
            "`forward_sync_buffers=False` does not.",
            FutureWarning,
            stacklevel=3,
        )
    if check_reduction:
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated: it "
            "does nothing. Leave it out.",
            FutureWarning,
            stacklevel=3,
        )


def warn_of_static_and_unused() -> None:
    """Warn that ``static_graph`` makes ``find_unused_parameters`` superfluous."""
    warnings.warn(
        "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` "
        "will detect unused parameters automatically, so you do not need it: leave it out. They "
        "must not change during training.",
        stacklevel=3,
    )


def check_parameters(parameters: Sequence[tuple[str, Parameter]]) -> None:
    """Raise ``StateError`` if there is nothing to train, or not yet."""
    if not any(param.requires_grad for _, param in parameters):
        raise StateError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            "requires a gradient. Call the module itself, or unfreeze a parameter first."
        )
    for name, param in parameters:
        if isinstance(param, UninitializedParameter):
            raise StateError(
                "Modules with uninitialized parameters can't be used with "
                f"`DistributedDataParallel`: {name} has no shape yet. Run a dummy forward pass to "
                "correctly initialize the modules"
            )


def resolve_devices(
    parameters: Sequence[tuple[str, Parameter]],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> Devices:
    """Where the module is; raises ``ArgumentError`` if it or the arguments cannot work."""
    if device_ids is not None and not isinstance(device_ids, Sequence):
        raise ArgumentError(
            f"device_ids must be a list of one device, or None, got {device_ids!r}."
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ArgumentError(
            "device_ids can only be None or contain a single element, got "
            f"{list(device_ids)}: run one process for each device."
        )
    first: dict[str, str] = {}
    for name, param in parameters:
        first.setdefault(param.device.type, name)
    if len(first) != 1:
        places = ", ".join(f"{name} on {kind}" for kind, name in first.items())
        raise ArgumentError(
            "DistributedDataParallel's input module must be on the same type of devices, but "
            f"input module parameters locate in {set(first)} ({places})."
        )
    devices = {param.device for _, param in parameters}
    device = parameters[0][1].device
    if not device_ids or device.type == "cpu" or len(devices) > 1:
        if device_ids or output_device is not None:
            raise ArgumentError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters {devices}. "
                "Leave both out."
            )
        return Devices(device, len(devices) > 1, None, None)
    ids = [_get_device_index(each, True) for each in device_ids]
    output = ids[0] if output_device is None else _get_device_index(output_device, True)
    return Devices(device, False, ids, output)


def resolve_group(
    module: nn.Module, process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None
) -> dist.ProcessGroup:
    """The group to reduce over.

    With a mesh that is sliced from a larger one, the module's DTensors are made local first.
    """
    if process_group is not None and device_mesh is not None:
        raise StateError(
            "Cannot specify both process_group and device_mesh arguments. Leave one of them out."
        )
    if device_mesh is not None:
        if not isinstance(device_mesh, DeviceMesh):
            raise ArgumentError(
                f"device_mesh must be a DeviceMesh, got {type(device_mesh).__name__}."
            )
        if device_mesh.ndim != 1:
            raise StateError(
                f"Only 1D device mesh is supported, but got {device_mesh}. Slice the data-parallel "
                'dimension out of it, as in mesh["dp"].'
            )
        if device_mesh._get_root_mesh() != device_mesh:
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

            _pre_dp_module_transform(module)
        return device_mesh.get_group(mesh_dim=0)
    if process_group is not None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise ArgumentError(
                "process_group must be a torch.distributed.ProcessGroup, got "
                f"{type(process_group).__name__}; this rank may not be a member of the group."
            )
        return process_group
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group, or pass process_group."
        )
    return dist.distributed_c10d._get_default_group()
