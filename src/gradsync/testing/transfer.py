"""Functions and values between processes, always by value.

[Note: by value]
Workers are fresh interpreters. What they can import is pickled by reference; test modules
and scripts are not, so their functions and classes travel as code (cloudpickle). On the way
back the module does exist on the caller's side, so there a reference is right: a copy of
the class would not be the class the caller catches or compares with.

Tensors are written out with their bytes. A view is cloned first, for a pickled view carries
its whole storage. No shared memory, no file descriptors: nothing can be left behind.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch


def dump_call(call: object) -> bytes:
    """Pickle a call for the workers.

    >>> load(dump_call((max, (1, 2))))
    (<built-in function max>, (1, 2))
    """
    with _caller_modules_by_value():
        return _dump(call, _CallPickler)


def dump_result(value: object) -> bytes:
    """Pickle a result for the caller.

    >>> load(dump_result(torch.ones(2)))
    tensor([1., 1.])
    """
    return _dump(value, _ResultPickler)


def load(data: bytes) -> Any:
    """Read what `dump_call` or `dump_result` wrote.

    >>> load(dump_result({"step": 3}))
    {'step': 3}
    """
    return pickle.loads(data)


def source_root() -> Path:
    """The directory from which ``gradsync`` itself is imported.

    >>> (source_root() / "gradsync").is_dir()
    True
    """
    return Path(__file__).resolve().parents[2]


class _CallPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and _is_partial_view(obj):
            return _compact(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


class _ResultPickler(_CallPickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and _is_of_caller(obj):
            return _look_up, (obj.__module__, obj.__qualname__)
        return super().reducer_override(obj)


def _dump(value: object, pickler: type[_CallPickler]) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _is_partial_view(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    clone = tensor.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(clone, tensor.requires_grad)
    return clone.requires_grad_(tensor.requires_grad)


def _is_of_caller(obj: type | FunctionType) -> bool:
    module = obj.__module__
    came_by_value = module == "__main__" or module not in sys.modules
    return came_by_value and "<" not in obj.__qualname__


def _look_up(module: str, qualname: str) -> Any:
    return functools.reduce(getattr, qualname.split("."), sys.modules[module])


@contextmanager
def _caller_modules_by_value() -> Iterator[None]:
    already = set(cloudpickle.list_registry_pickle_by_value())
    added = [m for m in _modules_workers_cannot_import() if m.__name__ not in already]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def _modules_workers_cannot_import() -> list[ModuleType]:
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if getattr(module, "__name__", None) != name or not isinstance(file, str):
            continue
        if name != "__main__" and not _importable(name, file, hasattr(module, "__path__")):
            found.append(module)
    return found


@functools.cache
def _importable(name: str, file: str, is_package: bool) -> bool:
    path = Path(file)
    if name.partition(".")[0] == "gradsync" or not path.is_absolute():
        return True
    if any(path.is_relative_to(installed) for installed in _installed_directories()):
        return True
    depth = name.count(".") + is_package
    return depth < len(path.parents) and str(path.parents[depth]) in _fresh_search_path()


@functools.cache
def _installed_directories() -> tuple[str, ...]:
    schemes = {sysconfig.get_path(k) for k in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(schemes | set(site.getsitepackages()) | {site.getusersitepackages()})


@functools.cache
def _fresh_search_path() -> frozenset[str]:
    """``sys.path`` of a fresh interpreter: what workers see, free of a test runner's additions."""
    code = "import sys; print('\\n'.join(sys.path[1:]))"
    command = [sys.executable, "-c", code]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return frozenset(os.path.abspath(p) for p in listed.stdout.splitlines() if p)
