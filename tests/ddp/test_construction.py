"""The constructor: its arguments, its errors, and replicas that start equal."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from replicas import (
    CLASSES,
    Count,
    OurDDP,
    TorchDDP,
    assert_equal_on_all_ranks,
    batch,
    caught,
    frozen,
    mixed_devices,
    quiet,
    small,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from gradsync import ArgumentError, GradsyncError
from gradsync.testing import WorkerPool

LIMIT = 40.0


class TestSignature:
    def test_names_order_and_defaults_are_torchs_and_ours_follow_by_keyword(self) -> None:
        ours, torchs = (inspect.signature(cls.__init__).parameters for cls in (OurDDP, TorchDDP))
        assert list(ours)[: len(torchs)] == list(torchs)
        for name, parameter in torchs.items():
            assert ours[name].default == parameter.default, name
            assert ours[name].kind == parameter.kind, name
        more = list(ours.values())[len(torchs) :]
        assert {"reduce", "plain_state_dict", "passthrough"} <= {each.name for each in more}
        for parameter in more:
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter.name
            assert parameter.default is not inspect.Parameter.empty, parameter.name

    def test_attributes_that_programs_read_have_torchs_values(self, pool: WorkerPool) -> None:
        names = [
            "device_ids",
            "output_device",
            "dim",
            "device",
            "device_type",
            "is_multi_device_module",
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "static_graph",
            "broadcast_buffers",
            "forward_sync_buffers",
            "require_backward_grad_sync",
            "require_forward_param_sync",
            "parameters_to_ignore",
            "bucket_bytes_cap",
            "mixed_precision",
            "broadcast_bucket_size",
            "skip_all_reduce_unused_params",
            "training",
            "_has_rebuilt_buckets",
        ]

        def run(rank: int, world: int) -> None:
            variants: list[dict[str, object]] = [
                {},
                {"find_unused_parameters": True, "gradient_as_bucket_view": True, "dim": 1},
                {"static_graph": True, "bucket_cap_mb": 3, "forward_sync_buffers": False},
                {"broadcast_buffers": False, "skip_all_reduce_unused_params": True},
                {"broadcast_buffers": False, "forward_sync_buffers": True},
            ]
            for options in variants:
                module = nn.BatchNorm1d(2)
                with quiet():
                    torchs, ours = (cls(module, **options) for cls in CLASSES)
                for name in names:
                    left, right = getattr(torchs, name), getattr(ours, name)
                    assert left == right, f"{name}: torch {left}, ours {right}, {options}"
                assert ours.module is module
                assert ours.process_group is torchs.process_group
                assert [b.shape for b in ours.modules_buffers] == [
                    b.shape for b in torchs.modules_buffers
                ]
                torchs._remove_autograd_hooks()

        pool.run(run, ranks=1, timeout=LIMIT)


# What is wrong, and words that the message must have: the argument's name first.
WRONG: dict[str, tuple[Callable[[], dict[str, object]], type[Exception], list[str]]] = {
    "module is a function": (lambda: {"module": torch.relu}, ValueError, ["module"]),
    "module is a class": (lambda: {"module": nn.Linear}, ValueError, ["module"]),
    "module is None": (lambda: {"module": None}, ValueError, ["module", "NoneType"]),
    "no parameter": (
        lambda: {"module": nn.ReLU()},
        RuntimeError,
        ["module doesn't have any parameter that requires a gradient"],
    ),
    "all parameters frozen": (
        lambda: {"module": frozen()},
        RuntimeError,
        ["module doesn't have any parameter that requires a gradient"],
    ),
    "lazy parameters": (
        lambda: {"module": nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))},
        RuntimeError,
        ["Modules with uninitialized parameters", "1.weight", "dummy forward"],
    ),
    "device_ids on CPU": (lambda: {"device_ids": [0]}, ValueError, ["device_ids", "cpu"]),
    "output_device on CPU": (lambda: {"output_device": 0}, ValueError, ["output_device"]),
    "two device_ids": (
        lambda: {"device_ids": [0, 1]},
        ValueError,
        ["device_ids can only be None or contain a single element", "[0, 1]"],
    ),
    "mixed device types": (
        lambda: {"module": mixed_devices()},
        ValueError,
        ["same type of devices", "0.weight on cpu", "1.weight on meta"],
    ),
    "process_group of another type": (
        lambda: {"process_group": "gloo"},
        ValueError,
        ["process_group", "str"],
    ),
    "mesh of another type": (lambda: {"device_mesh": "cpu"}, ValueError, ["device_mesh", "str"]),
    "device_ids is a number": (lambda: {"device_ids": 0}, ValueError, ["device_ids", "0"]),
    "dim is text": (lambda: {"dim": "rows"}, ValueError, ["dim", "rows"]),
    "group and mesh": (
        lambda: {
            "process_group": dist.group.WORLD,
            "device_mesh": init_device_mesh("cpu", (1,)),
        },
        RuntimeError,
        ["Cannot specify both process_group and device_mesh"],
    ),
    "2-D mesh": (
        lambda: {"device_mesh": init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))},
        RuntimeError,
        ["Only 1D device mesh is supported", 'mesh["dp"]'],
    ),
    "negative cap": (lambda: {"bucket_cap_mb": -1}, ValueError, ["bucket_cap_mb", "-1"]),
    "nan cap": (lambda: {"bucket_cap_mb": math.nan}, ValueError, ["bucket_cap_mb", "nan"]),
    "text cap": (lambda: {"bucket_cap_mb": "25"}, ValueError, ["bucket_cap_mb", "'25'"]),
    "boolean cap": (lambda: {"bucket_cap_mb": True}, ValueError, ["bucket_cap_mb", "True"]),
    "negative in the list": (
        lambda: {"bucket_cap_mb_list": [1, -2]},
        ValueError,
        ["bucket_cap_mb_list", "-2"],
    ),
    "text in the list": (
        lambda: {"bucket_cap_mb_list": ["1"]},
        ValueError,
        ["bucket_cap_mb_list", "'1'"],
    ),
    "list is a number": (
        lambda: {"bucket_cap_mb_list": 3},
        ValueError,
        ["bucket_cap_mb_list", "3"],
    ),
    "half of the delayed all-reduce": (
        lambda: {"delay_all_reduce_named_params": [("weight", small().weight)]},
        ValueError,
        ["delay_all_reduce_named_params and param_to_hook_all_reduce need to be set"],
    ),
    "the other half": (
        lambda: {"param_to_hook_all_reduce": small().weight},
        ValueError,
        ["delay_all_reduce_named_params and param_to_hook_all_reduce need to be set"],
    ),
    "delayed all-reduce of another module": (
        lambda: {
            "delay_all_reduce_named_params": [("weight", small().weight)],
            "param_to_hook_all_reduce": small().weight,
        },
        ValueError,
        ["delay_all_reduce_named_params", "weight"],
    ),
    "mixed precision that names no dtype": (
        lambda: {"mixed_precision": object()},
        ValueError,
        ["mixed_precision", "param_dtype"],
    ),
    "a reduction that there is not": (
        lambda: {"reduce": "max"},
        ValueError,
        ["reduce", "mean", "sum", "max"],
    ),
    "plain_state_dict is no flag": (
        lambda: {"plain_state_dict": "yes"},
        ValueError,
        ["plain_state_dict", "yes"],
    ),
    "passthrough is no flag": (lambda: {"passthrough": 1}, ValueError, ["passthrough", "1"]),
}


class TestWrongArguments:
    def test_each_is_refused_with_a_message_that_names_it(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> dict[str, BaseException | str]:
            found: dict[str, BaseException | str] = {}
            for case, (make, _, _) in WRONG.items():
                options = {"module": small(), **make()}
                count = Count()
                try:
                    OurDDP(**options)
                    found[case] = "nothing was raised"
                except Exception as error:
                    found[case] = error.with_traceback(None)
                    assert count() == 0, f"{case}: a collective came before the error"
            return found

        [found] = pool.run(run, ranks=1, timeout=LIMIT)
        wrong = []
        for case, (_, kind, words) in WRONG.items():
            error = found[case]
            if not isinstance(error, kind) or any(word not in str(error) for word in words):
                wrong.append(f"{case}: {error!r} is no {kind.__name__} with {words}")
            elif not isinstance(error, GradsyncError):
                wrong.append(f"{case}: {error!r} is not in our tree of errors")
        assert not wrong, "\n".join(wrong)

    def test_without_a_process_group_the_error_has_torchs_words(self) -> None:
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            OurDDP(small())

    def test_a_refused_module_has_no_hooks_left(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            module = small()
            caught(lambda: OurDDP(module, bucket_cap_mb=-1), ArgumentError)
            count = Count()
            module(batch(rank)).sum().backward()
            assert count() == 0
            assert torch.equal(module.bias.grad, torch.full((2,), 3.0))

        pool.run(run, timeout=LIMIT)

    def test_deprecated_arguments_warn(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for options, word in [
                ({"broadcast_buffers": True}, "forward_sync_buffers"),
                ({"broadcast_buffers": False}, "forward_sync_buffers"),
                ({"broadcast_buffers": True, "forward_sync_buffers": True}, "ignored"),
                ({"check_reduction": True}, "check_reduction"),
            ]:
                with pytest.warns(FutureWarning, match=word) as record:
                    OurDDP(small(), **options)
                assert record[0].filename.endswith("test_construction.py"), record[0].filename
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                OurDDP(small(), forward_sync_buffers=True)
                OurDDP(small())

        pool.run(run, ranks=1, timeout=LIMIT)


class TestStart:
    def test_all_replicas_start_as_rank_0_with_all_dtypes_and_layouts(
        self, pool: WorkerPool
    ) -> None:
        class Many(nn.Module):
            def __init__(self, seed: int) -> None:
                super().__init__()
                torch.manual_seed(seed)
                self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
                self.half = nn.Linear(3, 3).half()
                self.double = nn.Linear(3, 3).double()
                self.bf16 = nn.Linear(3, 3).bfloat16()
                self.scalar = nn.Parameter(torch.rand(()))
                self.empty = nn.Parameter(torch.rand(0, 3))
                self.transposed = nn.Parameter(torch.rand(5, 2).t())
                self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
                self.register_buffer("count", torch.tensor(seed))
                self.register_buffer("mask", torch.rand(5) > 0.5)
                self.register_buffer("hidden", torch.rand(5), persistent=False)
                self.register_buffer("strided", torch.rand(6, 4)[::2, ::2])

        def run(rank: int, world: int) -> None:
            module, first = Many(rank), Many(0)
            before = [p.data_ptr() for p in module.parameters()]
            strides = [p.stride() for p in module.parameters()]
            OurDDP(module)
            assert [p.data_ptr() for p in module.parameters()] == before
            assert [p.stride() for p in module.parameters()] == strides
            for got, expected in zip(
                (*module.parameters(), *module.buffers()),
                (*first.parameters(), *first.buffers()),
                strict=True,
            ):
                assert torch.equal(got, expected)

        for ranks in (2, 3):
            pool.run(run, ranks=ranks, timeout=LIMIT)

    def test_without_init_sync_no_collective_is_issued_and_weights_stay(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            for cls in CLASSES:
                torch.manual_seed(rank)
                module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
                before = [p.clone() for p in module.parameters()]
                count = Count()
                cls(module, init_sync=False)
                assert count() == 0, cls
                assert all(map(torch.equal, before, module.parameters()))

        pool.run(run, timeout=LIMIT)

    def test_no_more_collectives_than_torch(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            counts = []
            for cls in CLASSES:
                count = Count()
                cls(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
                counts.append(count())
            torchs, ours = counts
            assert ours <= torchs

        pool.run(run, timeout=LIMIT)


class TestMesh:
    def test_a_one_dimensional_mesh_is_its_group(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            mesh = init_device_mesh("cpu", (world,))
            torch.manual_seed(rank)
            ddp = OurDDP(small(), device_mesh=mesh)
            assert ddp.device_mesh is mesh
            assert ddp.process_group is mesh.get_group()
            ddp(batch(rank)).sum().backward()
            assert_equal_on_all_ranks((*ddp.parameters(), ddp.module.weight.grad))

        pool.run(run, timeout=LIMIT)

    def test_a_slice_of_a_mesh_averages_over_its_own_ranks_only(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
            torch.manual_seed(0)
            ddp = OurDDP(small(), device_mesh=mesh["dp"])
            ddp(torch.full((1, 4), float(rank))).sum().backward()
            peers = (0, 2) if rank % 2 == 0 else (1, 3)
            assert torch.equal(ddp.module.weight.grad, torch.full((2, 4), sum(peers) / 2))

        pool.run(run, ranks=4, timeout=LIMIT)

    def test_with_tensor_parallel_it_trains_as_one_process_does(self, pool: WorkerPool) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(3)
                self.up = nn.Linear(4, 8)
                self.down = nn.Linear(8, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.down(torch.relu(self.up(x)))

        def run(rank: int, world: int) -> None:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            replica = mesh.get_local_rank("dp")
            model = parallelize_module(
                Net(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            ddp = OurDDP(model, device_mesh=mesh["dp"])
            local = Net()
            optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
            reference = torch.optim.SGD(local.parameters(), 0.1)
            for step in range(3):
                optimizer.zero_grad()
                ddp(batch(replica, step)).square().mean().backward()
                optimizer.step()
                reference.zero_grad()
                joined = torch.cat([batch(0, step), batch(1, step)])
                local(joined).square().mean().backward()
                reference.step()
            x = batch(9)
            torch.testing.assert_close(ddp(x), local(x))

        pool.run(run, ranks=4, timeout=LIMIT)
