"""Process groups: parts of the world, several modules, other groups later, groups in Python."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from replicas import (
    CLASSES,
    Count,
    OurDDP,
    assert_equal_on_all_ranks,
    assert_same,
    batch,
    caught,
    gradients,
    weights,
)
from torch import Tensor, nn

from gradsync import GradsyncError
from gradsync.testing import WorkerPool

LIMIT = 60.0


def network(seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(model: nn.Module, rank: int, steps: int = 3, start: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(start, start + steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


class TestSubGroups:
    def test_each_group_trains_its_own_model(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> Tensor:
            groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            mine = groups[rank % 2]
            models = [cls(network(rank), process_group=mine) for cls in CLASSES]
            for ddp in models:
                train(ddp, rank)
            assert_same(weights(models[0]), weights(models[1]))
            assert_equal_on_all_ranks(models[1].parameters(), mine)
            return models[1].module[0].weight.detach()

        first, second, third, fourth = pool.run(run, ranks=4, timeout=LIMIT)
        assert torch.equal(first, third)
        assert torch.equal(second, fourth)
        assert not torch.equal(first, second)

    def test_the_start_is_that_of_the_groups_first_rank(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            group = dist.new_group([1, 2])
            if rank in (1, 2):
                ddp = OurDDP(network(rank), process_group=group)
                assert_same(weights(ddp.module), weights(network(1)))

        pool.run(run, ranks=3, timeout=LIMIT)

    def test_a_group_without_this_rank_is_a_clear_error(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            group = dist.new_group([0])
            if rank == 0:
                OurDDP(network(), process_group=group)
                return
            error = caught(lambda: OurDDP(network(), process_group=group), ValueError)
            assert isinstance(error, GradsyncError)
            assert "process_group" in str(error)
            assert "not be a member" in str(error)

        pool.run(run, timeout=LIMIT)

    def test_errors_speak_of_ranks_in_the_group(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> str:
            group = dist.new_group([1, 2])
            if rank == 0:
                return ""
            module = nn.Linear(4, 4 + (rank == 2))
            return str(caught(lambda: OurDDP(module, process_group=group), RuntimeError))

        for text in pool.run(run, ranks=3, timeout=LIMIT)[1:]:
            assert "rank 0 has weight of shape [4, 4]" in text
            assert "rank 1 has weight of shape [5, 4]" in text


class TestSeveralModules:
    def test_two_wrapped_modules_in_one_model_train_as_with_torch(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            results = []
            for cls in CLASSES:
                torch.manual_seed(3)
                first, second = cls(nn.Linear(4, 4)), cls(nn.Linear(4, 4))
                model = nn.Sequential(first, nn.Tanh(), second)
                train(model, rank, 4)  # one backward through both
                results.append(weights(model))
                train(first, rank, 2)  # and each on its own
                train(second, rank, 2)
                results.append(weights(model))
            assert_same(results[0], results[2])
            assert_same(results[1], results[3])

        pool.run(run, timeout=LIMIT)

    def test_a_wrapped_module_beside_plain_ones_leaves_those_local(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> Tensor:
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(4, 4), OurDDP(nn.Linear(4, 4)))
            model(batch(rank)).square().sum().backward()
            assert_equal_on_all_ranks([model[1].module.weight.grad])
            return model[0].weight.grad

        first, second = pool.run(run, timeout=LIMIT)
        assert not torch.equal(first, second)

    def test_two_losses_with_the_backwards_in_another_order_than_the_forwards(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            results = []
            for cls in CLASSES:
                torch.manual_seed(3)
                first, second = cls(nn.Linear(4, 4)), cls(nn.Linear(4, 4))
                for step in range(3):
                    one, two = first(batch(rank, step)).sum(), second(batch(rank, step)).sum()
                    two.backward()
                    one.backward()
                results.append(
                    {"first": first.module.weight.grad, "second": second.module.bias.grad}
                )
            assert_same(*results)

        pool.run(run, timeout=LIMIT)


class TestThreads:
    def test_inference_in_another_thread_does_not_disturb_training(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp, reference = OurDDP(network()), OurDDP(network())
            other = network(5).eval()
            wrapped = OurDDP(nn.Linear(4, 4))
            stop, failures, answers = threading.Event(), [], []

            def infer() -> None:
                try:
                    expected = other(batch(9))
                    while not stop.is_set():
                        with torch.no_grad():
                            assert torch.equal(other(batch(9)), expected)
                            wrapped(batch(9))
                        other(batch(9)).sum().backward()  # its own backward, local
                        answers.append(1)
                except Exception as error:
                    failures.append(error)

            thread = threading.Thread(target=infer)
            thread.start()
            try:
                train(ddp, rank, 20)
            finally:
                stop.set()
                thread.join()
            train(reference, rank, 20)
            assert not failures
            assert answers
            assert_same(weights(ddp), weights(reference))
            assert_equal_on_all_ranks(ddp.parameters())

        pool.run(run, timeout=LIMIT)


class TestOtherGroup:
    @pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
    def test_a_smaller_group_and_back_keeps_weights_and_reduces_over_the_right_ranks(
        self, pool: WorkerPool, options: dict[str, object]
    ) -> None:
        def run(rank: int, world: int) -> None:
            small, full = dist.new_group([0, 1]), dist.new_group()
            ddp = OurDDP(network(), **options)
            train(ddp, rank, 3)
            before = weights(ddp)
            ddp._update_process_group(small)
            if rank < 2:
                assert ddp.process_group is small
                assert_same(before, weights(ddp))
                train(ddp, rank, 3, start=3)
                assert_equal_on_all_ranks(ddp.parameters(), small)
            dist.barrier()
            with torch.no_grad():  # whoever was away takes what the others have learned
                for value in ddp.state_dict().values():
                    dist.broadcast(value, 0)
            ddp._update_process_group(full)
            assert ddp.process_group is full
            train(ddp, rank, 3, start=6)
            assert_equal_on_all_ranks(ddp.parameters())
            ddp.zero_grad()
            ddp(batch(rank, 9)).square().mean().backward()
            local = network()
            local.load_state_dict(ddp.module.state_dict())
            expected = torch.zeros(2)
            for each in range(world):
                local.zero_grad()
                local(batch(each, 9)).square().mean().backward()
                expected += local[3].bias.grad / world
            torch.testing.assert_close(ddp.module[3].bias.grad, expected)

        pool.run(run, ranks=3, timeout=LIMIT)


class TestAlone:
    @pytest.mark.parametrize("views", [False, True])
    def test_world_size_one_trains_as_the_bare_module_without_a_collective(
        self, pool: WorkerPool, views: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
                ddp = OurDDP(network(), gradient_as_bucket_view=views, **options)
                local = network()
                count = Count()
                train(ddp, rank)
                assert count() == 0
                train(local, rank)
                assert_same(weights(ddp.module), weights(local))
                assert_same(gradients(ddp.module), gradients(local))

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_a_python_group_of_size_one_gets_its_collectives(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            seen: list[str] = []

            class Done(dist._Work):
                def __init__(self, result: object) -> None:
                    super().__init__()
                    self.future = torch.futures.Future()
                    self.future.set_result(result)

                def wait(self, timeout: object = None) -> bool:
                    return True

                def get_future(self) -> torch.futures.Future:
                    return self.future

            class Lonely(dist.ProcessGroup):
                """Doubles what it is asked to reduce, so that its work can be seen."""

                def __init__(self) -> None:
                    super().__init__(0, 1)

                def getBackendName(self) -> str:
                    return "lonely"

                def allreduce(self, tensors: list[Tensor], opts: object = None) -> object:
                    seen.append("allreduce")
                    tensors[0].mul_(2)
                    return Done(tensors)

                def allgather(self, out: object, tensors: object, opts: object = None) -> object:
                    seen.append("allgather")
                    for target, tensor in zip(out, tensors, strict=True):
                        target[0].copy_(tensor)
                    return Done(out)

                def broadcast(self, tensors: list[Tensor], opts: object = None) -> object:
                    seen.append("broadcast")
                    return Done(tensors)

                def size(self) -> int:
                    return 1

                def rank(self) -> int:
                    return 0

            ddp = OurDDP(nn.Linear(4, 2), process_group=Lonely())
            for _ in range(2):
                ddp.zero_grad()
                seen.clear()
                ddp(torch.ones(1, 4)).sum().backward()
                assert seen.count("allreduce") == 1
                assert torch.equal(ddp.module.weight.grad, torch.full((2, 4), 2.0))

        pool.run(run, ranks=1, timeout=LIMIT)
