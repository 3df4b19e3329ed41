"""Peak memory of one contender, measured in processes that ran nothing else.

Growth is the peak resident set after some steps minus the resident set before the model is
built: weights, gradients, buckets, activations and what the optimizer step needs. On Linux the
peak is `VmHWM`, which belongs to this process image; `ru_maxrss` also remembers the parent from
before exec, and would hide up to the launcher's size.
"""

from __future__ import annotations

import resource
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from race.contenders import Contender, Training
from race.track import Marshal
from race.workloads import Workload

STEPS = 8
REPEATS = 3
WORKLOADS = ("wide", "transformer")


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    workload: str
    contender: str
    parameter_bytes: int
    samples: tuple[int, ...]  # bytes, one a launch, each the maximum over the ranks

    @property
    def peak_growth(self) -> int:
        return int(statistics.median(self.samples))


def probe(contender: Contender, workload: Workload, marshal: Marshal) -> int:
    """This launch's peak growth in bytes, the maximum over the ranks."""
    batches = workload.batches(dist.get_rank())
    contender.why_absent()  # imports it: its code is not counted, as torch's is not
    before = _resident("VmRSS")
    Training(contender, workload, batches).run(STEPS)
    (growth,) = marshal.agree(float(_resident("VmHWM") - before))
    return int(growth)


def _resident(key: str) -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
