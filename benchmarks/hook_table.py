"""What each communication hook costs and saves: the table in docs/hooks.md.

    python benchmarks/hook_table.py              # two ranks on gloo, about two minutes
    python benchmarks/hook_table.py --rounds 5 --epochs 2

- bytes: what one rank hands to collectives in one step of the 7 M parameter transformer of
  step_race.py.
- time: of the hook alone on that model's gradients, from the first call until all futures are
  done, no backward beside it; and the processor time of that on one rank, which tells more when
  the machine is busy. Medians over rounds in which the hooks take turns; one thread a rank.
- accuracy: of examples/digits.py on its test set, trained with the hook on gradsync's class.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import digits  # noqa: E402
from race import hooks as race_hooks  # noqa: E402
from race.workloads import WORKLOADS  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402

from gradsync import DistributedDataParallel, hooks  # noqa: E402
from gradsync.testing import WorkerPool, count_collectives  # noqa: E402

MB = 2**20
Makers = dict[str, Callable[[], tuple[object, Any]]]

# PowerSGD averages plainly for the first tenth of the 12 epochs on the digits, as one should.
OURS: Makers = {
    "`BF16()`": lambda: (None, hooks.BF16()),
    "`FP16()`": lambda: (None, hooks.FP16()),
    "`Int8()`": lambda: (None, hooks.Int8()),
    "`PowerSGD(1)`": lambda: (None, hooks.PowerSGD(1, start_iteration=26)),
    "`PowerSGD(4)`": lambda: (None, hooks.PowerSGD(4, start_iteration=26)),
    "`TopK(0.01)`": lambda: (None, hooks.TopK(0.01)),
}
TORCHS: Makers = {
    "torch's `allreduce_hook`": lambda: (None, default_hooks.allreduce_hook),
    "torch's `bf16_compress_hook`": lambda: (None, race_hooks.bf16),
    "torch's `fp16_compress_hook`": lambda: (None, default_hooks.fp16_compress_hook),
    "torch's `powerSGD_hook`, rank 1": race_hooks.torch_power_sgd(1),
    "torch's `powerSGD_hook`, rank 4": race_hooks.torch_power_sgd(4),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21, help="default %(default)s")
    parser.add_argument("--epochs", type=int, default=12, help="on the digits; default %(default)s")
    arguments = parser.parse_args()
    with WorkerPool(max_ranks=2) as pool:
        costs = pool.run(measure, args=(arguments.rounds,), timeout=600)[0]
        accuracies = pool.run(accuracies_of, args=([*OURS], arguments.epochs), timeout=600)[0]
    print("| hook | MB a step | ms a step | ms of CPU | accuracy on the digits |")
    print("|---|---|---|---|---|")
    for name, (sent, seconds, processor) in costs.items():
        megabytes = f"{sent / MB:.2f}" if sent else "not counted"
        accuracy = f"{accuracies[name]:.2%}" if name in accuracies else ""
        times = f"{seconds * 1e3:.1f} | {processor * 1e3:.1f}"
        print(f"| {name} | {megabytes} | {times} | {accuracy} |")
    print(f"\nThe digits without a hook: {accuracies['none']:.2%}")


def measure(rank: int, world: int, rounds: int) -> dict[str, tuple[int, float, float]]:
    """For each hook the bytes, the seconds and the processor's seconds of a step, on a rank."""
    torch.set_num_threads(1)
    model = WORKLOADS["transformer"].model()
    layouts = {True: buckets(model, [MB, 25 * MB]), False: buckets(model, [2**40])}
    racers = {}
    for name, make in (TORCHS | OURS).items():
        state, hook = make()
        if isinstance(hook, hooks.PowerSGD):
            hook.start_iteration = 0
        # Its collectives, started by callbacks, would get mixed up: see race/hooks.py.
        several = "powerSGD_hook" not in name
        racers[name] = (state, hook, layouts[several])
    times: dict[str, list[float]] = {name: [] for name in racers}
    busy: dict[str, list[float]] = {name: [] for name in racers}
    sent: dict[str, int] = {}
    for number in range(rounds + 3):
        for name, (state, hook, parts) in racers.items():
            for part in parts:
                part.refill()
            dist.barrier()
            if number == 2 and "powerSGD_hook" not in name:  # its callbacks' are not seen
                with count_collectives() as counted:
                    step(state, hook, parts)
                sent[name] = counted.bytes
            begin, begin_busy = time.perf_counter(), time.process_time()
            step(state, hook, parts)
            if number > 2:
                times[name].append(time.perf_counter() - begin)
                busy[name].append(time.process_time() - begin_busy)
    return {
        name: (sent.get(name, 0), statistics.median(times[name]), statistics.median(busy[name]))
        for name in racers
    }


def step(state: object, hook: Any, parts: list[Part]) -> None:
    futures = [hook(state, part) for part in parts]
    for future in futures:
        future.wait()


class Part:
    """A bucket with torch's interface, and gradients that can be put back."""

    def __init__(self, index: int, parameters: list[Tensor]) -> None:
        self._index = index
        self._parameters = parameters
        self.last = False
        generator = torch.Generator().manual_seed(dist.get_rank())
        size = sum(parameter.numel() for parameter in parameters)
        self._original = torch.randn(size, generator=generator) * 1e-2
        self._buffer = self._original.clone()

    def refill(self) -> None:
        self._buffer.copy_(self._original)

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self.last

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        parts = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [g.view(p.shape) for g, p in zip(parts, self._parameters, strict=True)]


def buckets(model: nn.Module, limits: list[int]) -> list[Part]:
    """As DDP would lay them out: in reverse, the first one small."""
    groups: list[list[Tensor]] = [[]]
    filled = 0
    for parameter in reversed(list(model.parameters())):
        if filled >= limits[min(len(groups), len(limits)) - 1]:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += parameter.numel() * parameter.element_size()
    parts = [Part(index, group) for index, group in enumerate(groups)]
    parts[-1].last = True
    return parts


def accuracies_of(rank: int, world: int, names: list[str], epochs: int) -> dict[str, float]:
    """The accuracy on the digits without a hook, as "none", and with each of ours."""
    return {
        name: digits_accuracy(OURS[name]()[1] if name in OURS else None, epochs)
        for name in ["none", *names]
    }


def digits_accuracy(hook: hooks.Hook | None, epochs: int, seed: int = 0) -> float:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    train_set, test_set = digits.digits(seed)
    model = DistributedDataParallel(digits.network())
    if hook is not None:
        model.register_comm_hook(None, hook)
    reached = digits.Reached()
    for _ in digits.train(model, train_set, test_set, reached, epochs, 32, 0.05, seed):
        pass
    return reached.accuracy


if __name__ == "__main__":
    main()
