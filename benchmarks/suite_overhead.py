"""What measuring costs: a step of gradsync bench against the same loop written by hand.

    python benchmarks/suite_overhead.py
    python benchmarks/suite_overhead.py --workload convnet --rounds 1000

The two take turns in one process, each time in another order, and the turns are short: what
disturbs the machine then disturbs both. By hand the clock is read twice for all steps of a turn, in
the suite after each step. The ratio is that of the suite's time to the bare loop's; the claim is
that it is within 1 % of 1.
"""

from __future__ import annotations

import argparse
import gc
import time

import torch

from gradsync.bench.contenders import Training, make_batches
from gradsync.bench.stats import ratio_of_medians
from gradsync.bench.workloads import BUILT_IN, load

LIMIT = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", choices=BUILT_IN, default="dlrm")
    parser.add_argument("--rounds", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=4, help="in a turn")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    benchmark = load(arguments.workload)
    batches = make_batches(benchmark, torch.float32, seed=1)
    training = Training(benchmark, lambda model: model, batches)
    training.run(100)

    gc.collect()
    gc.disable()  # else a collection that both have caused is counted as one's
    suite: list[list[float]] = []
    bare: list[list[float]] = []
    for number in range(arguments.rounds):
        turns = [(suite, measured), (bare, by_hand)]
        for times, run in turns if number % 2 else turns[::-1]:
            times.append([run(training, arguments.steps) / arguments.steps])
    ratio = ratio_of_medians(suite, bare, paired=True)
    low, high = ratio.low or 0.0, ratio.high or float("inf")
    verdict = "met" if high <= 1 + LIMIT else "missed" if low > 1 + LIMIT else "open: too noisy"
    print(
        f"{arguments.workload}: the suite's step / the bare loop's = {ratio.value:.4f} "
        f"({low:.4f}..{high:.4f}, 95 %), {arguments.rounds} rounds; within 1 %: {verdict}"
    )
    return 1 if verdict == "missed" else 0


def measured(training: Training, steps: int) -> float:
    return sum(training.run(steps))


def by_hand(training: Training, steps: int) -> float:
    model, optimizer, loss = training.wrapped, training.optimizer, training.loss
    next_batch = training.next_batch
    start = time.perf_counter()
    for _ in range(steps):
        inputs, target = next_batch()
        optimizer.zero_grad(set_to_none=True)
        loss(model(*inputs), target).backward()
        optimizer.step()
    return time.perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(main())
