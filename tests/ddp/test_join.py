"""Uneven inputs: ranks that have run out of them take part in the steps of the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from join_parts import LIMIT, Tower, train
from replicas import (
    CLASSES,
    Branches,
    Count,
    OurDDP,
    TorchDDP,
    assert_equal_on_all_ranks,
    assert_same,
    batch,
    gradients,
    quiet,
    weights,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel.distributed import _BufferCommHookLocation

from gradsync.testing import WorkerPool

SMALL = {"bucket_cap_mb": 1e-4}
# How many batches each rank has.
INPUTS: dict[str, tuple[int, ...]] = {
    "rank 0 first": (1, 4),
    "rank 0 last": (4, 1),
    "one without any": (0, 3),
    "the other without any": (3, 0),
    "even": (2, 2),
    "nobody": (0, 0),
    "three": (2, 1, 4),
    "three, the first without any": (0, 3, 2),
    "three, two at once": (4, 1, 1),
}


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[int, ...]]] = {
    "plain": (Tower, {}, ()),
    "buckets": (Tower, SMALL, ()),
    "views": (Tower, {"gradient_as_bucket_view": True}, ()),
    "buffers": (partial(Tower, norm=True), {}, ()),
    "buffers that are left alone": (partial(Tower, norm=True), {"forward_sync_buffers": False}, ()),
    "unused": (partial(Branches, 2), {"find_unused_parameters": True}, (0,)),
    "static": (Tower, {"static_graph": True}, ()),
    "static, unused": (partial(Branches, 2), {"static_graph": True}, (0,)),
}


class TestAgainstTorch:
    @pytest.mark.parametrize("inputs", INPUTS)
    def test_all_ranks_end_with_torchs_weights(self, pool: WorkerPool, inputs: str) -> None:
        def run(rank: int, world: int) -> None:
            mine = INPUTS[inputs][rank]
            for name, (build, options, use) in MODELS.items():
                for initial in (True, False):
                    # In torch's class a static graph needs a first step on every rank.
                    lost = "static" in name and 0 in INPUTS[inputs]
                    other = OurDDP if lost else TorchDDP
                    find_unused = {"find_unused_parameters": True}
                    ended = []
                    for cls, how in ((other, find_unused if lost else options), (OurDDP, options)):
                        ddp = cls(build(), **how)
                        train(ddp, rank, mine, *use, divide_by_initial_world_size=initial)
                        ended.append(weights(ddp))
                    hint = f"{name}, {initial=}"
                    for key in ended[0]:
                        torch.testing.assert_close(ended[1][key], ended[0][key], msg=hint)
                    if world == 2:
                        assert_same(*ended, hint=hint)
                    assert_equal_on_all_ranks(ddp.parameters())

        ranks = len(INPUTS[inputs])
        pool.run(run, ranks=ranks, timeout=LIMIT, group_timeout=10)

    def test_no_sync_eval_and_no_grad_may_be_used_inside(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for norm in (False, True):
                for initial in (True, False):
                    ended = []
                    for cls in CLASSES:
                        ddp = cls(Tower(norm))
                        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
                        with quiet(), ddp.join(divide_by_initial_world_size=initial):
                            for step in range(2 + 2 * rank):
                                with ddp.no_sync():
                                    ddp(batch(rank, step)).square().mean().backward()
                                ddp(batch(rank, step + 50)).square().mean().backward()
                                optimizer.step()
                                optimizer.zero_grad()
                                if cls is OurDDP:  # torch has joined ranks wait for a backward
                                    ddp.eval()
                                    with torch.no_grad():
                                        ddp(batch(rank, step))
                                    ddp.train()
                        ended.append(weights(ddp))
                    assert_same(*ended, hint=(norm, initial))

        pool.run(run, timeout=LIMIT, group_timeout=10)

    def test_hooks_are_run_by_ranks_that_have_joined(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            def power() -> tuple[Any, Any]:
                state = powerSGD_hook.PowerSGDState(
                    None, start_powerSGD_iter=2, min_compression_rate=1
                )
                return state, powerSGD_hook.powerSGD_hook

            hooks: list[Callable[[], tuple[Any, Any]]] = [
                lambda: (None, default_hooks.allreduce_hook),
                lambda: (None, default_hooks.fp16_compress_hook),
                power,
            ]
            for make in hooks:
                for initial in (True, False):
                    ended = []
                    for cls in CLASSES:
                        ddp = cls(Tower())
                        ddp.register_comm_hook(*make())
                        train(ddp, rank, 2 + 3 * rank, divide_by_initial_world_size=initial)
                        ended.append(weights(ddp))
                    assert_same(*ended, hint=(make, initial))
                # Several buckets, which on gloo torch's class cannot with hooks that chain.
                ddp = OurDDP(Tower(), **SMALL)
                ddp.register_comm_hook(*make())
                train(ddp, rank, 5 - 3 * rank)
                assert_equal_on_all_ranks(ddp.parameters())

        pool.run(run, timeout=LIMIT, group_timeout=10)

    def test_optimizers_in_the_backward_step_as_torchs_do(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ended = []
            for cls in CLASSES:
                ddp = cls(Tower())
                ddp._register_fused_optim(torch.optim.SGD, 0.1)
                with quiet(), ddp.join():
                    for step in range(1 + 3 * rank):
                        ddp.zero_grad()
                        ddp(batch(rank, step)).square().mean().backward()
                ended.append(weights(ddp))
            assert_same(*ended)

        pool.run(run, timeout=LIMIT, group_timeout=10)

    def test_zero_may_be_in_the_same_context(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            for norm in (False, True):
                for inputs in ((1, 4, 2), (0, 2, 3)):
                    ended = []
                    for cls in CLASSES:
                        ddp = cls(Tower(norm))
                        with quiet():
                            zero = ZeroRedundancyOptimizer(
                                ddp.parameters(), optimizer_class=torch.optim.Adam, lr=0.05
                            )
                        with quiet(), Join([ddp, zero]):
                            for step in range(inputs[rank]):
                                zero.zero_grad()
                                ddp(batch(rank, step)).square().mean().backward()
                                zero.step()
                        ended.append(weights(ddp))
                    for key in ended[0]:
                        torch.testing.assert_close(ended[1][key], ended[0][key])
                    assert_equal_on_all_ranks(ended[1].values())

        pool.run(run, ranks=3, timeout=LIMIT, group_timeout=10)

    def test_two_modules_may_be_in_one_context(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for inputs in ((1, 4), (3, 0)):
                ended = []
                for cls in CLASSES:
                    pair = [cls(Tower()), cls(Tower(norm=True))]
                    optimizer = torch.optim.SGD(
                        [p for ddp in pair for p in ddp.parameters()], lr=0.1
                    )
                    with quiet(), Join(pair):
                        for step in range(inputs[rank]):
                            optimizer.zero_grad()
                            for ddp in pair:
                                ddp(batch(rank, step)).square().mean().backward()
                            optimizer.step()
                    ended.append(
                        {**weights(pair[0]), **{f"1.{k}": v for k, v in weights(pair[1]).items()}}
                    )
                assert_same(*ended, hint=inputs)
                assert_equal_on_all_ranks(ended[1].values())

        pool.run(run, timeout=LIMIT, group_timeout=10)


class Wide(nn.Module):
    """With a gradient of 1.4 MiB, which is reduced where it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(4, 600)
        self.square = nn.Linear(600, 600)
        self.last = nn.Linear(600, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.square(torch.tanh(self.first(x)))))


