"""Made-up results for the tests of the report."""

from __future__ import annotations

import random

from gradsync.bench.result import BENCH_COMM, Case, CommCase, Result, Timeline

SPEEDS = {"none": 0.6, "torch": 1.0, "torch-tuned": 0.95, "gradsync": 0.7}
HEADER = {"torch": "2.13.0", "cpu": "Some CPU", "cores": 4, "topology": "CPU(s): 4\nSocket(s): 1"}


def case(implementation: str, world: int, *, model: str = "mlp", speed: float = 1.0) -> Case:
    """Fifty steps of each rank in ten rounds, with noise that is always the same."""
    noise = random.Random(f"{implementation}{world}{model}")
    seconds = 0.02 * speed * SPEEDS[implementation] * (1 + 0.3 * (world - 1))
    backend = {"none": None, "gradsync": "gradsync"}.get(implementation, "gloo")
    communication = seconds / 4 if world > 1 and backend else 0.0
    return Case(
        model=model,
        batch_size=32,
        implementation=implementation,
        backend=backend,
        ranks=tuple(range(world)),
        measurements=tuple(seconds * noise.uniform(0.95, 1.1) for _ in range(50 * world)),
        steps_by_round=(5,) * 10,
        parameters=6_000_000,
        peak_memory=(100_000_000,) * world,
        timelines=tuple(
            Timeline(
                rank=rank,
                forward=seconds / 4,
                backward=seconds / 2,
                communication=communication,
                exposed=communication / 3,
            )
            for rank in range(world)
        ),
    )


def bench(*worlds: int, speed: float = 1.0) -> Result:
    cases = [case(name, world, speed=speed) for name in SPEEDS for world in worlds or (1, 2, 4)]
    return Result(command="gradsync bench --model mlp", header=HEADER, cases=cases)


def bench_comm(*, speed: float = 1.0) -> Result:
    cases = [
        CommCase(
            collective=collective,
            bytes=size,
            backend=backend,
            world=4,
            seconds=tuple(speed * factor * (1e-5 + size / 1e9) * (1 + 0.01 * n) for n in range(10)),
        )
        for collective in ("all_reduce", "broadcast")
        for size in (4096, 65536, 2**20, 2**24)
        for backend, factor in (("gloo", 2.0), ("gradsync", 1.0))
    ]
    return Result(kind=BENCH_COMM, command="gradsync bench-comm", header=HEADER, comm_cases=cases)


def torchs_own() -> str:
    """A file as torch's benchmark.py writes it."""
    return """{
 "pytorch_version": "2.13.0", "cuda_version": null, "distributed_backend": "gloo",
 "bucket_size": 25, "benchmark_results": [{"model": "resnet50", "batch_size": 32, "result": [
  {"ranks": [0], "measurements": [0.30, 0.31, 0.29, 0.30, 0.32]},
  {"ranks": [0], "measurements": [0.32, 0.33, 0.31, 0.32, 0.34]},
  {"ranks": [0, 1], "measurements": [0.4, 0.41, 0.4, 0.42, 0.4, 0.4, 0.43, 0.4, 0.41, 0.4]}
 ]}]}"""
