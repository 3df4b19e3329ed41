"""Puts a candidate class in the place of torch's DistributedDataParallel.

``run_conformance.py`` places this folder first on PYTHONPATH, so that every
Python process of a run loads this file: the process that runs a test as well
as each rank the test spawns.  It acts only when these variables are set:

DDP_CONFORM_CANDIDATE   ``module:Class``, the class to test
DDP_CONFORM_TRACE       a file to which each construction of the candidate (or
                        of torch's own class, which would be a leak) adds a line
DDP_CONFORM_CPU_SHIM    ``eager`` or ``compile``: let tests that ask for GPUs run
                        on the CPU
DDP_CONFORM_DISABLED    ``1``: also run tests that PyTorch has switched off
DDP_CONFORM_BACKEND     ``gradsync``: leave DDP alone, and serve gloo with gradsync's
                        group, whose constructions are the traced ones; ``gloo``: as it is
"""

import functools
import importlib
import importlib.util
import os
import re
import sys
import unittest


def _note(kind):
    path = os.environ.get("DDP_CONFORM_TRACE")
    if path:
        with open(path, "a") as out:
            out.write(f"{kind} {os.getpid()}\n")


def _count_constructions(cls, kind, unless=None):
    inner = cls.__init__

    @functools.wraps(inner)
    def __init__(self, *args, **kwargs):
        if unless is None or not isinstance(self, unless):
            _note(kind)
        return inner(self, *args, **kwargs)

    cls.__init__ = __init__


def _replace_ddp(torch):
    original = torch.nn.parallel.distributed.DistributedDataParallel
    module, _, name = os.environ["DDP_CONFORM_CANDIDATE"].partition(":")
    candidate = getattr(importlib.import_module(module), name)

    # Importing the candidate may have imported more of torch: so go through
    # all of it, and not only through the two places where the class is public.
    for mod_name, mod in list(sys.modules.items()):
        if mod_name == "torch" or mod_name.startswith("torch."):
            for key, value in list(getattr(mod, "__dict__", {}).items()):
                if value is original:
                    setattr(mod, key, candidate)

    if os.environ.get("DDP_CONFORM_CPU_SHIM"):
        import ddp_conform_cpu_shim as shim

        shim.install(candidate)
        _after_import("torch.testing._internal.common_distributed", shim.open_gates)
    if isinstance(candidate, type):
        if candidate is not original:
            _count_constructions(original, "torch", unless=candidate)
        _count_constructions(candidate, "candidate")


def _replace_gloo(torch):
    if os.environ.get("DDP_CONFORM_CPU_SHIM"):
        import ddp_conform_cpu_shim as shim

        shim.install(torch.nn.parallel.distributed.DistributedDataParallel)
        _after_import("torch.testing._internal.common_distributed", shim.open_gates)
    if os.environ["DDP_CONFORM_BACKEND"] != "gradsync":
        return
    import gradsync
    from gradsync.backend.registration import GlooGroup

    original = torch.nn.parallel.distributed.DistributedDataParallel
    gradsync.patch_torch(backend=True)
    for module in (torch.nn.parallel, torch.nn.parallel.distributed):
        module.DistributedDataParallel = original
    _count_constructions(GlooGroup, "candidate")


class _AfterImport:
    """A meta-path finder that calls ``then`` right after ``name`` has run."""

    def __init__(self, name, then):
        self.name, self.then = name, then

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self.then(module)

        spec.loader.exec_module = exec_module
        return spec


def _after_import(name, then):
    sys.meta_path.insert(0, _AfterImport(name, then))


def _ignore_switched_off():
    """Run the tests skipped for a bug or flakiness, but not those for what they need."""
    reasons = r"github\.com/pytorch/pytorch|flak(y|iness)|failing in NVIDIA"
    if os.environ.get("DDP_CONFORM_BACKEND"):
        reasons += "|Only MPI supports"  # gloo has learned it since
    switched_off = re.compile(reasons, re.I).search

    def unless_switched_off(skip):
        @functools.wraps(skip)
        def decide(reason):
            return (lambda test: test) if switched_off(str(reason)) else skip(reason)

        return decide

    skip_if = unittest.skipIf
    unittest.skip = unless_switched_off(unittest.skip)
    unittest.skipIf = lambda condition, reason: skip_if(
        condition and not switched_off(str(reason)), reason
    )

    def patch(common):
        skip = unless_switched_off(common.skip_but_pass_in_sandcastle)
        common.skip_but_pass_in_sandcastle = skip
        common.skip_but_pass_in_sandcastle_if = lambda condition, reason: (
            skip(reason) if condition else lambda test: test
        )

    _after_import("torch.testing._internal.common_utils", patch)


def _run_the_hidden_sitecustomize():
    """Python loads only the first sitecustomize it finds, so load the next one."""
    here = os.path.dirname(os.path.abspath(__file__))
    for folder in sys.path:
        if os.path.abspath(folder or ".") == here:
            continue
        path = os.path.join(folder, "sitecustomize.py")
        if os.path.isfile(path):
            spec = importlib.util.spec_from_file_location("_hidden_sitecustomize", path)
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


if os.environ.get("DDP_CONFORM_CANDIDATE"):
    _run_the_hidden_sitecustomize()
    # With torchvision some tests train a resnet too: slow here, and little news.
    sys.modules["torchvision"] = None
    if os.environ.get("DDP_CONFORM_DISABLED"):
        _ignore_switched_off()
    _after_import("torch", _replace_gloo if os.environ.get("DDP_CONFORM_BACKEND") else _replace_ddp)
