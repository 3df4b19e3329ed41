"""The native part as Python meets it: threads and their lock, forks, signals, refusals.

What needs no Python is tested in csrc/tests (`make native-test`).
"""

import gc
import os
import signal
import threading
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from operations import once_waiting
from ranks import raised, run, still_works

import gradsync
from gradsync.backend import _native

LARGE = 200_000


@pytest.mark.parametrize("count", [10, LARGE])
def test_a_collective_that_is_only_asked_for_gets_done(pool, count):
    def body(rank, world):
        tensor = torch.ones(count)
        work = dist.all_reduce(tensor, async_op=True)
        deadline = time.monotonic() + 20
        while not work.is_completed():
            assert time.monotonic() < deadline, "asking does not get it done"
        assert work.is_success()
        assert torch.equal(tensor, torch.full((count,), float(world)))

    run(pool, body)


def test_asking_for_a_collective_of_a_lost_rank_ends(pool):
    def body(rank, world):
        group = dist.new_group(backend="gradsync")
        if rank == 1:
            group.shutdown()
            dist.barrier()
            return
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        deadline = time.monotonic() + 20
        while not work.is_completed():
            assert time.monotonic() < deadline
        assert "rank 1" in raised(work.wait, gradsync.PeerLostError)
        dist.barrier()

    run(pool, body)


def test_a_thread_that_waits_long_does_not_lock_up_with_one_that_issues(pool):
    def body(rank, world):
        slow, quick = dist.new_group(backend="gradsync"), torch.ones(LARGE)
        if rank == 1:
            time.sleep(1.5)  # meanwhile rank 0 waits, and asks for signals ten times a second
        works = [dist.all_reduce(quick, group=slow, async_op=True)]
        works += [dist.all_reduce(torch.ones(10), group=slow, async_op=True) for _ in range(3)]
        waiters = [threading.Thread(target=work.wait) for work in works]
        for waiter in waiters:
            waiter.start()
        end = time.monotonic() + (1.2 if rank == 0 else 0)
        while time.monotonic() < end:
            works[-1].is_completed()
            slow._get_sequence_number_for_group()
            slow._leave_to_background()
        for waiter in waiters:
            waiter.join(20)
            assert not waiter.is_alive()
        assert quick[0] == world
        still_works(rank, world)

    run(pool, body)


def test_a_forked_child_that_tidies_up_does_not_harm_its_parent(pool):
    def body(rank, world):
        group = dist.new_group(backend="gradsync")
        tensor = group.symmetric_empty(LARGE, torch.float32)
        tensor.fill_(1)
        dist.all_reduce(tensor, group=group)  # mapped by the other rank from now on
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            group.abort()
            group.shutdown()
            del group, tensor
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert tensor[0] == world
        dist.all_reduce(tensor, group=group)
        assert tensor[0] == world * world
        still_works(rank, world, group)

    run(pool, body)


@pytest.mark.parametrize("gloo", ["before", "after"])
def test_a_forked_child_cannot_use_the_group(pool, gloo):
    def body(rank, world):
        group = dist.new_group(backend="gradsync")
        symmetric = group.symmetric_empty(LARGE, torch.float32)
        average = group.persistent_all_reduce(symmetric)
        if gloo == "before":
            dist.all_reduce(torch.ones(3) > 0, group=group)
        tensor = torch.ones(3)
        sent = dist.isend(tensor, 1 - rank, group=group, tag=7)
        begun = [torch.ones(3), torch.ones(LARGE)]

        def begin():
            return [dist.all_reduce(each, group=group, async_op=True) for each in begun]

        received = dist.irecv(torch.empty(3), 1 - rank, group=group, tag=8)
        calls = [
            lambda: dist.all_reduce(tensor, group=group),
            lambda: dist.all_reduce(tensor, group=group, async_op=True).wait(),
            lambda: dist.broadcast(tensor, 0, group=group),
            lambda: dist.all_reduce(tensor > 0, group=group),
            lambda: dist.send(tensor, 1 - rank, group=group),
            average.run,
            group.monitored_barrier,
            received.wait,
        ]
        works = begin() if rank == 0 else []  # which wait for rank 1
        calls += [work.wait for work in works]
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                texts = [raised(call, gradsync.StateError) for call in calls]
                os._exit(0 if all("forked" in text for text in texts) else 1)
            except BaseException:
                traceback.print_exc()
            os._exit(2)
        dist.barrier()  # of another group: nothing of this one is done before both have forked
        assert os.waitpid(child, 0)[1] == 0
        dist.recv(tensor, 1 - rank, group=group, tag=7)
        dist.send(tensor, 1 - rank, group=group, tag=8)
        for work in (sent, received, *(works or begin())):
            work.wait()
        assert all(tensor.eq(world).all() for tensor in begun)
        dist.all_reduce(tensor > 0, group=group)
        still_works(rank, world, group)
        symmetric.fill_(rank)
        average.run()
        assert symmetric.eq(0.5).all()

    run(pool, body)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_an_interrupted_wait_leaves_no_memory_in_use(pool, name):
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    def body(rank, world):
        group = dist.new_group(backend="gradsync")
        if rank == 1:
            dist.barrier()
            return
        before = torch.ones(LARGE)
        work = dist.all_reduce(before, group=group, async_op=True)  # the other rank never comes
        work.get_future()  # so that a thread in the background waits for it
        time.sleep(0.2)
        signal.signal(signal.SIGALRM, ring)
        tensor = torch.ones(LARGE)
        start = time.monotonic()
        calls = {
            "all_reduce": lambda: dist.all_reduce(tensor, group=group),
            "broadcast": lambda: dist.broadcast(tensor, 0, group=group),
        }
        once_waiting(lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM))
        raised(calls[name], Alarm)
        assert time.monotonic() - start < 10
        raised(work.wait, gradsync.AbortedError)
        dist.barrier()

    run(pool, body)


def test_more_memory_than_there_is_is_refused_at_once(pool):
    with pytest.raises(OSError, match="available"):
        _native.Memory(2**50)


def test_what_was_announced_wrongly_is_refused():
    pid = os.getpid()
    with pytest.raises(ValueError, match="expected"):
        _native.Segment.open(2, pid, 3, 17)
    descriptor = os.memfd_create("other")
    try:
        size = 4096 * 600
        os.ftruncate(descriptor, size)
        with pytest.raises(ValueError, match="expected"):
            _native.Segment.open(2, pid, descriptor, size)
    finally:
        os.close(descriptor)
    peers = [(pid, _native.start_time(pid), "rank 0", 0, "here")]
    with pytest.raises(ValueError, match="no rank 1"):
        _native.Context(_native.Segment.create(1), 1, peers, 1, 2, is_founder=True)
    stranger = (pid, 1, "rank 1", 1, "here")
    with pytest.raises(OSError, match="is not the one"):
        _native.Context(_native.Segment.create(2), 0, [*peers, stranger], 1, 2, is_founder=True)
