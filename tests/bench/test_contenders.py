"""The measured step, without processes: what it costs beyond the bare loop, and what it tells."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch

from gradsync.bench.contenders import Contender, Training, make_batches
from gradsync.bench.workloads import BUILT_IN, Benchmark, load


class Tiny(Benchmark):
    batch_size = 4

    def create_model(self):
        return torch.nn.Linear(8, 3)

    def generate_inputs(self):
        return [torch.rand(self.batch_size, 8)]

    def generate_target(self):
        return torch.randint(3, (self.batch_size,))


def train(benchmark, **options):
    batches = make_batches(benchmark, options.get("dtype", torch.float32), seed=1)
    return Training(benchmark, lambda model: model, batches, **options)


def calls_in(run):
    """Every call of a function, Python's and C's, by name."""
    seen = Counter()

    def profile(frame, event, argument):
        if event == "call":
            seen[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            seen[argument.__qualname__] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


def test_a_measured_step_calls_what_the_bare_loop_calls_and_reads_the_clock_once():
    training = train(Tiny())
    model, optimizer, loss = training.wrapped, training.optimizer, training.loss
    next_batch = training.next_batch
    steps = 20

    def bare():
        for _ in range(steps):
            inputs, target = next_batch()
            optimizer.zero_grad(set_to_none=True)
            loss(model(*inputs), target).backward()
            optimizer.step()

    training.run(2)
    measured, by_hand = calls_in(lambda: training.run(steps)), calls_in(bare)
    more = measured - by_hand
    assert more.pop("perf_counter") == steps + 1
    assert more.pop("list.append") == steps
    assert sum(more.values()) < steps, f"more than the bare loop in each step: {more}"
    less = by_hand - measured
    assert sum(less.values()) < steps, f"a step lacks what the bare loop does: {less}"


def test_run_gives_one_time_a_step():
    times = train(Tiny()).run(7)
    assert len(times) == 7
    assert all(seconds > 0 for seconds in times)


def test_two_trainings_of_one_seed_reach_the_same_weights():
    first, second = train(Tiny(), seed=3), train(Tiny(), seed=3)
    first.run(3)
    second.run(3)
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_types_reach_model_and_data():
    training = train(Tiny(), dtype=torch.bfloat16)
    training.run(1)
    assert training.model.weight.dtype == torch.bfloat16
    inputs, target = training.next_batch()
    assert (inputs[0].dtype, target.dtype) == (torch.bfloat16, torch.int64)


def test_without_ddp_a_timeline_has_no_communication():
    timeline = train(Tiny()).watch(0, 2)
    assert timeline.forward > 0
    assert timeline.backward > 0
    assert timeline.communication == timeline.exposed == 0


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_workload_trains(name):
    training = train(load(name, batch_size=2))
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.run(1)
    moved = [
        not torch.equal(p, q) for p, q in zip(before, training.model.parameters(), strict=True)
    ]
    # A row that no example has asked for, or a bias in front of a BatchNorm, may stay.
    assert sum(moved) >= 0.9 * len(moved)


def test_the_recommender_has_sparse_gradients():
    training = train(load("dlrm", batch_size=2))
    training.run(1)
    assert [p.grad.is_sparse for p in training.model.parameters()].count(True) == 8


def test_labels_name_implementation_and_backend():
    assert Contender(implementation="none").label == "none"
    assert Contender(implementation="torch", backend="gloo").label == "torch/gloo"
