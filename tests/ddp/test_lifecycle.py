"""The life of a wrapper: saved, loaded, copied, unhooked, deleted, put in torch's place."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from replicas import (
    CLASSES,
    Count,
    OurDDP,
    TorchDDP,
    assert_equal_on_all_ranks,
    assert_same,
    batch,
    caught,
    gradients,
    weights,
)
from torch import Tensor, nn

import gradsync
from gradsync import GradsyncError
from gradsync.testing import WorkerPool

LIMIT = 40.0


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(model: nn.Module, rank: int, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


class TestSaved:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"find_unused_parameters": True},
            {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
            {"forward_sync_buffers": False, "dim": 1},
        ],
    )
    def test_pickled_saved_or_copied_it_trains_as_the_original(
        self, pool: WorkerPool, options: dict[str, object]
    ) -> None:
        def save_and_load(ddp: nn.Module) -> nn.Module:
            file = io.BytesIO()
            torch.save(ddp, file)
            file.seek(0)
            return torch.load(file, weights_only=False)

        ways = [lambda ddp: pickle.loads(pickle.dumps(ddp)), save_and_load, copy.deepcopy]

        def run(rank: int, world: int) -> None:
            for duplicate in ways:
                ddp = OurDDP(network(), **options)
                train(ddp, rank)
                other = duplicate(ddp)
                assert type(other) is OurDDP
                assert other.module is not ddp.module
                for name in ("dim", "find_unused_parameters", "gradient_as_bucket_view"):
                    assert getattr(other, name) == getattr(ddp, name)
                assert other.forward_sync_buffers == ddp.forward_sync_buffers
                assert other.bucket_bytes_cap == ddp.bucket_bytes_cap
                before = weights(ddp)
                train(other, rank, 3)
                assert_same(before, weights(ddp))  # the original is untouched
                train(ddp, rank, 3)
                assert_same(weights(ddp), weights(other))
                assert_equal_on_all_ranks(other.parameters())

        pool.run(run, timeout=LIMIT)

    def test_the_state_dict_goes_from_torchs_class_to_ours_and_back(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            torchs, ours = (cls(network()) for cls in CLASSES)
            assert list(torchs.state_dict()) == list(ours.state_dict())
            assert [n for n, _ in torchs.named_parameters()] == [
                n for n, _ in ours.named_parameters()
            ]
            train(torchs, rank)
            ours.load_state_dict(torchs.state_dict())
            assert_same(weights(torchs), weights(ours))
            train(ours, rank)
            torchs.load_state_dict(ours.state_dict())
            assert_same(weights(torchs), weights(ours))

        pool.run(run, timeout=LIMIT)

    def test_with_a_group_of_its_own_it_is_not_pickled_in_torchs_words(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(network(), process_group=dist.new_group())
            for attempt in (lambda: pickle.dumps(ddp), lambda: copy.deepcopy(ddp)):
                error = caught(attempt, RuntimeError)
                assert isinstance(error, GradsyncError)
                assert (
                    "DDP Pickling/Unpickling are only supported when using DDP with the default "
                    "process group" in str(error)
                )

        pool.run(run, timeout=LIMIT)

    def test_loading_without_a_process_group_says_so(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            data = pickle.dumps(OurDDP(network()))
            dist.destroy_process_group()
            error = caught(lambda: pickle.loads(data))
            assert "process group has not been initialized" in str(error), repr(error)

        pool.run(run, ranks=1, timeout=LIMIT)


class TestLetGo:
    def test_without_its_hooks_the_module_trains_locally_and_can_be_wrapped_again(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            module, reference = network(), network()
            ddp = OurDDP(module)
            ddp._remove_autograd_hooks()
            ddp._remove_autograd_hooks()
            count = Count()
            module(batch(rank)).sum().backward()
            assert count() == 0
            module.zero_grad()
            module.load_state_dict(network().state_dict())
            train(OurDDP(module), rank)
            train(OurDDP(reference), rank)
            assert_same(weights(module), weights(reference))

        pool.run(run, timeout=LIMIT)

    def test_a_module_wrapped_anew_is_reduced_once(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            module = nn.Linear(4, 2)
            for _ in range(3):
                ddp = OurDDP(module)
                train(ddp, rank)
                count = Count()
                ddp(batch(rank)).sum().backward()
                assert count() == 1
                del ddp

        pool.run(run, timeout=LIMIT)

    @pytest.mark.parametrize("trained", [False, True])
    @pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
    def test_deleting_the_wrapper_frees_it_and_the_module_trains_locally(
        self, pool: WorkerPool, options: dict[str, object], trained: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            module = nn.Linear(4, 2)
            ddp = OurDDP(module, **options)
            if trained:
                train(ddp, rank)
            ref, reducer = weakref.ref(ddp), weakref.ref(ddp.reducer)
            del ddp
            gc.collect()
            assert ref() is None
            assert reducer() is None
            module.zero_grad()
            count = Count()
            module(torch.ones(1 + rank, 4)).sum().backward()
            assert count() == 0
            assert torch.equal(module.bias.grad, torch.full((2,), 1.0 + rank))

        pool.run(run, timeout=LIMIT)

    def test_wrapping_fifty_times_leaves_nothing_behind(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            module = nn.Linear(64, 64)

            def tensors() -> int:
                gc.collect()
                return sum(1 for each in gc.get_objects() if isinstance(each, Tensor))

            refs = []
            for round_ in range(50):
                ddp = OurDDP(module)
                refs.append(weakref.ref(ddp))
                ddp(torch.ones(1, 64)).sum().backward()
                module.zero_grad()
                del ddp
                if round_ == 5:
                    early = tensors()
            assert tensors() < early + 10
            assert not any(ref() for ref in refs)

        pool.run(run, timeout=LIMIT)

    @pytest.mark.parametrize("find_unused", [False, True])
    def test_a_step_leaves_nothing_for_the_garbage_collector(
        self, pool: WorkerPool, find_unused: bool
    ) -> None:
        def run(rank: int, world: int) -> list[bool]:
            model = network()
            kept: list[weakref.ref[Tensor]] = []
            model[0].register_forward_hook(lambda _m, _i, out: kept.append(weakref.ref(out)))
            ddp = OurDDP(model, find_unused_parameters=find_unused)
            gc.collect()
            gc.disable()
            try:
                train(ddp, rank, steps=3)
                ddp(batch(rank, 3))  # and a forward without a backward
                return [each() is not None for each in kept]
            finally:
                gc.enable()

        assert pool.run(run, timeout=LIMIT) == [[False] * 4] * 2

    def test_an_output_may_outlive_its_wrapper(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            module = nn.Linear(4, 2)
            loss = OurDDP(module)(torch.ones(1 + rank, 4)).sum()
            gc.collect()
            loss.backward()
            assert module.bias.grad is not None

        pool.run(run, timeout=LIMIT)


class TestHelpers:
    def test_train_and_eval_reach_the_module_and_return_the_wrapper(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(network())
            assert ddp.eval() is ddp
            assert not ddp.training
            assert not ddp.module[1].training
            assert ddp.train() is ddp
            assert ddp.module[1].training
            assert ddp.train(False) is ddp

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_check_reducer_finalized_passes_between_steps_and_tells_of_a_failed_one(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(network())
            ddp._check_reducer_finalized()
            train(ddp, rank)
            ddp._check_reducer_finalized()

            class Head(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

                def forward(self, x: Tensor) -> Tensor:
                    return self.used(x)

            ddp = OurDDP(Head())
            ddp(batch(rank)).sum().backward()
            error = caught(ddp._check_reducer_finalized, RuntimeError)
            assert "Expected to have finished reduction in the prior iteration" in str(error)

        pool.run(run, timeout=LIMIT)

    def test_scatter_gather_and_to_kwargs_are_there_with_torchs_signatures(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            import inspect

            for name in ("scatter", "gather", "to_kwargs"):
                left, right = (inspect.signature(getattr(cls, name)) for cls in CLASSES)
                assert list(left.parameters) == list(right.parameters), name
            module = nn.Linear(4, 2)
            ddp = OurDDP(module)
            x = torch.ones(2, 4)
            for each in (TorchDDP(nn.Linear(4, 2)), ddp):
                inputs, kwargs = each.to_kwargs((x, {"a": [x]}), {"b": x}, 0)
                assert torch.equal(inputs[0][0], x)
                assert torch.equal(inputs[0][1]["a"][0], x)
                assert torch.equal(kwargs[0]["b"], x)

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_functional_call_through_the_wrapper_uses_the_given_parameters(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(nn.Linear(4, 2))
            given = {
                "module.weight": torch.ones(2, 4),
                "module.bias": torch.zeros(2),
            }
            out = torch.func.functional_call(ddp, given, (torch.ones(1, 4),))
            assert torch.equal(out, torch.full((1, 2), 4.0))
            train(ddp, rank)
            assert_equal_on_all_ranks(ddp.parameters())

        pool.run(run, timeout=LIMIT)

    def test_functional_call_with_the_own_parameters_reduces_their_gradients(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            results = []
            for cls in CLASSES:
                torch.manual_seed(7)
                ddp = cls(nn.Linear(4, 2))
                for step in range(3):
                    ddp.zero_grad()
                    params = dict(ddp.named_parameters())
                    torch.func.functional_call(ddp, params, (batch(rank, step),)).sum().backward()
                results.append(gradients(ddp))
            assert_same(*results)

        pool.run(run, timeout=LIMIT)


class TestHooksOfTheUser:
    def test_forward_and_backward_hooks_run_as_often_as_with_torch(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            calls = []
            for cls in CLASSES:
                seen: list[str] = []
                torch.manual_seed(7)
                ddp = cls(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
                for at, module in (("wrapper", ddp), ("module", ddp.module), ("0", ddp.module[0])):
                    module.register_forward_pre_hook(
                        lambda *_, seen=seen, at=at: seen.append(f"pre {at}")
                    )
                    module.register_forward_hook(
                        lambda *_, seen=seen, at=at: seen.append(f"post {at}")
                    )
                    module.register_full_backward_hook(
                        lambda *_, seen=seen, at=at: seen.append(f"backward {at}")
                    )
                ddp.module[0].weight.register_hook(lambda grad: grad * 2)
                ddp.module[1].weight.register_post_accumulate_grad_hook(
                    lambda _, seen=seen: seen.append("accumulated")
                )
                for step in range(2):
                    ddp.zero_grad()
                    ddp(batch(rank, step).requires_grad_()).sum().backward()
                calls.append((seen, gradients(ddp)))
            (torchs, expected), (ours, got) = calls
            assert sorted(ours) == sorted(torchs)
            assert_same(expected, got)

        pool.run(run, timeout=LIMIT)


class TestInTorchsPlace:
    def test_patched_torch_has_our_class_everywhere_and_unpatched_its_own(self) -> None:
        from torch.distributed.checkpoint import state_dict
        from torch.nn import parallel

        assert state_dict.DDP is TorchDDP
        try:
            for _ in range(2):
                gradsync.patch_torch()
                assert parallel.DistributedDataParallel is OurDDP
                assert parallel.distributed.DistributedDataParallel is OurDDP
                assert torch.nn.parallel.DistributedDataParallel is OurDDP
                assert state_dict.DDP is OurDDP
        finally:
            for _ in range(2):
                gradsync.unpatch_torch()
                assert parallel.DistributedDataParallel is TorchDDP
                assert parallel.distributed.DistributedDataParallel is TorchDDP
                assert state_dict.DDP is TorchDDP

    def test_unpatching_what_was_not_patched_does_nothing(self) -> None:
        gradsync.unpatch_torch()
        assert torch.nn.parallel.DistributedDataParallel is TorchDDP

    def test_an_unmodified_program_gets_ours_and_its_isinstance_holds(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            gradsync.patch_torch()
            try:
                ddp = torch.nn.parallel.DistributedDataParallel(network())
                assert type(ddp) is OurDDP
                assert isinstance(ddp, torch.nn.parallel.DistributedDataParallel)
                assert isinstance(ddp, torch.nn.parallel.distributed.DistributedDataParallel)
                train(ddp, rank)
                assert_equal_on_all_ranks(ddp.parameters())
            finally:
                gradsync.unpatch_torch()

        pool.run(run, timeout=LIMIT)
