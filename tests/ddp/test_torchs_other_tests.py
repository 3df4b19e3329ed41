"""What PyTorch's tests outside its wheel ask of the class: the same answers as torch's.

Each test here runs torch's class and ours, so that what is asked cannot drift.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from replicas import CLASSES, assert_same, batch, caught, gradients
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

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
