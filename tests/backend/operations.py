"""Every operation of a group, in the sizes that take different ways through shared memory."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[bool], Any]  # with async_op; gives the work

SMALL = 1_000  # float32: all in one exchange
LARGE = 700_000  # three rounds and more


def _all_reduce(count: int) -> Callable[[int, int], Call]:
    def make(rank: int, world: int) -> Call:
        tensor = torch.ones(count)
        return lambda later: dist.all_reduce(tensor, async_op=later)

    return make


def _symmetric(count: int) -> Callable[[int, int], Call]:
    def make(rank: int, world: int) -> Call:
        tensor = dist.group.WORLD.symmetric_empty(count, torch.float32)
        tensor.fill_(1.0)
        dist.all_reduce(tensor)  # from now on all ranks have it mapped
        return lambda later: dist.all_reduce(tensor, async_op=later)

    return make


def _first_symmetric(count: int) -> Callable[[int, int], Call]:
    def make(rank: int, world: int) -> Call:
        tensor = dist.group.WORLD.symmetric_empty(count, torch.float32)
        tensor.fill_(1.0)
        return lambda later: dist.all_reduce(tensor, async_op=later)

    return make


def _reduce(count: int) -> Callable[[int, int], Call]:
    def make(rank: int, world: int) -> Call:
        tensor = torch.ones(count)
        return lambda later: dist.reduce(tensor, 0, async_op=later)

    return make


def _broadcast(count: int) -> Callable[[int, int], Call]:
    def make(rank: int, world: int) -> Call:
        tensor = torch.ones(count)
        return lambda later: dist.broadcast(tensor, 1, async_op=later)

    return make


def _all_gather(count: int) -> Callable[[int, int], Call]:
    def make(rank: int, world: int) -> Call:
        outputs = [torch.empty(count) for _ in range(world)]
        return lambda later: dist.all_gather(outputs, torch.ones(count), async_op=later)

    return make


def _reduce_scatter(count: int) -> Callable[[int, int], Call]:
    def make(rank: int, world: int) -> Call:
        output, pieces = torch.empty(count), torch.ones(count * world)
        return lambda later: dist.reduce_scatter_tensor(output, pieces, async_op=later)

    return make


def _all_to_all(count: int) -> Callable[[int, int], Call]:
    def make(rank: int, world: int) -> Call:
        output, pieces = torch.empty(count * world), torch.ones(count * world)
        return lambda later: dist.all_to_all_single(output, pieces, async_op=later)

    return make


def _gather(count: int) -> Callable[[int, int], Call]:
    def make(rank: int, world: int) -> Call:
        outputs = [torch.empty(count) for _ in range(world)] if rank == 0 else None
        return lambda later: dist.gather(torch.ones(count), outputs, 0, async_op=later)

    return make


def _scatter(count: int) -> Callable[[int, int], Call]:
    def make(rank: int, world: int) -> Call:
        output = torch.empty(count)
        pieces = [torch.ones(count) for _ in range(world)] if rank == 1 else None
        return lambda later: dist.scatter(output, pieces, 1, async_op=later)

    return make


def _barrier(rank: int, world: int) -> Call:
    return lambda later: dist.barrier(async_op=later)


OPERATIONS: dict[str, Callable[[int, int], Call]] = {
    "all_reduce, small": _all_reduce(SMALL),
    "all_reduce, large": _all_reduce(LARGE),
    "all_reduce, symmetric": _symmetric(LARGE),
    "all_reduce, first symmetric": _first_symmetric(LARGE),
    "reduce, small": _reduce(SMALL),
    "reduce, large": _reduce(LARGE),
    "broadcast, small": _broadcast(SMALL),
    "broadcast, large": _broadcast(LARGE),
    "all_gather, small": _all_gather(SMALL),
    "all_gather, large": _all_gather(LARGE),
    "reduce_scatter, small": _reduce_scatter(SMALL),
    "reduce_scatter, large": _reduce_scatter(LARGE),
    "all_to_all, small": _all_to_all(SMALL),
    "all_to_all, large": _all_to_all(LARGE),
    "gather, small": _gather(SMALL),
    "gather, large": _gather(LARGE),
    "scatter, small": _scatter(SMALL),
    "scatter, large": _scatter(LARGE),
    "barrier, small": _barrier,
}


def perform(call: Call, mode: str) -> None:
    """Do it and wait, in one of the ways to wait."""
    if mode in ("sync", "late"):
        call(False)
    elif mode == "wait":
        call(True).wait()
    else:
        assert mode == "future", mode
        call(True).get_future().wait()


def once_waiting(then: Callable[[], Any]) -> threading.Thread:
    """Call ``then`` from another thread, when this one waits inside the group."""
    waiter = threading.get_ident()

    def place() -> tuple[int, int] | None:
        """Where this thread has entered the group."""
        found, frame = None, sys._current_frames()[waiter]
        while frame is not None:
            if "/gradsync/backend/" in frame.f_code.co_filename:
                found = id(frame), frame.f_lasti
            frame = frame.f_back
        return found

    def watch() -> None:
        before, same = None, 0
        while same < 5:  # or it is only passing
            time.sleep(0.02)
            now = place()
            same = same + 1 if now is not None and now == before else 0
            before = now
        then()

    thread = threading.Thread(target=watch, daemon=True)  # if nobody comes to wait, no end
    thread.start()
    return thread
