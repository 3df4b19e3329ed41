"""Messages between two ranks: tags, sizes, any source, batches."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from forked import Nursery
from oracle import assert_equal, values
from promptness import check_best_of_three
from ranks import raised, run, still_works

from gradsync import CollectiveMismatchError, DeadlineError, PeerLostError
from gradsync.testing import WorkerPool


class TestMessages:
    def test_both_ways_at_once_with_messages_much_larger_than_the_ring(
        self, pool: WorkerPool
    ) -> None:
        def body(rank: int, world: int) -> None:
            sizes = (0, 1, 5000, 1_000_003)
            works, received = [], []
            for other in range(world):
                for tag, size in enumerate(sizes):
                    if other != rank:
                        works.append(dist.isend(values(rank, size, seed=tag), other, tag=tag))
            for other in range(world):
                for tag, size in enumerate(sizes):
                    if other != rank:
                        received.append((other, tag, torch.zeros(size)))
                        works.append(dist.irecv(received[-1][2], other, tag=tag))
            for work in works:
                work.wait()
            for other, tag, tensor in received:
                assert_equal(tensor, values(other, tensor.numel(), seed=tag), (other, tag))

        run(pool, body, 3)

    def test_tags_choose_whatever_the_order_of_arrival(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            tags = (5, 3, 9, 0)
            if rank == 0:
                for tag in tags:
                    dist.send(torch.full((30_000,), float(tag)), 1, tag=tag)
                    dist.send(torch.full((30_000,), tag + 0.5), 1, tag=tag)
            else:
                for tag in reversed(tags):
                    for expected in (tag, tag + 0.5):  # of one tag, in the order of sending
                        tensor = torch.zeros(30_000)
                        assert dist.recv(tensor, 0, tag=tag) == 0
                        assert torch.equal(tensor, torch.full((30_000,), float(expected)))

        run(pool, body)

    def test_from_any_source(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            if rank != 0:
                time.sleep(0.02 * (world - rank))
                dist.send(torch.full((10,), float(rank)), 0, tag=2)
                return
            seen = set()
            for _ in range(world - 1):
                tensor = torch.zeros(10)
                source = dist.recv(tensor, tag=2)
                assert torch.equal(tensor, torch.full((10,), float(source)))
                seen.add(source)
            assert seen == set(range(1, world))

        run(pool, body, 4)

    def test_from_any_source_though_a_rank_has_left_and_until_all_have(
        self, pool: WorkerPool
    ) -> None:
        def body(rank: int, world: int) -> str:
            group = dist.new_group(backend="gradsync")
            text = ""
            if rank == 0:
                tensor = torch.zeros(10)
                assert dist.recv(tensor, group=group) == 1
                assert dist.recv(tensor, group=group) == 2
                assert tensor[0] == 2
                text = raised(lambda: dist.recv(tensor, group=group), PeerLostError)
            else:
                if rank == 2:
                    time.sleep(0.4)  # rank 1 has left by then, and rank 0 has seen it
                dist.send(torch.full((10,), float(rank)), 0, group=group)
            dist.destroy_process_group(group)
            return text

        assert "has left the group while message 3, recv(10 x float32)" in run(pool, body, 3)[0]

    def test_from_any_source_fails_at_once_if_a_rank_is_killed(self, nursery: Nursery) -> None:
        def body(rank: int, world: int) -> float:
            dist.barrier()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 0:
                with pytest.raises(
                    PeerLostError, match="has ended while message 1, recv"
                ) as caught:
                    dist.recv(torch.zeros(10))
                assert caught.value.rank == 1
            return time.monotonic()

        def kill() -> float:
            first, second, _ = nursery.run(body, 3)
            return first.unwrap() - second.ended

        check_best_of_three(kill, promise=1.0)

    def test_from_any_source_names_who_could_have_sent_at_the_deadline(
        self, pool: WorkerPool
    ) -> None:
        def body(rank: int, world: int) -> None:
            group = dist.new_group(backend="gradsync", timeout=timedelta(seconds=20))
            dist.barrier(group)
            if rank == 0:
                group.set_timeout(timedelta(seconds=0.3))
                with pytest.raises(
                    DeadlineError, match=r"Not arrived: rank 1 .*, rank 2 "
                ) as caught:
                    dist.recv(torch.zeros(10), group=group)
                assert caught.value.ranks == (1, 2)
            dist.barrier()

        run(pool, body, 3)

    def test_batches(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> None:
            received = [torch.zeros(40_000) for _ in range(world)]
            operations = []
            for other in range(world):
                if other != rank:
                    operations += [
                        dist.P2POp(dist.irecv, received[other], other),
                        dist.P2POp(dist.isend, torch.full((40_000,), float(rank)), other),
                    ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            for other, tensor in enumerate(received):
                assert torch.equal(tensor, torch.full((40_000,), float(other * (other != rank))))

        run(pool, body, 3)

    def test_a_message_of_another_size_is_an_error_of_the_receiver(self, pool: WorkerPool) -> None:
        def body(rank: int, world: int) -> str:
            text = ""
            if rank == 0:
                dist.send(torch.ones(3), 1)
            else:
                text = raised(lambda: dist.recv(torch.ones(4), 0), CollectiveMismatchError)
            still_works(rank, world)
            return text

        text = run(pool, body)[1]
        assert "16 bytes" in text
        assert "12" in text
