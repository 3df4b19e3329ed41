"""Facts about the machine for the header of the results, and whether all hosts have the same."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

_SECONDS: Final = 20  # for a program that tells about the machine
# Of lscpu's lines, those that stay the same from run to run: not the clock's rate.
_TOPOLOGY: Final = (
    "Architecture", "CPU(s)", "Model name", "Thread(s) per core", "Core(s) per socket", "Socket(s)",
    "L1d cache", "L2 cache", "L3 cache", "NUMA node",
)  # fmt: skip
# What may differ between hosts that are otherwise the same.
_OF_ITS_OWN: Final = frozenset({"hosts"})


def describe_machine() -> dict[str, Any]:
    """The facts about this host. Names of hosts and users are not among them.

    >>> facts = describe_machine()
    >>> facts["torch"] == torch.__version__, facts["cores"] >= 1
    (True, True)
    """
    return {
        "gradsync": _version("gradsync"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "torchvision": _version("torchvision"),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_gb": _memory_gb(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "topology": topology(),
        "hosts": 1,
    }


def differences(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    """In what the hosts differ from the first, in words.

    >>> differences([{"cores": 8, "hosts": 1}, {"cores": 8}, {"cores": 4}])
    ['host 2: cores is 4, on host 0 it is 8']
    """
    first = hosts[0]
    return [
        f"host {number}: {key} is {facts.get(key)!r}, on host 0 it is {first.get(key)!r}"
        for number, facts in enumerate(hosts[1:], start=1)
        for key in first
        if key not in _OF_ITS_OWN and facts.get(key) != first.get(key)
    ]


def cores() -> int:
    """Those that this process may use.

    >>> cores() >= 1
    True
    """
    with suppress(AttributeError):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def topology() -> str:
    """``nvidia-smi topo -m`` where there is a GPU, else the lasting lines of ``lscpu``.

    >>> isinstance(topology(), str)
    True
    """
    if torch.cuda.is_available():
        return _output("nvidia-smi", "topo", "-m")
    lines = _output("lscpu").splitlines()
    kept = [line for line in lines if line.strip().startswith(_TOPOLOGY)]
    return "\n".join(" ".join(line.split()) for line in kept)


def cpu_model() -> str:
    """As the processor calls itself.

    >>> isinstance(cpu_model(), str)
    True
    """
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _memory_gb() -> int | None:
    """Rounded: two hosts of one kind differ by some pages."""
    with suppress(ValueError, OSError, AttributeError):
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
    return None


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    environment = os.environ | {"LC_ALL": "C"}
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=environment, check=True
        ).stdout
    return ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