class Words(nn.Module):
    """With sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(9, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words))


class TestSteps:
    @pytest.mark.parametrize("initial", [True, False])
    def test_gradients_are_divided_by_all_ranks_or_by_those_that_go_on(
        self, pool: WorkerPool, initial: bool
    ) -> None:
        def run(rank: int, world: int) -> None:
            pair = OurDDP(nn.Linear(2, 1)), OurDDP(nn.Linear(2, 1))
            seen = []
            with quiet(), Join(list(pair), divide_by_initial_world_size=initial):
                for _ in range(1 + rank):
                    for ddp in pair:
                        ddp.zero_grad()
                        ddp(torch.ones(1, 2)).sum().backward()
                        seen.append(ddp.module.bias.grad.item())
            expected = [1.0, 2 / 3, 1 / 3] if initial else [1.0, 1.0, 1.0]
            assert seen == pytest.approx([e for e in expected[: 1 + rank] for _ in pair])
            for ddp in pair:
                ddp.zero_grad()
                ddp(torch.ones(1, 2)).sum().backward()  # and by all ranks again
                assert ddp.module.bias.grad.item() == 1

        pool.run(run, ranks=3, timeout=LIMIT, group_timeout=10)

    def test_large_gradients_and_sparse_ones_are_averaged_with_zeros(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            def words(rank: int, step: int) -> Tensor:
                return torch.tensor([rank, step, 8, 8])

            for build, inputs in ((Wide, batch), (Words, words)):
                for options in ({}, {"gradient_as_bucket_view": True}):
                    for counts in ((1, 3), (3, 0)):
                        ddp, oracle = OurDDP(build(), bucket_cap_mb=0.5, **options), build()
                        optimizers = [
                            torch.optim.SGD(m.parameters(), lr=0.1) for m in (ddp, oracle)
                        ]
                        with quiet(), ddp.join():
                            for step in range(counts[rank]):
                                optimizers[0].zero_grad()
                                ddp(inputs(rank, step)).square().mean().backward()
                                optimizers[0].step()
                        for step in range(5, 7):  # and ordinary steps after it
                            optimizers[0].zero_grad()
                            ddp(inputs(rank, step)).square().mean().backward()
                            optimizers[0].step()
                        for step in (0, 1, 2, 5, 6):
                            optimizers[1].zero_grad()
                            for r in range(world):
                                if step < counts[r] or step >= 5:
                                    loss = oracle(inputs(r, step)).square().mean()
                                    (loss / world).backward()
                            optimizers[1].step()
                        for name, value in oracle.state_dict().items():
                            torch.testing.assert_close(ddp.module.state_dict()[name], value)

        pool.run(run, timeout=LIMIT, group_timeout=10)

    @pytest.mark.parametrize("kind", MODELS)
    def test_epochs_may_follow_each_other_and_ordinary_training_follows(
        self, pool: WorkerPool, kind: str
    ) -> None:
        def run(rank: int, world: int) -> None:
            build, options, use = MODELS[kind]
            ended = []
            for cls in CLASSES:
                ddp = cls(build(), **options)
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)
                # In torch's class a static graph needs a first step on every rank.
                first = (1, 2, 3) if "static" in kind else (0, 2, 3)
                for epoch in (first, (3, 1, 2), (2, 2, 0)):
                    train(ddp, rank, epoch[rank], *use, optimizer=optimizer)
                for step in range(3):
                    optimizer.zero_grad()
                    ddp(batch(rank, step), *use).square().mean().backward()
                    optimizer.step()
                ended.append(gradients(ddp.module))
            # Momenta differ from rank to rank after an uneven epoch, so weights do as well.
            for key, theirs in ended[0].items():
                assert (theirs is None) == (ended[1][key] is None)
                if theirs is not None:
                    torch.testing.assert_close(ended[1][key], theirs)

        pool.run(run, ranks=3, timeout=LIMIT, group_timeout=10)

    def test_nothing_is_announced_after_the_context_nor_if_it_is_not_enabled(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(Tower())
            assert "join_uneven_inputs" not in ddp._get_ddp_logging_data()
            train(ddp, rank, 1 + rank)
            assert ddp._get_ddp_logging_data()["join_uneven_inputs"]
            count = Count()
            for step in range(2):
                ddp(batch(rank, step)).sum().backward()
            plain = count()
            with ddp.join(enable=False):
                for step in range(2):
                    ddp(batch(rank, step)).sum().backward()
            assert count() == plain
            if rank == 0:  # alone: it must wait for nobody
                with torch.no_grad():
                    ddp(batch(rank))
            assert count() == 0
            with quiet(), ddp.join():
                ddp(batch(rank)).sum().backward()
            assert count() > plain // 2
            assert_equal_on_all_ranks(ddp.parameters())

        pool.run(run, timeout=LIMIT, group_timeout=8)

    def test_a_static_graph_is_learned_by_a_rank_that_had_no_first_step(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            from torch.utils.checkpoint import checkpoint

            class Twice(nn.Module):
                """Its layer fires twice in a backward, and another one never."""

                def __init__(self) -> None:
                    super().__init__()
                    torch.manual_seed(7)
                    self.head = nn.Linear(4, 4)
                    self.layer = nn.Linear(4, 4)
                    self.idle = nn.Linear(4, 4)

                def forward(self, x: Tensor) -> Tensor:
                    x = self.head(x)
                    for _ in range(2):
                        x = checkpoint(self.layer, x, use_reentrant=True)
                    return self.head(x)

            ddp, oracle = OurDDP(Twice(), static_graph=True), Twice()
            for epoch in ((0, 2), (2, 2), (1, 3)):
                with quiet(), ddp.join():
                    for step in range(epoch[rank]):
                        ddp.zero_grad()
                        ddp(batch(rank, step)).sum().backward()
            ddp.zero_grad()
            with quiet():
                ddp(batch(rank)).sum().backward()
                for r in range(world):
                    (oracle(batch(r)).sum() / world).backward()
            torch.testing.assert_close(ddp.module.layer.weight.grad, oracle.layer.weight.grad)
            assert ddp.module.idle.weight.grad is None

        pool.run(run, timeout=LIMIT, group_timeout=8)

    @pytest.mark.parametrize("where", ["PRE_FORWARD", "POST_FORWARD"])
    def test_buffer_hooks_are_run_by_ranks_that_have_joined(
        self, pool: WorkerPool, where: str
    ) -> None:
        def run(rank: int, world: int) -> None:
            def total(state: Any, buffers: dict[str, Tensor]) -> list[Any]:
                floats = [b for b in buffers.values() if b.is_floating_point()]
                return [dist.all_reduce(b, async_op=True).get_future() for b in floats]

            ddp = OurDDP(Tower(norm=True))
            ddp._register_buffer_comm_hook(None, total, _BufferCommHookLocation[where])
            train(ddp, rank, 1 + 2 * rank)
            train(ddp, rank, 3 - 2 * rank)
            assert_equal_on_all_ranks(ddp.state_dict().values())

        pool.run(run, timeout=LIMIT, group_timeout=8)
