"""Sparse gradients of nn.Embedding and nn.EmbeddingBag: reduced as sparse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replicas import (
    CLASSES,
    OurDDP,
    assert_equal_on_all_ranks,
    assert_same,
    caught,
    gradients,
    weights,
)
from torch import Tensor, nn

from gradsync import GradsyncError
from gradsync.testing import WorkerPool

LIMIT = 40.0
WORDS = 9


class Words(nn.Module):
    """A sparse embedding, and a dense layer that may be left out."""

    def __init__(self, dense: bool = True, bag: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.table = kind(WORDS, 3, sparse=True)
        self.head = nn.Linear(3, 2) if dense else None

    def forward(self, words: Tensor | None) -> Tensor:
        x = torch.ones(2, 3) if words is None else self.table(words)
        return x if self.head is None else self.head(x)


def words(rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, WORDS, (4, 2 + rank), generator=generator)


def loss(module: nn.Module, *inputs: object) -> Tensor:
    return module(*inputs).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "embedding": Words,
    "bag": lambda: Words(bag=True),
    "only sparse": lambda: Words(dense=False),
    "only a sparse bag": lambda: Words(dense=False, bag=True),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("views", [False, True])
class TestReduced:
    def test_gradients_are_sparse_and_those_of_torch_and_of_the_joined_batch(
        self, pool: WorkerPool, model: str, views: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            build = MODELS[model]
            models = [cls(build(), gradient_as_bucket_view=views) for cls in CLASSES]
            local = build()
            for step in range(3):
                for ddp in models:
                    ddp.zero_grad()
                    loss(ddp, words(rank, step)).backward()
                assert models[1].module.table.weight.grad.is_sparse
                assert_same(*map(gradients, models), hint=step)
                local.zero_grad()
                for r in range(world):
                    (loss(local, words(r, step)) / world).backward()
                for got, expected in zip(models[1].parameters(), local.parameters(), strict=True):
                    if got.is_sparse or got.grad.is_sparse:
                        got, expected = got.grad.to_dense(), expected.grad.to_dense()
                    else:
                        got, expected = got.grad, expected.grad
                    torch.testing.assert_close(got, expected)

        pool.run(run, timeout=LIMIT)

    def test_no_sync_accumulates_and_then_reduces_the_sum(
        self, pool: WorkerPool, model: str, views: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            build = MODELS[model]
            models = [cls(build(), gradient_as_bucket_view=views) for cls in CLASSES]
            for step in range(2):
                for ddp in models:
                    ddp.zero_grad()
                    with ddp.no_sync():
                        loss(ddp, words(rank, step)).backward()
                        loss(ddp, words(rank, step + 5)).backward()
                    loss(ddp, words(rank, step + 9)).backward()
                assert_same(*map(gradients, models), hint=step)
            assert_equal_on_all_ranks(p.grad for p in models[1].parameters())

        pool.run(run, timeout=LIMIT)


class TestOptimizers:
    def test_training_with_sparse_optimizers_ends_in_torchs_weights(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for optim in (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad):
                models = [cls(Words()) for cls in CLASSES]
                for ddp in models:
                    sparse = optim(ddp.module.table.parameters(), lr=0.1)
                    dense = torch.optim.SGD(ddp.module.head.parameters(), lr=0.1)
                    for step in range(4):
                        ddp.zero_grad()
                        loss(ddp, words(rank, step)).backward()
                        sparse.step()
                        dense.step()
                assert_same(weights(models[0]), weights(models[1]), hint=optim)
                assert_equal_on_all_ranks(models[1].parameters())

        pool.run(run, timeout=LIMIT)


class TestUnused:
    @pytest.mark.parametrize("model", ["embedding", "bag"])
    def test_unused_on_one_rank_gets_the_average_with_nothing(
        self, pool: WorkerPool, model: str
    ) -> None:
        def run(rank: int, world: int) -> None:  # torch's DDP cannot
            ddp = OurDDP(MODELS[model](), find_unused_parameters=True)
            local = MODELS[model]()
            for step in range(3):
                idle = step % 2
                ddp.zero_grad()
                loss(ddp, None if rank == idle else words(rank, step)).backward()
                local.zero_grad()
                loss(local, words(1 - idle, step)).backward()
                got = ddp.module.table.weight.grad
                assert got.is_sparse
                expected = local.table.weight.grad.to_dense() / 2
                torch.testing.assert_close(got.to_dense(), expected)

        pool.run(run, timeout=LIMIT)

    def test_unused_on_all_ranks_keeps_none_and_keeps_the_old_gradient(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(Words(), find_unused_parameters=True)
            table = ddp.module.table.weight
            loss(ddp, None).backward()
            assert table.grad is None
            loss(ddp, words(rank)).backward()
            before = table.grad.to_dense()
            loss(ddp, None).backward()
            assert table.grad.is_sparse
            assert torch.equal(table.grad.to_dense(), before)

        pool.run(run, timeout=LIMIT)

    def test_static_graph_knows_sparse_parameters_too(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            models = [cls(Words(), static_graph=True) for cls in CLASSES]
            for step in range(3):
                for ddp in models:
                    ddp.zero_grad()
                    loss(ddp, words(rank, step)).backward()
                assert_same(*map(gradients, models), hint=step)

        pool.run(run, timeout=LIMIT)


class TestWrong:
    def test_a_dense_gradient_for_a_sparse_parameter_is_a_clear_error(
        self, pool: WorkerPool
    ) -> None:
        class Tied(Words):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) + self.table.weight.sum()

        def run(rank: int, world: int) -> str:
            ddp = OurDDP(Tied())
            error = caught(lambda: loss(ddp, words(rank)).backward(), RuntimeError)
            assert isinstance(error, GradsyncError), repr(error)
            return str(error)

        for text in pool.run(run, timeout=LIMIT):
            assert "table.weight" in text
            assert "dense gradient" in text

    def test_a_sparse_gradient_for_a_dense_parameter_is_a_clear_error(
        self, pool: WorkerPool
    ) -> None:
        class Late(Words):
            def __init__(self) -> None:
                super().__init__()
                self.table.sparse = False

        def run(rank: int, world: int) -> str:
            ddp = OurDDP(Late())
            ddp.module.table.sparse = True
            error = caught(lambda: loss(ddp, words(rank)).backward(), RuntimeError)
            assert isinstance(error, GradsyncError), repr(error)
            return str(error)

        for text in pool.run(run, timeout=LIMIT):
            assert "table.weight" in text
            assert "sparse" in text

    @pytest.mark.parametrize("static", [False, True])  # sent in backward, and at its end
    def test_a_dense_gradient_on_one_rank_only_does_not_hang_the_other(
        self, pool: WorkerPool, static: bool
    ) -> None:
        class Tied(Words):
            def forward(self, x: Tensor, tie: bool) -> Tensor:
                out = super().forward(x)
                return out + self.table.weight.sum() if tie else out

        def run(rank: int, world: int) -> str:
            ddp = OurDDP(Tied(), static_graph=static)
            error = caught(lambda: loss(ddp, words(rank), rank == 1).backward(), RuntimeError)
            assert isinstance(error, GradsyncError), repr(error)
            ddp.zero_grad()
            loss(ddp, words(rank), False).backward()
            assert_equal_on_all_ranks(p.grad for p in ddp.parameters())
            return str(error)

        texts = pool.run(run, timeout=LIMIT, group_timeout=10)
        assert "rank 1" in texts[0]
        assert "table.weight" in texts[1]


class TestAnnouncedRows:
    def test_they_give_the_gradients_that_are_there_without_an_announcement(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            plain, announced = OurDDP(Words()), OurDDP(Words())
            for step in range(3):
                rows = torch.cat([words(r, step).flatten() for r in range(world)])
                announced._set_sparse_metadata({"table.weight": rows})
                for ddp in (plain, announced):
                    ddp.zero_grad()
                    loss(ddp, words(rank, step)).backward()
                grads = [ddp.module.table.weight.grad for ddp in (plain, announced)]
                assert all(grad.is_sparse for grad in grads)
                assert torch.equal(*(grad.to_dense() for grad in grads))
                assert announced.module.table.weight.grad._nnz() == len(rows.unique())

        pool.run(run, timeout=LIMIT)

    def test_a_row_that_was_not_announced_is_an_error_on_every_rank(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> str:
            ddp = OurDDP(Words())
            ddp._set_sparse_metadata({"table.weight": torch.tensor([0, 1])})
            which = torch.tensor([[0, 1 if rank == 0 else WORDS - 1]])
            return str(caught(lambda: loss(ddp, which).backward(), GradsyncError))

        first, second = pool.run(run, timeout=LIMIT)
        assert "rank 1" in first
        assert "table.weight" in second
        assert str(WORDS - 1) in second

    def test_a_name_without_sparse_gradients_is_refused(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> str:
            ddp = OurDDP(Words())
            rows = {"head.weight": torch.tensor([0])}
            return str(caught(lambda: ddp._set_sparse_metadata(rows), ValueError))

        [text] = pool.run(run, ranks=1, timeout=LIMIT)
        assert "head.weight" in text
        assert "table.weight" in text
