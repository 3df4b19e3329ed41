"""static_graph=True: what it allows, and what happens when the promise is broken."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from replicas import (
    CLASSES,
    Branches,
    OurDDP,
    TorchDDP,
    assert_equal_on_all_ranks,
    assert_same,
    batch,
    caught,
    gradients,
)
from torch import Tensor, nn

from gradsync import GraphChangedError
from gradsync.testing import WorkerPool

LIMIT = 40.0
VIEWS = pytest.mark.parametrize("views", [False, True])


class Repeats(nn.Module):
    """Runs the same layer ``times`` times in a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = torch.tanh(self.layer(x))
        return self.head(x)


def train(ddp: nn.Module, rank: int, calls: list[tuple[int, ...]]) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    for step, call in enumerate(calls):
        optimizer.zero_grad()
        ddp(batch(rank, step), *call).square().mean().backward()
        optimizer.step()


class TestKept:
    @VIEWS
    def test_unused_parameters_are_allowed_and_the_weights_are_torchs(
        self, pool: WorkerPool, views: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            options = {"static_graph": True, "gradient_as_bucket_view": views}
            models = [cls(Branches(3), **options) for cls in CLASSES]
            for ddp in models:
                train(ddp, rank, [(0, 2)] * 4)
                assert ddp.module.branch[1].weight.grad is None
            assert_same(models[0].state_dict(), models[1].state_dict())
            assert_same(gradients(models[0]), gradients(models[1]))

        pool.run(run, timeout=LIMIT)

    @VIEWS
    def test_parameters_may_be_used_several_times(self, pool: WorkerPool, views: bool) -> None:
        def run(rank: int, world: int) -> None:
            options = {"static_graph": True, "gradient_as_bucket_view": views}
            models = [cls(Repeats(), **options) for cls in CLASSES]
            for ddp in models:
                train(ddp, rank, [(3,)] * 4)
            assert_same(models[0].state_dict(), models[1].state_dict())
            local = Repeats()
            optimizer = torch.optim.SGD(local.parameters(), 0.05, momentum=0.9)
            for step in range(4):
                joined = torch.cat([batch(r, step) for r in range(world)])
                optimizer.zero_grad()
                local(joined, 3).square().mean().backward()
                optimizer.step()
            for expected, got in zip(local.parameters(), models[1].parameters(), strict=True):
                torch.testing.assert_close(got, expected)

        pool.run(run, timeout=LIMIT)

    @VIEWS
    def test_ranks_may_have_different_graphs_that_stay(self, pool: WorkerPool, views: bool) -> None:
        def run(rank: int, world: int) -> None:
            options = {"static_graph": True, "gradient_as_bucket_view": views}
            models = [cls(Branches(3), **options) for cls in CLASSES]
            for ddp in models:
                train(ddp, rank, [(0, 1) if rank else (1, 2)] * 4)
            assert_same(models[0].state_dict(), models[1].state_dict())
            assert_equal_on_all_ranks(models[1].parameters())

        pool.run(run, timeout=LIMIT)

    def test_accumulation_with_no_sync_reduces_the_sum(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            models = [cls(Branches(3), static_graph=True) for cls in CLASSES]
            for ddp in models:
                for step in range(3):
                    ddp.zero_grad()
                    if step:  # torch cannot begin with it
                        with ddp.no_sync():
                            ddp(batch(rank, step + 10), 0, 2).sum().backward()
                    ddp(batch(rank, step), 0, 2).sum().backward()
            assert_same(*map(gradients, models))

        pool.run(run, timeout=LIMIT)

    def test_one_process_alone_trains_as_without_ddp(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp, local = OurDDP(Branches(3), static_graph=True), Branches(3)
            for model in (ddp, local):
                train(model, rank, [(0, 2)] * 3)
            assert_same(ddp.module.state_dict(), local.state_dict())

        pool.run(run, ranks=1, timeout=LIMIT)


class TestBroken:
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_parameter_no_longer_used_is_named(self, pool: WorkerPool, ranks: int) -> None:
        def run(rank: int, world: int) -> str:
            ddp = OurDDP(Branches(2), static_graph=True)
            train(ddp, rank, [(0, 1)] * 3)

            def break_it() -> None:
                ddp(batch(rank), 0).sum().backward()
                ddp(batch(rank), 0)

            error = caught(break_it, RuntimeError)
            assert isinstance(error, GraphChangedError), repr(error)
            return str(error)

        for text in pool.run(run, ranks=ranks, timeout=LIMIT):
            assert "Expected to have finished reduction in the prior iteration" in text
            assert "training graph has changed in this iteration" in text
            assert "branch.1.weight" in text
            assert "branch.1.bias" in text
            assert "stem" not in text
            assert "static_graph" in text

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_parameter_that_comes_into_use_is_named(self, pool: WorkerPool, ranks: int) -> None:
        def run(rank: int, world: int) -> str:
            ddp = OurDDP(Branches(2), static_graph=True)
            train(ddp, rank, [(0,)] * 3)
            error = caught(lambda: ddp(batch(rank), 0, 1).sum().backward(), RuntimeError)
            assert isinstance(error, GraphChangedError), repr(error)
            return str(error)

        for text in pool.run(run, ranks=ranks, timeout=LIMIT):
            assert "Your training graph has changed in this iteration" in text
            assert "branch.1.weight" in text or "branch.1.bias" in text
            assert "static_graph" in text

    def test_a_change_on_one_rank_is_no_hang_and_the_other_learns_of_it(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> str:
            ddp = OurDDP(Branches(2), static_graph=True)
            train(ddp, rank, [(0, 1)] * 3)

            def break_it() -> None:
                ddp(batch(rank), *((0, 1) if rank else (0,))).sum().backward()
                ddp(batch(rank), 0, 1)

            return str(caught(break_it, GraphChangedError))

        for text in pool.run(run, timeout=LIMIT):
            assert "branch.1.weight" in text
            assert "rank 0" in text

    def test_a_parameter_newly_used_on_one_rank_is_told_to_the_other(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> str:
            ddp = OurDDP(Branches(2), static_graph=True)
            train(ddp, rank, [(0,)] * 3)
            use = (0, 1) if rank else (0,)
            return str(caught(lambda: ddp(batch(rank), *use).sum().backward(), RuntimeError))

        texts = pool.run(run, timeout=LIMIT)
        assert "rank 1" in texts[0]
        assert "branch.1" in texts[1]


class TestLater:
    def test_set_static_graph_after_construction_is_the_same_as_the_argument(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            ddp, reference = OurDDP(Branches(3)), OurDDP(Branches(3), static_graph=True)
            ddp._set_static_graph()
            assert ddp.static_graph
            for model in (ddp, reference):
                train(model, rank, [(0, 2)] * 3)
            assert_same(ddp.state_dict(), reference.state_dict())

        pool.run(run, timeout=LIMIT)

    def test_twice_is_a_warning(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(Branches(), static_graph=True)
            with pytest.warns(UserWarning, match="no need to set it again"):
                ddp._set_static_graph()

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_with_find_unused_parameters_it_warns_that_one_is_enough(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            with pytest.warns(UserWarning, match="will detect unused parameters automatically"):
                ddp = OurDDP(Branches(3), static_graph=True, find_unused_parameters=True)
            train(ddp, rank, [(0, 2)] * 3)
            ddp = OurDDP(Branches(3), find_unused_parameters=True)
            with pytest.warns(UserWarning, match="will detect unused parameters automatically"):
                ddp._set_static_graph()
            train(ddp, rank, [(0, 2)] * 3)

        pool.run(run, timeout=LIMIT)

    def test_too_late_is_an_error_in_torchs_words_and_changes_nothing(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(Branches())
            train(ddp, rank, [(0, 1)])
            error = caught(ddp._set_static_graph, RuntimeError)
            assert "should be called before training loop starts" in str(error)
            assert "static_graph=True" in str(error)
            assert not ddp.static_graph
            train(ddp, rank, [(0, 1)] * 2)
            assert_equal_on_all_ranks(ddp.parameters())

        pool.run(run, timeout=LIMIT)


class TestPickled:
    @pytest.mark.parametrize("late", [False, True])
    def test_loaded_in_mid_training_it_still_reduces(self, pool: WorkerPool, late: bool) -> None:
        def run(rank: int, world: int) -> None:
            from replicas import Branches  # by reference, as pickle wants it

            ddp = OurDDP(Branches(3), static_graph=not late)
            if late:
                ddp._set_static_graph()
            train(ddp, rank, [(0, 2)] * 3)
            for loaded in (pickle.loads(pickle.dumps(ddp)), _through_torch(ddp)):
                assert loaded.static_graph
                for step in range(3):
                    for model in (ddp, loaded):
                        model.zero_grad()
                        model(batch(rank, step), 0, 2).sum().backward()
                    assert_same(gradients(ddp), gradients(loaded))
                assert_equal_on_all_ranks(p.grad for p in loaded.parameters() if p.grad is not None)

        pool.run(run, timeout=LIMIT)

    def test_torch_fails_here(self, pool: WorkerPool) -> None:
        """So that we notice when this is no longer a difference."""

        def run(rank: int, world: int) -> torch.Tensor:
            from replicas import Branches  # by reference, as pickle wants it

            ddp = TorchDDP(Branches(1), static_graph=True)
            train(ddp, rank, [(0,)] * 3)
            loaded = pickle.loads(pickle.dumps(ddp))
            loaded.zero_grad()
            loaded(batch(rank), 0).sum().backward()
            return loaded.module.stem.weight.grad

        first, second = pool.run(run, timeout=LIMIT)
        assert not torch.equal(first, second)


def _through_torch(ddp: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
