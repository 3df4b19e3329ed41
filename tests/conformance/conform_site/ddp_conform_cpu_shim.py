"""Lets tests that ask for GPUs run on the CPU, where «the GPU» then is the CPU.

Most of PyTorch's DDP tests are gated on two GPUs, though few of them test
anything about a GPU.  With this shim the gates are open, a move to a GPU does
nothing, a GPU named as the device of a new tensor means the CPU, and the
candidate's constructor does not see device_ids and output_device.

Big images become small ones, as some tests would else run for hours.

A test that does need a GPU fails under the shim with torch's own class too.  So
a run with the shim has meaning only next to a baseline made with it.
"""

import contextlib
import functools
import inspect
import os
import threading
import unittest
from unittest import mock

WORLD = 8  # GPUs to feign


def _is_gpu(device):
    import torch

    if isinstance(device, bool):
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


class _Nothing:
    """Stands for a stream or an event: takes any call, and does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None


def _keep_on_cpu(torch):
    from torch.overrides import TorchFunctionMode

    cpu = torch.device("cpu")
    moves = {torch.Tensor.to, torch.Tensor.cuda}
    makers = {torch.ones, torch.rand, torch.randn}

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.device and args and _is_gpu(args[0]):
                return cpu
            if _is_gpu(kwargs.get("device")):
                kwargs = {**kwargs, "device": cpu}
            if func in makers and len(args) == 4 and min(args[2:]) >= 512:
                args = (*args[:2], 64, 64)
            if func in moves:
                args = (args[0], *(cpu if _is_gpu(a) else a for a in args[1:]))
            return func(*args, **kwargs)

    OnCpu().__enter__()  # for the rest of the process, and for its forks
    thread_run = threading.Thread.run

    def run(self):
        with OnCpu():
            thread_run(self)

    threading.Thread.run = run  # a mode holds for one thread only
    torch.nn.Module.cuda = lambda self, device=None: self

    module_to = torch.nn.Module.to

    @functools.wraps(module_to)
    def to(self, *args, **kwargs):
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = cpu
        return module_to(self, *(cpu if _is_gpu(a) else a for a in args), **kwargs)

    torch.nn.Module.to = to


def _feign_gpu_calls(torch):
    def nothing():  # a new function each time: dynamo wants no two names for one
        return lambda *args, **kwargs: None

    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache"):
        setattr(torch.cuda, name, nothing())
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda device=None: _Nothing()
    torch.cuda.device = lambda device=None: contextlib.nullcontext()
    torch.cuda.stream = lambda stream=None: contextlib.nullcontext()
    torch.cuda.Stream = torch.cuda.Event = torch.Event = _Nothing
    torch.accelerator.set_device_index = nothing()
    torch.accelerator.synchronize = nothing()
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.device_count = lambda: WORLD
    torch.accelerator.current_stream = lambda device=None: _Nothing()
    torch.cpu.manual_seed = torch.manual_seed


def _hide_devices_from(candidate):
    inner = candidate.__init__
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def __init__(self, *args, **kwargs):
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError:  # the candidate's own affair
            return inner(self, *args, **kwargs)
        args = list(args)
        names = [name for name in given if name != "self"]
        for name in ("device_ids", "output_device"):
            if name in kwargs:
                kwargs[name] = None
            elif name in names and names.index(name) < len(args):
                args[names.index(name)] = None
        return inner(self, *args, **kwargs)

    candidate.__init__ = __init__


def open_gates(common):
    """Given torch.testing._internal.common_distributed, before any test loads it."""

    def let_through(test):
        if isinstance(test, type):
            return test

        @functools.wraps(test)  # some fixtures reach for __wrapped__
        def run(*args, **kwargs):
            return test(*args, **kwargs)

        return run

    def let_through_given(*args, **kwargs):
        return let_through

    def let_through_noting(gpus, **kwargs):
        def mark(test):
            test = let_through(test)
            test.ddp_conform_gpus = gpus
            return test

        return mark

    if os.environ.get("DDP_CONFORM_BACKEND"):
        common.skip_if_small_worldsize = let_through  # it wants 8, where 4 are enough
    common.skip_if_no_gpu = let_through
    common.skip_if_lt_x_gpu = let_through_noting
    common.nccl_skip_if_lt_x_gpu = let_through_given
    common.requires_accelerator_dist_backend = let_through_given
    common.init_multigpu_helper = lambda world_size, backend: {
        rank: [rank] for rank in range(world_size)
    }

    single = common.DynamoDistributedSingleProcTestCase
    single.setUpClass = classmethod(_with_a_feigned_accelerator(common, single.setUpClass))


def _with_a_feigned_accelerator(common, set_up):
    """For a fixture that asks for the accelerator and opens a fixed port."""
    import torch

    def set_up_class(cls):
        inner = common.c10d.init_process_group

        def init_process_group(*args, **kwargs):
            inner(*args, store=torch.distributed.HashStore(), **kwargs)

        cpu = torch.device("cpu")
        with mock.patch.object(torch.accelerator, "current_accelerator", return_value=cpu):
            with mock.patch.object(common.c10d, "init_process_group", init_process_group):
                set_up.__func__(cls)

    return set_up_class


def install(candidate):
    import torch

    # torch.compile would trace into what the shim changes: so less of it there.
    if os.environ["DDP_CONFORM_CPU_SHIM"] == "eager":
        _keep_on_cpu(torch)
        _feign_gpu_calls(torch)
    if isinstance(candidate, type):
        _hide_devices_from(candidate)
    skip_unless = unittest.skipUnless
    unittest.skipUnless = lambda condition, reason: skip_unless(
        condition or reason == "Requires accelerator", reason
    )
