"""What a wrapper tells about itself: buckets, times, unused parameters."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracles import FEATURES, Net, batch, loss_of, seeded
from replicas import Branches, TorchDDP, caught
from replicas import batch as rows
from torch import Tensor, nn
from torch.distributed.utils import _verify_param_shape_across_processes

import gradsync
from gradsync import ArgumentError
from gradsync import DistributedDataParallel as DDP
from gradsync.ddp.clock import StepClock
from gradsync.testing import WorkerPool, count_collectives

pytestmark = pytest.mark.timeout(60)

LIMIT = {"timeout": 40.0, "group_timeout": 15.0}
NAP = 0.15  # seconds, which no part of these small models takes by itself


def step(model: nn.Module, rank: int, index: int = 0) -> None:
    loss_of(model(batch(index, rank))).backward()


def assert_consistent(stats: gradsync.Stats) -> None:
    for times in (stats.last, stats.mean):
        for field in dataclasses.fields(times):
            assert getattr(times, field.name) >= 0, f"{field.name} in {times}"
        assert times.exposed <= times.communication + 1e-9, times
        assert times.overlapped == pytest.approx(times.communication - times.exposed)
    assert stats.buckets == len(stats.bucket_bytes)
    assert stats.bytes == sum(stats.bucket_bytes)


# ------------------------------------------------------------------ facts


@pytest.mark.parametrize("ranks", [1, 2])
def test_buckets_and_bytes_are_those_of_the_gradients(pool: WorkerPool, ranks: int) -> None:
    def run(rank: int, world: int) -> None:
        size = 4 * sum(param.numel() for param in Net().parameters())
        for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
            ddp = DDP(seeded(Net), bucket_cap_mb=0.0002, **options)
            before = ddp.stats()
            assert (before.steps, before.bytes, before.has_rebuilt) == (0, size, False)
            assert before.last == before.mean == gradsync.StepTimes()
            assert before.unused == ()
            for index in range(3):
                step(ddp, rank, index)
                stats = ddp.stats()
                assert_consistent(stats)
                assert stats.steps == index + 1
                assert stats.bytes == size
                # Buckets are laid out anew before the second forward, where that is done at all.
                assert stats.has_rebuilt == (index > 0 and "find_unused_parameters" not in options)
                assert stats.last.forward > 0
                assert stats.last.backward > 0
                assert stats.last.communication > 0 or world == 1
            assert stats.buckets > 1
            with pytest.raises(dataclasses.FrozenInstanceError):
                stats.steps = 5  # type: ignore[misc]

    pool.run(run, ranks=ranks, **LIMIT)


def test_only_steps_that_are_reduced_count(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(Net))
        with ddp.no_sync():
            step(ddp, rank)
        with torch.no_grad():
            ddp(batch(0, rank))
        ddp(batch(0, rank))
        assert ddp.stats().steps == 0
        step(ddp, rank)
        assert ddp.stats().steps == 1
        ddp.sync_grads()
        assert ddp.stats().steps == 2
        assert_consistent(ddp.stats())

    pool.run(run, ranks=2, **LIMIT)


def test_unused_parameters_are_named_for_the_last_step_of_this_rank(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(Branches(), find_unused_parameters=True)
        both = ("branch.0.weight", "branch.0.bias", "branch.1.weight", "branch.1.bias")
        for index, (use, unused) in enumerate(
            [((0,), both[2:]), ((), both), ((0, 1), ()), ((1,), both[:2])]
        ):
            mine = use if rank == 0 else (0, 1)
            loss_of(ddp(rows(rank, index), *mine)).backward()
            found = ddp.stats().unused
            assert sorted(found) == sorted(unused if rank == 0 else ()), index
            data = ddp._get_ddp_logging_data()
            sizes = {n: p.numel() * 4 for n, p in ddp.module.named_parameters()}
            assert data["unused_parameter_size"] == sum(sizes[name] for name in found)

    pool.run(run, ranks=2, **LIMIT)


def test_reading_costs_no_collective_and_keeping_costs_none_either(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(Net))
        for index in range(3):
            step(ddp, rank, index)
        with count_collectives() as counted:
            ddp.stats()
            ddp._get_ddp_logging_data()
        assert counted.total == 0
        if rank == 0:  # so that only one rank reads: the others go on
            ddp.stats()
        with count_collectives() as counted:
            step(ddp, rank, 3)
        assert counted.total == 1

    pool.run(run, ranks=2, **LIMIT)


# ------------------------------------------------------------------ times


class Naps(nn.Module):
    """Sleeps where it is told to: in the forward, or in the backward of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, 2)
        self.forward_nap = self.backward_nap = 0.0
        self.sleep: Callable[[float], None] = time.sleep

    def forward(self, x: Tensor) -> Tensor:
        if self.forward_nap:
            self.sleep(self.forward_nap)
        x = self.first(x)
        nap = self.backward_nap
        if nap:
            x.register_hook(lambda _gradient: self.sleep(nap))
        return self.last(x)


