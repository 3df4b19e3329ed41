"""Show that a compiled backward overlaps with the reduction of gradients.

    torchrun --standalone --nproc-per-node 2 examples/compile_overlap.py --trace overlap.json

Trains a few steps with ``torch.compile`` around the wrapper, records one with the profiler, and
prints in which order rank 0 ran the backward of its graphs and sent its buckets. The trace opens
in https://ui.perfetto.dev: the ``gloo:all_reduce`` rows lie beside ``CompiledFunctionBackward``.
"""

from pathlib import Path
from typing import Annotated

import torch
import torch._dynamo
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from gradsync import DistributedDataParallel

NAMES = {
    "CompiledFunctionBackward": "backward of a graph",
    "c10d::allreduce_": "a bucket is sent",
}


class Layers(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def main(
    layers: Annotated[int, typer.Option(min=1)] = 6,
    width: Annotated[int, typer.Option(min=512, help="512 makes layers of 1 MiB.")] = 1024,
    backend: Annotated[str, typer.Option(help="Of torch.compile.")] = "aot_eager",
    split: Annotated[bool, typer.Option(help="Let Dynamo split the graph.")] = True,
    trace: Annotated[Path | None, typer.Option(help="Where to write rank 0's trace.")] = None,
) -> None:
    torch._dynamo.config.optimize_ddp = split
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(Layers(layers, width), bucket_cap_mb=1)
    compiled = torch.compile(ddp, backend=backend)
    recorded = record(lambda: compiled(torch.randn(32, width)).square().mean().backward())
    if dist.get_rank() == 0:
        tell(recorded)
        if trace is not None:
            recorded.export_chrome_trace(str(trace))
            print(f"the trace is in {trace}")
    dist.destroy_process_group()


def record(step) -> profile:
    for _ in range(3):  # compile; and buckets are cut anew after the first step
        step()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    return recorded


def tell(recorded: profile) -> None:
    events = sorted(
        (event for event in recorded.events() if event.name in NAMES),
        key=lambda event: event.time_range.start,
    )
    for event in events:
        print(f"{event.time_range.start / 1000:9.2f} ms  {NAMES[event.name]}")
    last = max(i for i, event in enumerate(events) if "Backward" in event.name)
    sent = [i for i, event in enumerate(events) if "allreduce" in event.name]
    early = sum(i < last for i in sent)
    print(f"{early} of {len(sent)} buckets were sent before the last graph ran backward")


if __name__ == "__main__":
    typer.run(main)
