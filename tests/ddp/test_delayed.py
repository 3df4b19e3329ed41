"""Delayed all-reduce: chosen parameters are reduced together, when one gradient arrives."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracles import FEATURES, Net, batch, loss_of, seeded, sgd
from replicas import assert_equal_on_all_ranks, caught
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradsync import ArgumentError, ModelMismatchError, PeerStepError
from gradsync import DistributedDataParallel as DDP
from gradsync.testing import WorkerPool, count_collectives

pytestmark = pytest.mark.timeout(60)

LIMIT = {"timeout": 40.0, "group_timeout": 15.0}

EVERYTHING = ("first.weight", "first.bias", "second.weight", "second.bias",
              "last.weight", "last.bias")  # fmt: skip


def delayed(module: nn.Module, names: tuple[str, ...], trigger: str, **options: Any) -> DDP:
    named = dict(module.named_parameters())
    return DDP(
        module,
        delay_all_reduce_named_params=[(name, named[name]) for name in names],
        param_to_hook_all_reduce=named[trigger],
        **options,
    )


def joined(step: int, world: int) -> Tensor:
    return torch.cat([batch(step, rank) for rank in range(world)])


def follow_one_process(
    rank: int,
    world: int,
    ddp: DDP,
    *,
    make: Callable[[], nn.Module] = Net,
    step: Callable[[nn.Module, Tensor], None] | None = None,
    times: float = 1.0,
    set_to_none: bool = True,
    hint: str = "",
) -> None:
    """Train; gradients and weights have to be those of one process with all the batches."""
    step = step or (lambda model, x: loss_of(model(x)).backward())
    single = seeded(make)
    single.load_state_dict(ddp.module.state_dict())
    optimizers = sgd(ddp.parameters()), sgd(single.parameters())
    for index in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        step(ddp, batch(index, rank))
        step(single, joined(index, world))
        for (name, mine), its in zip(
            ddp.module.named_parameters(), single.parameters(), strict=True
        ):
            where = f"{hint}, step {index}, {name}"
            assert mine.grad is not None, where
            its.grad.mul_(times)
            torch.testing.assert_close(
                mine.grad, its.grad, rtol=1e-4, atol=1e-6, msg=lambda t, w=where: f"{w}: {t}"
            )
        for optimizer in optimizers:
            optimizer.step()
    assert_equal_on_all_ranks(p.grad for p in ddp.parameters())


def test_some_or_all_parameters_with_an_early_or_a_late_trigger(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for names in (("second.weight",), ("first.weight", "last.bias"), EVERYTHING):
            for trigger in ("first.weight", "second.bias", "last.bias"):
                for views in (False, True):
                    ddp = delayed(seeded(Net), names, trigger, gradient_as_bucket_view=views)
                    follow_one_process(
                        rank,
                        world,
                        ddp,
                        set_to_none=views,
                        hint=f"{names} at {trigger}, views {views}",
                    )

    pool.run(run, ranks=2, **LIMIT)


def test_replicas_start_equal_and_frozen_parameters_stay(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        torch.manual_seed(rank)
        module = Net()
        module.second.requires_grad_(False)
        ddp = delayed(module, EVERYTHING, "first.bias")
        assert_equal_on_all_ranks(module.parameters())
        loss_of(ddp(batch(0, rank))).backward()
        assert module.second.weight.grad is None
        assert_equal_on_all_ranks([module.first.weight.grad, module.last.weight.grad])

    pool.run(run, ranks=2, **LIMIT)


def test_the_delayed_parameters_take_one_all_reduce(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = delayed(seeded(Net), EVERYTHING, "first.weight")
        for _ in range(2):
            output = ddp(batch(0, rank))
            with count_collectives() as counted:
                loss_of(output).backward()
            assert dict(counted.by_op) == {"allreduce": 1}
            assert counted.bytes == 4 * sum(p.numel() for p in ddp.parameters())

    pool.run(run, ranks=2, **LIMIT)


def test_gradients_gather_until_the_trigger_has_one(pool: WorkerPool) -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common = nn.Linear(FEATURES, 4)
            self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor, right: bool) -> Tensor:
            x = self.common(x)
            return self.right(x) if right else self.left(x)

    names = tuple(name for name, _ in Towers().named_parameters())

    def both(model: nn.Module, x: Tensor) -> None:
        """The trigger is in the second backward only, and its gradient comes first there."""
        loss_of(model(x, False)).backward()
        if isinstance(model, DDP):
            local = model.module.common.weight.grad
            others = [torch.empty_like(local) for _ in range(dist.get_world_size())]
            dist.all_gather(others, local)
            assert not torch.equal(*others), "reduced too early"
        loss_of(model(x, True)).backward()

    def run(rank: int, world: int) -> None:
        for to_none in (False, True):
            ddp = delayed(seeded(Towers), names, "right.bias")
            follow_one_process(rank, world, ddp, make=Towers, step=both, set_to_none=to_none)

    pool.run(run, ranks=2, **LIMIT)


def test_gradients_accumulate_over_backwards_that_are_reduced(pool: WorkerPool) -> None:
    def twice(model: nn.Module, x: Tensor) -> None:
        loss_of(model(x[::2])).backward()
        loss_of(model(x[1::2])).backward()

    def run(rank: int, world: int) -> None:
        for names in (("first.weight", "last.bias"), EVERYTHING):
            for trigger in ("first.weight", "last.bias"):
                ddp = delayed(seeded(Net), names, trigger)
                follow_one_process(rank, world, ddp, step=twice)

    pool.run(run, ranks=2, **LIMIT)


def test_gradients_that_the_program_replaces_are_reduced_where_they_are(pool: WorkerPool) -> None:
    def replacing(model: nn.Module, x: Tensor) -> None:
        output = model(x)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        loss_of(output).backward()

    def with_graph(model: nn.Module, x: Tensor) -> None:
        loss_of(model(x)).backward(create_graph=True)  # autograd replaces them
        for param in model.parameters():
            param.grad = param.grad.detach()

    def run(rank: int, world: int) -> None:
        for step in (replacing, with_graph):
            ddp = delayed(seeded(Net), ("second.weight", "last.bias"), "first.weight")
            follow_one_process(rank, world, ddp, step=step, hint=step.__name__)

    pool.run(run, ranks=2, **LIMIT)


def test_a_parameter_with_two_names_is_reduced_once(pool: WorkerPool) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.second

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.again(torch.tanh(self.second(torch.tanh(self.first(x))))))

    def run(rank: int, world: int) -> None:
        for reduce, times in (("mean", 1), ("sum", world)):
            ddp = delayed(seeded(Tied), ("second.weight",), "first.weight", reduce=reduce)
            follow_one_process(rank, world, ddp, make=Tied, times=times)

    pool.run(run, ranks=2, **LIMIT)


def test_several_dtypes(pool: WorkerPool) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Linear(FEATURES, 4)
            self.wide = nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(self.narrow(x).double())

    names = tuple(name for name, _ in Mixed().named_parameters())

    def run(rank: int, world: int) -> None:
        ddp = delayed(seeded(Mixed), names, "narrow.weight")
        follow_one_process(rank, world, ddp, make=Mixed)
        assert ddp.module.wide.weight.grad.dtype == torch.float64

    pool.run(run, ranks=2, **LIMIT)


def test_the_dtype_can_change_later(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for names in (("second.weight", "last.bias"), EVERYTHING):
            ddp = delayed(seeded(Net), names, "first.weight")
            loss_of(ddp(batch(0, rank))).backward()
            ddp.double()
            for _ in range(2):
                loss_of(ddp(batch(1, rank).double())).backward()
            single = seeded(Net)
            loss_of(single(joined(0, world))).backward()
            single.double()
            for _ in range(2):
                loss_of(single(joined(1, world).double())).backward()
            for mine, its in zip(ddp.parameters(), single.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, its.grad, rtol=1e-5, atol=1e-6)

    pool.run(run, ranks=2, **LIMIT)


def test_a_trigger_inside_a_checkpoint(pool: WorkerPool) -> None:
    class Recomputes(Net):
        reentrant = True

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            x = checkpoint(lambda x: torch.tanh(self.second(x)), x, use_reentrant=self.reentrant)
            return self.last(x)

    def run(rank: int, world: int) -> None:
        for names in (("first.weight", "last.bias"), EVERYTHING):
            for reentrant in (False, True):
                Recomputes.reentrant = reentrant
                ddp = delayed(seeded(Recomputes), names, "second.weight")
                follow_one_process(
                    rank, world, ddp, make=Recomputes, hint=f"{names} reentrant {reentrant}"
                )

    pool.run(run, ranks=2, **LIMIT)


def test_sums_are_not_divided(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = delayed(seeded(Net), ("second.weight",), "first.weight", reduce="sum")
        follow_one_process(rank, world, ddp, times=world)

    pool.run(run, ranks=2, **LIMIT)


def test_evaluation_touches_no_gradient(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = delayed(seeded(Net), EVERYTHING, "first.weight")
        with torch.no_grad(), count_collectives() as counted:
            ddp(batch(0, rank))
        assert counted.total == 0
        assert all(param.grad is None for param in ddp.parameters())

    pool.run(run, ranks=2, **LIMIT)


def test_a_backward_that_raises_on_one_rank_leaves_no_rank_waiting(pool: WorkerPool) -> None:
    class Fails(Net):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if self.fails:
                x.register_hook(lambda _gradient: 1 / 0)
            return self.last(torch.tanh(self.second(torch.tanh(x))))

    def run(rank: int, world: int) -> None:
        for names in (("last.weight", "first.weight"), EVERYTHING):
            ddp = delayed(seeded(Fails), names, "first.bias")
            ddp.module.fails = rank == 1
            loss = loss_of(ddp(batch(0, rank)))
            if rank == 1:
                caught(loss.backward, ZeroDivisionError)
            elif names is EVERYTHING:
                loss.backward()  # there is no bucket to bring the news
            else:
                caught(loss.backward, PeerStepError)
            ddp.module.fails = False
            follow_one_process(rank, world, ddp, make=Fails)

    pool.run(run, ranks=2, **LIMIT)


def test_a_pickled_wrapper_goes_on(pool: WorkerPool) -> None:
    def make() -> nn.Module:  # of classes that a worker can import
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 2))

    def run(rank: int, world: int) -> None:
        ddp = delayed(seeded(make), ("0.weight", "2.bias"), "0.bias")
        stored = io.BytesIO()
        torch.save(ddp, stored)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=False)
        for each in (loaded, ddp):
            follow_one_process(rank, world, each, make=make)

    pool.run(run, ranks=2, **LIMIT)


def test_arguments_that_cannot_be_are_refused_by_name(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        module, other = Net(), Net()
        names = "delay_all_reduce_named_params"
        trigger = "param_to_hook_all_reduce"
        good = [("first.weight", module.first.weight)]
        for given, words in (
            ({names: good}, (names, trigger)),
            ({trigger: module.first.weight}, (names, trigger)),
            ({names: [module.first.weight], trigger: module.first.bias}, (names,)),
            ({names: [("x", other.first.weight)], trigger: module.first.bias}, (names, "x")),
            ({names: good, trigger: other.first.bias}, (trigger,)),
            ({names: good, trigger: "first.weight"}, (trigger,)),
            (
                {names: [("wrong", module.first.weight)], trigger: module.first.bias},
                (names, "wrong"),
            ),
            ({names: 3, trigger: module.first.bias}, (names,)),
        ):
            error = caught(lambda given=given: DDP(module, **given), ArgumentError)
            for word in words:
                assert word in str(error), f"{word} is not in {error}"
        module.first.bias.requires_grad_(False)
        given = {names: good, trigger: module.first.bias}
        assert trigger in str(caught(lambda: DDP(module, **given), ArgumentError))

    pool.run(run, ranks=1, **LIMIT)


def test_ranks_that_delay_different_parameters_are_told(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        names = ("first.weight",) if rank == 0 else ("first.weight", "last.weight")
        caught(lambda: delayed(seeded(Net), names, "first.bias"), ModelMismatchError)

    pool.run(run, ranks=2, **LIMIT)
