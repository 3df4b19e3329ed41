"""What our wrapper adds to a forward and to a backward, in one process that nobody makes wait.

    python benchmarks/wrapper_cost.py
    python benchmarks/wrapper_cost.py --workloads policy --steps 2000

The only rank of a gradsync group goes through all of a step as if there were others: it packs,
reduces and writes back. The plain module takes turns with it, step by step. The time is the 10th
percentile of the steps: this is about work, and what others do on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from race.workloads import WORKLOADS
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

STEPS = 1000
WARM_UP_STEPS = 10


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads", default="policy,many-small", metavar="NAME,...",
        help=f"of {', '.join(WORKLOADS)} (default: policy,many-small)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    arguments = parser.parse_args(argv)
    names = arguments.workloads.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"no such workload: {', '.join(unknown)}; known: {', '.join(WORKLOADS)}")
    if arguments.steps < 1:
        parser.error("--steps must be 1 or more")

    torch.set_num_threads(1)
    table = Table("workload", "phase", "plain, µs", "ours, µs", "more, µs")
    with tempfile.TemporaryDirectory() as folder:
        import gradsync  # noqa: F401  (it makes the backend known)

        dist.init_process_group("gradsync", init_method=f"file://{folder}/s", rank=0, world_size=1)
        for name in names:
            for phase, plain, ours in measure(name, arguments.steps):
                table.add_row(name, phase, *(f"{v * 1e6:.1f}" for v in (plain, ours, ours - plain)))
        dist.destroy_process_group()
    Console().print(table)


def measure(name: str, steps: int) -> list[tuple[str, float, float]]:
    """Seconds of the plain module and of ours, by phase."""
    from gradsync import DistributedDataParallel

    workload = WORKLOADS[name]
    batches = workload.batches(0)
    plain, ours = workload.model(), DistributedDataParallel(workload.model())
    ours.reducer.queue.alone = False  # as with several ranks
    times: dict[nn.Module, list[tuple[float, float]]] = {plain: [], ours: []}
    for step in range(WARM_UP_STEPS + steps):
        inputs, targets = batches[step % len(batches)]
        for model, taken in times.items():
            for parameter in model.parameters():
                parameter.grad = None
            began = time.perf_counter()
            outputs = model(inputs)
            forward = time.perf_counter() - began
            loss = F.cross_entropy(outputs, targets)
            began = time.perf_counter()
            loss.backward()
            taken.append((forward, time.perf_counter() - began))
    rows = []
    for at, phase in enumerate(("forward", "backward")):
        tenths = [
            sorted(each[at] for each in taken[WARM_UP_STEPS:])[steps // 10]
            for taken in times.values()
        ]
        rows.append((phase, tenths[0], tenths[1]))
    return rows


if __name__ == "__main__":
    main()
