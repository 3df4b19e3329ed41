"""What torch's DDP tells about itself in ``_get_ddp_logging_data``, under the same names."""

import os
from typing import TYPE_CHECKING, Any

import torch

from gradsync.ddp.clock import Sample
from gradsync.ddp.comm_hook import name_of

if TYPE_CHECKING:
    from gradsync.ddp.wrapper import DistributedDataParallel

_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}


def logging_data(ddp: "DistributedDataParallel") -> dict[str, Any]:
    """The dictionary, with the keys that make sense here."""
    reducer = ddp.reducer
    params = [slot.param for slot in reducer.slots]
    sizes = ", ".join(str(bucket.nbytes) for bucket in reducer.buckets if bucket.slots)
    data: dict[str, Any] = {
        "world_size": reducer.world,
        "rank": reducer.rank,
        "iteration": reducer.clock.sample.iteration,
        "module_name": type(ddp.module).__name__,
        "device_ids": ", ".join(map(str, ddp.device_ids or ())),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "backend_name": _backend_name(ddp),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "dtypes": ", ".join(sorted({_DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in params})),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in params),
        "num_parameter_tensors": len(params),
        "bucket_sizes": sizes,
        "unused_parameter_size": sum(slot.nbytes for slot in reducer.unused),
        "has_sync_bn": int(any(type(m).__name__ == "SyncBatchNorm" for m in ddp.module.modules())),
        "has_rebuilt_buckets": int(reducer.has_rebuilt),
        "num_buckets_reduced": reducer.buckets_reduced,
        "can_set_static_graph": reducer.graph_is_static and reducer.step > 0,
        "has_error": int(reducer.last_error is not None),
        **{
            name.lower(): os.environ.get(name, "N/A")
            for name in (
                "MASTER_PORT",
                "MASTER_ADDR",
                "CUDA_VISIBLE_DEVICES",
                "TORCH_DISTRIBUTED_DEBUG",
            )
        },
    }
    data |= _times(reducer.clock.sample)
    if data["backend_name"] == "gloo":
        data |= {
            "gloo_socket_ifname": os.environ.get("GLOO_SOCKET_IFNAME", "N/A"),
            "gloo_device_transport": os.environ.get("GLOO_DEVICE_TRANSPORT", "N/A"),
            "gloo_num_threads": 2,  # what torch makes its groups with
        }
    for hook, _ in ddp._comm_hooks:
        data["comm_hook"] = name_of(hook)
    if ddp._had_uneven_inputs:
        data["join_uneven_inputs"] = True
    if reducer.arrival_order:
        data["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, reducer.arrival_order))
    if reducer.has_rebuilt:
        data["rebuilt_bucket_sizes"] = sizes
        data["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(str(slot.index) for slot in bucket.slots)
            for bucket in reducer.buckets
            if bucket.slots
        )
    if reducer.last_error is not None:
        data["error"] = reducer.last_error
    return data


def _times(sample: Sample) -> dict[str, int]:
    """Torch's keys for the times of a sampled step, in nanoseconds."""
    found = {}
    for prefix, times in (("", sample.last), ("avg_", sample.mean)):
        found[f"{prefix}forward_compute_time"] = _ns(times.forward)
        found[f"{prefix}backward_compute_time"] = _ns(times.backward)
        found[f"{prefix}backward_comm_time"] = _ns(times.communication)
        found[f"{prefix}backward_compute_comm_overlap_time"] = _ns(times.overlapped)
    return found | {name: _ns(seconds) for name, seconds in sample.marks.items()}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _backend_name(ddp: "DistributedDataParallel") -> str:
    name: str = ddp.process_group.name()
    return name.lower().removeprefix("processgroup")