class CommonClock:
    """The same time on all ranks, which only naps let pass: a busy machine does not show in it."""

    def __init__(self, ddp: DDP, name: str) -> None:
        self.store, self.name = dist.distributed_c10d._get_default_store(), name
        ddp.reducer.clock.now, ddp.module.sleep = self.now, self.sleep

    def now(self) -> float:
        return 1.0 + self.store.add(self.name, 0)  # a mark of 0 is none

    def sleep(self, seconds: float) -> None:
        self.store.add(self.name, int(seconds))


class Announced(StepClock):
    """Sets a key as soon as the backward has nothing left to compute."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "computed":
            dist.distributed_c10d._get_default_store().set("computed", "")


def test_a_slow_phase_shows_in_its_own_field(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        # A bucket for each layer: the second is launched after the nap in the backward.
        ddp = DDP(seeded(Naps), bucket_cap_mb=0.00002)
        for index in range(2):
            step(ddp, rank, index)

        CommonClock(ddp, f"of rank {rank}")
        ddp.module.forward_nap = 7.0
        step(ddp, rank)
        assert ddp.stats().last == gradsync.StepTimes(forward=7.0)

        ddp.module.forward_nap, ddp.module.backward_nap = 0.0, 5.0
        step(ddp, rank)
        last = ddp.stats().last
        # The first bucket was on its way meanwhile.
        assert last == gradsync.StepTimes(backward=5.0, communication=5.0)
        assert last.overlapped == 5.0

    pool.run(run, ranks=2, **LIMIT)


def test_a_slow_rank_shows_as_exposed_communication_of_the_others(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(Naps))
        for index in range(2):
            step(ddp, rank, index)
        clock = CommonClock(ddp, "of all ranks")
        if rank == 0:
            ddp.reducer.clock.__class__ = Announced
        else:
            ddp.module.forward_nap = 7.0
            clock.store.wait(["computed"])  # so that the nap begins when rank 0 has nothing to do
        step(ddp, rank)
        if rank == 1:
            assert ddp.stats().last == gradsync.StepTimes(forward=7.0)
        else:
            assert ddp.stats().last == gradsync.StepTimes(communication=7.0, exposed=7.0)

    pool.run(run, ranks=2, **LIMIT)


def test_the_means_are_over_all_steps(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(Net))
        seen = []
        for index in range(5):
            step(ddp, rank, index)
            seen.append(ddp.stats().last)
            stats = ddp.stats()
            for field in dataclasses.fields(stats.last):
                mean = sum(getattr(each, field.name) for each in seen) / len(seen)
                assert getattr(stats.mean, field.name) == pytest.approx(mean), field.name
        # They survive a change of dtype, which makes a new reducer.
        ddp.double()
        assert ddp.stats().steps == 5
        assert ddp.stats().mean == stats.mean

    pool.run(run, ranks=2, **LIMIT)


def test_the_forwards_of_one_step_are_timed_as_one_phase(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(Naps))
        step(ddp, rank)
        ddp.module.forward_nap = NAP
        first = ddp(batch(0, rank))
        ddp.module.forward_nap = 0.0
        (loss_of(first) + loss_of(ddp(batch(1, rank)))).backward()
        assert ddp.stats().last.forward >= NAP

    pool.run(run, ranks=2, **LIMIT)


# ------------------------------------------------------------------ logging data


def test_the_logging_data_has_torchs_keys_and_values(pool: WorkerPool) -> None:
    # What depends on how buckets are laid out, and under a static graph when, is our own.
    layout = {"bucket_sizes", "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices"}

    def run(rank: int, world: int) -> None:
        variants: list[dict[str, Any]] = [
            {},
            {"gradient_as_bucket_view": True, "bucket_cap_mb": 3},
            {"find_unused_parameters": True, "forward_sync_buffers": False},
            {"static_graph": True},
        ]
        for options in variants:
            both = [cls(seeded(Net), **options) for cls in (TorchDDP, DDP)]
            for ddp in both:
                for index in range(3):
                    step(ddp, rank, index)
            torchs, ours = (ddp._get_ddp_logging_data() for ddp in both)
            missing = torchs.keys() - ours.keys()
            missing = {k for k in missing if not k.startswith(("nccl", "cuda", "gpu"))}
            assert not missing, f"{options}: {sorted(missing)}"
            own = layout | {"has_rebuilt_buckets"} if "static_graph" in options else layout
            for key, value in torchs.items():
                if key in ours and "time" not in key and key not in own:
                    assert ours[key] == value, f"{options}: {key}: {value} and {ours[key]}"
            sizes = [int(size) for size in ours["bucket_sizes"].split(", ")]
            assert sum(sizes) == ours["total_parameter_size_bytes"]

    pool.run(run, ranks=2, **LIMIT)


def test_the_times_in_the_logging_data_are_those_of_a_step(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(seeded(Naps))
        ddp.module.forward_nap, ddp.module.backward_nap = NAP, NAP
        for index in range(3):
            step(ddp, rank, index)
        data = ddp._get_ddp_logging_data()
        for prefix in ("", "avg_"):
            assert data[f"{prefix}forward_compute_time"] >= NAP * 1e9
            assert data[f"{prefix}backward_compute_time"] >= NAP * 1e9
            comm = data[f"{prefix}backward_comm_time"]
            assert 0 <= data[f"{prefix}backward_compute_comm_overlap_time"] <= comm
        marks = [
            "forward_compute_time_start",
            "backward_compute_time_start",
            "backward_compute_time_end",
            "backward_comm_time_end",
        ]
        assert [data[mark] for mark in marks] == sorted(data[mark] for mark in marks)
        assert data["backward_comm_time_start"] <= data["backward_comm_time_end"]

    pool.run(run, ranks=2, **LIMIT)


def test_the_times_are_sampled_in_the_first_ten_steps_and_then_at_the_rate(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> None:
        both = [cls(seeded(Net)) for cls in (TorchDDP, DDP)]
        for ddp in both:
            ddp._set_ddp_runtime_logging_sample_rate(4)
        for index in range(25):
            for ddp in both:
                step(ddp, rank, index)
            torchs, ours = (ddp._get_ddp_logging_data()["iteration"] for ddp in both)
            assert ours == torchs, f"step {index}"
        assert ours == 24
        for rate in (0, -1):
            error = caught(
                lambda rate=rate: both[1]._set_ddp_runtime_logging_sample_rate(rate), ArgumentError
            )
            assert "sample rate" in str(error)
            assert both[1]._get_ddp_logging_data()["has_error"]

    pool.run(run, ranks=2, **LIMIT)


def test_torchs_functions_note_their_errors_in_the_logger_that_they_are_given(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> None:
        sparse = [torch.ones(4).to_sparse()]
        for make in (TorchDDP, DDP):  # torch's own goes on as it did
            for hand_in in (
                lambda log: dist._compute_bucket_assignment_by_size(sparse, [400], logger=log),
                lambda log: dist._compute_bucket_assignment_by_size(sparse, [400], [], [], log),
            ):
                ddp = make(Net())
                assert "error" not in ddp._get_ddp_logging_data()
                with pytest.raises(RuntimeError, match="No support for sparse tensors"):
                    hand_in(ddp.logger)
                data = ddp._get_ddp_logging_data()
                assert data["has_error"]
                assert "No support for sparse tensors" in data["error"]
                if make is DDP:  # it was noted, and changes nothing else
                    step(ddp, rank, 0)
        other = [torch.ones(2 + rank)]
        with pytest.raises(RuntimeError) if rank else nullcontext():  # rank 0 is the measure
            _verify_param_shape_across_processes(ddp.process_group, other, ddp.logger)
        if rank:
            assert "appears not to match sizes" in ddp._get_ddp_logging_data()["error"]

        kept = ddp.logger
        ddp.double()  # which takes a new reducer
        with pytest.raises(RuntimeError):
            dist._compute_bucket_assignment_by_size(sparse, [400], logger=kept)
        assert "No support for sparse tensors" in ddp._get_ddp_logging_data()["error"]

        dense = [torch.ones(4), torch.ones(4)]
        plain = dist._compute_bucket_assignment_by_size(dense, [16])
        assert dist._compute_bucket_assignment_by_size(dense, [16], logger=ddp.logger) == plain
        assert dist._compute_bucket_assignment_by_size(dense, [16], logger=None) == plain

    pool.run(run, ranks=2, **LIMIT)
