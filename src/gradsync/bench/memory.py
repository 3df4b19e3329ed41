"""Peak memory of this process between two moments.

On the CPU it is the growth of the resident set. The kernel can forget the peak so far
(``clear_refs``), and the allocator can be asked to give back what it holds, so one process can
weigh several contenders one after the other. Memory that ranks share counts in each rank that
touches it.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

_FORGET_PEAK: Final = "5"  # see proc(5)


class PeakMemory:
    """From the construction to ``growth``.

    >>> peak = PeakMemory(torch.device("cpu"))
    >>> block = torch.ones(25_000_000)
    >>> peak.growth() is None or peak.growth() > 50_000_000
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before: int | None = torch.cuda.memory_allocated(device)
            return
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
        except OSError:
            self._before = None  # the peak would be that of everyone before us
        else:
            self._before = _resident("VmRSS")

    def growth(self) -> int | None:
        """Bytes at the peak beyond those at the start, or None where it cannot be told."""
        if self._before is None:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        peak = _resident("VmHWM")
        return None if peak is None else max(peak - self._before, 0)


def _resident(key: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return None
