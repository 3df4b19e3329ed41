"""What PyTorch's tests outside its wheel ask of the class: the same answers as torch's.

Where torch's class can run it as well it does, so that what is asked cannot drift.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replicas import CLASSES, OurDDP, assert_same, batch, caught, gradients
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import gradsync
from gradsync.testing import WorkerPool

LIMIT = 60.0


def solitary() -> Any:
    """A group in Python with one member; ``asked`` counts how its works were waited for.

    The classes are made in the worker: what derives from torch's C++ classes does not travel.
    """

    class Work(dist._Work):
        def __init__(self, group: Solitary, result: object) -> None:
            super().__init__()
            self.group = weakref.ref(group)
            self.future: torch.futures.Future[object] = torch.futures.Future()
            self.future.set_result(result)

        def wait(self, timeout: object) -> bool:  # the signature that torch's callers require
            self.group().asked["wait"] += 1
            return True

        def get_future(self) -> torch.futures.Future[object]:
            self.group().asked["future"] += 1
            return self.future

    class Solitary(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 1)
            self.asked: Counter[str] = Counter()
            self.works: list[Work] = []  # torch keeps no reference to them

        def _done(self, result: object) -> Work:
            self.works.append(Work(self, result))
            return self.works[-1]

        def allreduce(self, tensors: list[Tensor], opts: object) -> Work:
            return self._done(tensors)

        def broadcast(self, tensors: list[Tensor], opts: object) -> Work:
            return self._done(tensors)

        def allgather(self, into: list[list[Tensor]], tensors: list[Tensor], opts: object) -> Work:
            for target, tensor in zip(into[0], tensors, strict=True):
                target.copy_(tensor)
            return self._done(into)

        def getSize(self) -> int:
            return 1

        def getBackendName(self) -> str:
            return "solitary"

    return Solitary()


class TestGroupsInPython:
    def test_works_are_waited_for_at_construction_and_asked_for_their_future_in_a_backward(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            for cls in CLASSES:
                for views in (False, True):
                    group = solitary()
                    plain = nn.Linear(4, 2)
                    ddp = cls(plain, process_group=group, gradient_as_bucket_view=views)
                    assert group.asked["wait"] > 0, cls
                    group.asked.clear()
                    ddp(batch(rank)).sum().backward()
                    assert group.asked["future"] > 0, cls
                    reduced = gradients(plain)
                    plain.zero_grad()
                    plain(batch(rank)).sum().backward()
                    assert_same(reduced, gradients(plain), cls)

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_without_init_sync_nothing_is_asked_at_construction(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for cls in CLASSES:
                group = solitary()
                cls(nn.Linear(4, 2), process_group=group, init_sync=False)
                assert not group.asked, cls

        pool.run(run, ranks=1, timeout=LIMIT)


class TestWordsOfHooks:
    def test_a_hook_that_returns_no_future_is_a_runtime_error(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for cls in CLASSES:
                ddp = cls(nn.Linear(4, 2))
                ddp.register_comm_hook(None, lambda state, bucket: 1)
                error = caught(ddp(batch(rank)).sum().backward)
                assert isinstance(error, RuntimeError), (cls, error)
                assert not isinstance(error, TypeError), (cls, error)
                assert "callback must return a torch.futures.Future object, but got" in str(error)

        pool.run(run, timeout=LIMIT)

    def test_a_second_hook_is_refused_with_the_name_of_the_call_first(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            kind = dist.BuiltinCommHookType.FP16_COMPRESS
            calls = {
                "register_comm_hook or register_builtin_comm_hook": lambda ddp: (
                    ddp.register_comm_hook(None, allreduce_hook)
                ),
                "register_builtin_comm_hook or register_comm_hook": lambda ddp: (
                    ddp._register_builtin_comm_hook(kind)
                ),
            }
            for cls in CLASSES:
                for first in calls.values():
                    ddp = cls(nn.Linear(4, 2))
                    first(ddp)
                    for words, second in calls.items():
                        error = caught(lambda: second(ddp))  # noqa: B023
                        assert isinstance(error, RuntimeError), (cls, error)
                        assert f"{words} can only be called once" in str(error), (cls, error)

        pool.run(run, timeout=LIMIT)


class TestWordsOfConstruction:
    @pytest.mark.parametrize("word", ["sizes", "strides"])
    def test_a_rank_that_differs_from_rank_0_is_told_so_in_torchs_words(
        self, pool: WorkerPool, word: str
    ) -> None:
        def run(rank: int, world: int) -> None:
            model = nn.Conv2d(2, 3 + (rank if word == "sizes" else 0), 2)
            if word == "strides" and rank == 1:
                model.to(memory_format=torch.channels_last)
            # Not torch's class as well: its rank 0 would wait for the others until the time-out.
            error = caught(lambda: OurDDP(model))
            assert isinstance(error, RuntimeError), error
            assert f" appears not to match {word} of the same param in process 0" in str(error)

        pool.run(run, timeout=LIMIT)


PARTS, CHUNKS = 2, 4  # ranks that share a pipeline, and microbatches


def pipelined(schedule: type, rank: int, options: dict[str, Any]) -> None:
    """Steps of two pipelines side by side, against the whole model on the whole batch."""
    mesh = init_device_mesh("cpu", (2, PARTS), mesh_dim_names=("data", "pipe"))
    replica, part = mesh.get_local_rank("data"), mesh.get_local_rank("pipe")
    interleaved = schedule is ScheduleInterleaved1F1B
    count = 2 * PARTS if interleaved else PARTS
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)]
    whole = nn.Sequential(*(copy.deepcopy(layer) for layer in layers))
    mine = range(part, count, PARTS)
    stages = [
        PipelineStage(
            OurDDP(layers[index], process_group=mesh.get_group("data"), **options),
            index,
            count,
            torch.device("cpu"),
            group=mesh.get_group("pipe"),
        )
        for index in mine
    ]
    plan = schedule(stages if interleaved else stages[0], CHUNKS, loss_fn=nn.functional.mse_loss)
    for step in range(3):
        inputs = [batch(each, step, rows=2 * CHUNKS) for each in range(2)]
        whole.zero_grad()
        for each in inputs:
            (nn.functional.mse_loss(whole(each), each) / 2).backward()
        for stage in stages:
            stage.submod.zero_grad()
        given = (inputs[replica],) if part == 0 else ()
        if part == PARTS - 1:
            plan.step(*given, target=inputs[replica])
        else:
            plan.step(*given)
        for stage in stages:
            assert stage.submod.reducer.step == step + 1, "reduced more than once"
        for index in mine:
            for ours, expected in zip(
                layers[index].parameters(), whole[index].parameters(), strict=True
            ):
                torch.testing.assert_close(ours.grad, expected.grad)


class TestPipelines:
    @pytest.mark.parametrize("option", [None, "gradient_as_bucket_view", "find_unused_parameters"])
    def test_a_stage_of_a_pipeline_is_reduced_once_after_its_last_microbatch(
        self, pool: WorkerPool, option: str | None
    ) -> None:
        def run(rank: int, world: int) -> None:
            gradsync.patch_torch()  # a stage looks for torch's class by name
            try:
                for schedule in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
                    pipelined(schedule, rank, {option: True} if option else {})
            finally:
                gradsync.unpatch_torch()

        pool.run(run, ranks=4, timeout=LIMIT)
