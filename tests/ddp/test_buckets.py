"""Buckets: how many, when they are sent, and that none of it changes a bit of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import FEATURES, Net, batch, check, loss_of, plain_step, seeded, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradsync import DistributedDataParallel as DDP
from gradsync import StateError
from gradsync.testing import WorkerPool, count_collectives

pytestmark = pytest.mark.timeout(60)

LIMIT = 50.0
LAYERS = 15
WIDTH = 64  # a weight is 16 KiB: less than a quarter of the caps, else it would go alone

both_kinds = pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])


class Tower(nn.Module):
    """Equal layers, so that the number of buckets for a cap is known."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


# What is asked for, and how many buckets that makes of a Tower once they are rebuilt.
CAPS: list[tuple[dict[str, Any], int]] = [
    ({"bucket_cap_mb": 0}, 2 * LAYERS),
    ({"bucket_cap_mb": 0.07}, LAYERS // 5),
    ({"bucket_cap_mb": 1000}, 1),
    ({}, 1),
    ({"bucket_cap_mb_list": [0]}, 2 * LAYERS),
    ({"bucket_cap_mb_list": [0.01, 0.07]}, 4),
    ({"bucket_cap_mb_list": [0.07, 1000]}, 2),
    ({"bucket_cap_mb_list": [1000, 0]}, 1),
]


def storages(model: nn.Module) -> set[int]:
    """The memory blocks that the gradients lie in."""
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(grad is not None for grad in grads)
    return {grad.untyped_storage().data_ptr() for grad in grads if grad is not None}


def collectives_by_step(model: nn.Module, rank: int, steps: int) -> list[list[str]]:
    """The names of the collectives of each step, in order."""
    logs = []
    with count_collectives() as counted:
        for index in range(steps):
            counted.clear()
            plain_step(model, batch(index, rank), index)
            logs.append([entry.op for entry in counted.log])
    return logs


# ------------------------------------------------------------------ results


@both_kinds
def test_the_result_is_bitwise_the_same_however_gradients_are_bucketed(
    pool: WorkerPool, views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        reference = check(rank, world, Tower, steps=4)
        for caps, _ in CAPS:
            for more in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
                settings = caps | more | {"gradient_as_bucket_view": views}
                ours = train(DDP(seeded(Tower), **settings), lambda i: batch(i, rank), steps=4)
                ours.assert_equal(reference, bitwise=True, what=f"the defaults, with {settings}")

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_with_the_same_settings_torch_computes_the_same(pool: WorkerPool, views: bool) -> None:
    def run(rank: int, world: int) -> None:
        for caps, _ in CAPS:
            for batched in (False, True):
                settings = caps | {"gradient_as_bucket_view": views, "batched_grad_copy": batched}
                check(rank, world, Tower, ddp=settings, against=["torch"])

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_gradients_may_arrive_in_another_order_on_another_rank_or_in_another_step(
    pool: WorkerPool, views: bool
) -> None:
    class Reordered(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.shift = 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for index in range(LAYERS):
                x = torch.tanh(self.layers[(index + self.shift) % LAYERS](x))
            return x

    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, index: int) -> None:
            net = model.module
            net.shift = index + 2 * rank
            plain_step(model, x, index)

        for caps, _ in CAPS:
            settings = caps | {"gradient_as_bucket_view": views}
            check(rank, world, Reordered, step=step, ddp=settings, against=["torch"])

    pool.run(run, timeout=LIMIT)


@pytest.mark.parametrize("mib", [2, 8, 30])
def test_a_large_parameter_among_small_ones_is_reduced_as_by_torch(
    pool: WorkerPool, mib: int
) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, 32 * mib)
            self.large = nn.Linear(32 * mib, 8192)
            self.last = nn.Linear(8192, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.large(torch.tanh(self.first(x)))))

    def run(rank: int, world: int) -> None:
        check(rank, world, Large)
        check(rank, world, Large, ddp={"gradient_as_bucket_view": True}, against=["torch"])
        check(rank, world, Large, ddp={"bucket_cap_mb": 1}, against=["torch"])
        ours, theirs = [collectives_by_step(cls(Large()), rank, 3)[-1] for cls in (DDP, TorchDDP)]
        assert ours == theirs == ["allreduce"] * 2

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_parameters_without_elements_or_without_dimensions_have_their_place(
    pool: WorkerPool, views: bool
) -> None:
    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.nothing = nn.Parameter(torch.empty(3, 0))

        def forward(self, x: Tensor) -> Tensor:
            nothing = self.empty.sum() + self.nothing.sum()
            return super().forward(x) * self.scale + nothing

    def run(rank: int, world: int) -> None:
        for caps in ({}, {"bucket_cap_mb": 0}, {"bucket_cap_mb": 1000}):
            for more in ({}, {"find_unused_parameters": True}):
                settings = caps | more | {"gradient_as_bucket_view": views}
                check(rank, world, Odd, ddp=settings, against=["single"])

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_of_many_equal_layers_some_may_have_no_gradient_or_one_with_strides_of_its_own(
    pool: WorkerPool, views: bool
) -> None:
    class Skipping(Tower):
        skipped: tuple[int, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for index, layer in enumerate(self.layers):
                x = x if index in self.skipped else torch.tanh(layer(x))
            return x

    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, index: int) -> None:
            net = model.module
            net.skipped = () if index == 1 else (index, index + 1 + rank)
            net.layers[9].weight.grad = torch.full((WIDTH, WIDTH), 0.5 + rank).t()
            plain_step(model, x, index)

        settings = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
        check(rank, world, Skipping, step=step, ddp=settings, against=["torch"], steps=4)

    pool.run(run, timeout=LIMIT)


class Row(nn.Module):
    """Many parameters of one shape."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(make()) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        factors = [(1 + index) * p.square().sum() for index, p in enumerate(self.all)]
        return x * torch.stack(factors).sum() / 100


@both_kinds
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 1).t(),
        lambda: torch.randn(3, 4)[0:1, 0],
        lambda: torch.randn(10, 4)[::10],
        lambda: torch.randn(2, 3).t(),
    ],
    ids=["1x4", "1", "far", "transposed"],
)
def test_many_parameters_of_one_shape_may_have_any_strides(
    pool: WorkerPool, make: Callable[[], Tensor], views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        settings = {"gradient_as_bucket_view": views}
        check(rank, world, lambda: Row(make), ddp=settings, against=["single"], steps=3)

    pool.run(run, timeout=LIMIT)


def test_a_gradient_of_the_wrong_shape_among_many_is_named(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(Row(lambda: torch.randn(4)), gradient_as_bucket_view=True)
        plain_step(ddp, batch(0, rank), 0)

        def spoil(parameter: Tensor) -> None:
            parameter.grad.data = torch.full((8,), -1.0)

        ddp.module.all[3].register_post_accumulate_grad_hook(spoil)
        with pytest.raises(StateError, match=r"parameter all\.3 has shape \(8,\)"):
            plain_step(ddp, batch(1, rank), 1)

    pool.run(run, ranks=1, timeout=LIMIT)


def test_gradients_that_lie_in_the_bucket_by_another_name_stay_right(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, index: int) -> None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.detach().zero_()
            loss_of(model(x)).backward()

        settings = {"gradient_as_bucket_view": True}
        make = lambda: Row(lambda: torch.randn(4))  # noqa: E731
        check(rank, world, make, ddp=settings, against=["single"], step=step, steps=4)

    pool.run(run, timeout=LIMIT)


# ------------------------------------------------------------------ collectives


@both_kinds
def test_after_the_rebuild_a_step_is_one_all_reduce_for_each_bucket_and_nothing_else(
    pool: WorkerPool, views: bool
) -> None:
    def run(rank: int, world: int) -> None:
        for caps, buckets in CAPS:
            for static in (False, True):
                settings = caps | {"gradient_as_bucket_view": views, "static_graph": static}
                steps = collectives_by_step(DDP(seeded(Tower), **settings), rank, 4)
                assert set(steps[0]) == {"allreduce"}, settings
                assert steps[1].count("allreduce") == buckets, settings
                assert steps[2:] == [["allreduce"] * buckets] * 2, settings

    pool.run(run, timeout=LIMIT)


def test_the_first_backward_sends_small_parameters_in_one_bucket_if_no_list_of_caps_is_given(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> None:
        for caps, _ in CAPS:
            if caps != {"bucket_cap_mb": 0} and "bucket_cap_mb_list" not in caps:
                first, second = collectives_by_step(DDP(seeded(Tower), **caps), rank, 2)
                assert first == ["allreduce"], caps
                assert second[0] == "broadcast", caps  # of the order in which gradients came

    pool.run(run, timeout=LIMIT)


def test_a_search_for_unused_parameters_costs_no_collective_where_torch_needs_one(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> None:
        for caps, buckets in CAPS:
            settings = caps | {"find_unused_parameters": True}
            steps = collectives_by_step(DDP(seeded(Tower), **settings), rank, 3)
            assert steps == [["allreduce"] * len(steps[0])] * 3, settings
            # Buckets are not rebuilt then, and those filled in the order of parameters may be
            # one more than those filled in the order of gradients.
            assert len(steps[0]) - buckets in (0, 1), settings
            torchs = collectives_by_step(TorchDDP(seeded(Tower), **settings), rank, 3)
            assert [len(step) for step in torchs] == [len(steps[0]) + 1] * 3, settings

    pool.run(run, timeout=LIMIT)


def test_what_is_sent_is_hardly_more_than_the_gradients(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        size = sum(p.numel() * 4 for p in Tower().parameters() if p.requires_grad)
        for caps, buckets in CAPS:
            for find_unused in (False, True):
                model = DDP(seeded(Tower), **caps, find_unused_parameters=find_unused)
                with count_collectives() as counted:
                    for index in range(3):
                        counted.clear()
                        plain_step(model, batch(index, rank), index)
                assert set(counted.by_op) == {"allreduce"}
                assert find_unused or counted.total == buckets, caps
                assert size <= counted.bytes <= size + 4 * (64 + 2 * LAYERS)

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_alone_in_the_world_no_collective_is_issued(pool: WorkerPool, views: bool) -> None:
    def run(rank: int, world: int) -> None:
        for more in ({}, {"bucket_cap_mb": 0}, {"find_unused_parameters": True}):
            settings = {"gradient_as_bucket_view": views} | more
            model = DDP(seeded(Tower), **settings)
            assert collectives_by_step(model, rank, 4) == [[]] * 4, settings
            check(rank, world, Tower, ddp=settings, against=["single"])

    pool.run(run, ranks=1, timeout=LIMIT)


@both_kinds
def test_a_small_model_is_reduced_by_one_collective_a_step_in_a_long_run_as_well(
    pool: WorkerPool, views: bool
) -> None:
    """An all-reduce, or an exchange, is found by trying; the result may not depend on it."""

    def run(rank: int, world: int) -> None:
        for more in ({}, {"find_unused_parameters": True}):
            settings = {"gradient_as_bucket_view": views} | more
            check(rank, world, Net, ddp=settings, steps=40, against=["torch"])
            steps = collectives_by_step(DDP(seeded(Net), **settings), rank, 60)
            single = (["allreduce"], ["recv", "send"])
            extra = [index for index, ops in enumerate(steps) if ops not in single]
            assert len(extra) <= 2, steps  # one to rebuild, one to agree on the trial's result
            assert all(index < 40 for index in extra), steps

    pool.run(run, timeout=LIMIT)


def test_a_rank_that_fails_in_any_of_the_first_steps_leaves_the_others_with_an_error_not_a_hang(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> None:
        for failing in (0, 1):
            for at in (0, 1, 2, 10, 11, 12, 32, 33, 34, 35):
                model = DDP(seeded(Net))
                for index in range(38):
                    model.zero_grad()
                    loss = loss_of(model(batch(index, rank)))
                    if index != at:
                        loss.backward()
                        continue
                    if rank == failing:
                        hook = model.module.second.weight.register_hook(lambda _grad: 1 / 0)
                    with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
                        loss.backward()
                    assert isinstance(caught.value, ZeroDivisionError) == (rank == failing)
                    if rank == failing:
                        hook.remove()
                reference = seeded(Net)
                joined = torch.cat([batch(37, each) for each in range(world)])
                loss_of(reference(joined)).backward()
                for ours, plain in zip(model.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-4, atol=1e-5)

    pool.run(run, timeout=LIMIT, group_timeout=10)


@both_kinds
def test_buckets_are_sent_while_the_backward_still_runs(pool: WorkerPool, views: bool) -> None:
    def sent_before_the_first_layer(model: nn.Module, rank: int) -> list[int]:
        """For each step, the all-reduces under way when the backward gets to the first layer."""
        found = []
        with count_collectives() as counted:

            def note(_module: nn.Module, _args: Any, output: Tensor) -> None:
                output.register_hook(lambda _grad: found.append(counted.by_op["allreduce"]))

            handle = model.module.layers[0].register_forward_hook(note)
            for index in range(3):
                counted.clear()
                plain_step(model, batch(index, rank), index)
            handle.remove()
        return found

    def run(rank: int, world: int) -> None:
        def sent(**settings: Any) -> list[int]:
            model = DDP(seeded(Tower), gradient_as_bucket_view=views, **settings)
            return sent_before_the_first_layer(model, rank)

        others = 2 * (LAYERS - 1)
        assert sent(bucket_cap_mb=0) == [0, others, others]
        assert sent(bucket_cap_mb=0, static_graph=True) == [0, others, others]
        assert sent(bucket_cap_mb=0, find_unused_parameters=True) == [others] * 3
        assert sent(bucket_cap_mb=0.07) == [0, 2, 2]
        assert sent(bucket_cap_mb=1000) == [0, 0, 0]

    pool.run(run, timeout=LIMIT)


# ------------------------------------------------------------------ gradients as views


def test_with_views_the_gradients_of_one_bucket_share_memory_and_without_none_do(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> None:
        for caps, buckets in CAPS:
            for views, expected in ((True, buckets), (False, 2 * LAYERS)):
                for static in (False, True):
                    settings = caps | {"gradient_as_bucket_view": views, "static_graph": static}
                    model = DDP(seeded(Tower), **settings)
                    for index in range(3):
                        model.zero_grad()
                        plain_step(model, batch(index, rank), index)
                    assert len(storages(model)) == expected, settings

    pool.run(run, timeout=LIMIT)
    pool.run(run, timeout=LIMIT, ranks=1)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_views_stay_in_the_same_memory_through_zero_grad(
    pool: WorkerPool, set_to_none: bool
) -> None:
    def run(rank: int, world: int) -> None:
        for settings in ({}, {"bucket_cap_mb": 0.07}, {"find_unused_parameters": True}):
            model = DDP(seeded(Tower), gradient_as_bucket_view=True, **settings)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            places = []
            for index in range(5):
                zero_grad = model.zero_grad if index % 2 else optimizer.zero_grad
                zero_grad(set_to_none=set_to_none)
                grads = [p.grad for p in model.parameters() if p.requires_grad]
                if set_to_none:
                    assert grads == [None] * len(grads)
                elif index:
                    assert all(grad is not None and not grad.any() for grad in grads)
                plain_step(model, batch(index, rank), index)
                places.append(storages(model))
                optimizer.step()
            assert places[2] == places[3] == places[4], settings

    pool.run(run, timeout=LIMIT)


def nothing(_model: nn.Module) -> None:
    """Gradients of all steps add up."""


def set_to_zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def some_to_none(model: nn.Module) -> None:
    for parameter in list(model.parameters())[::2]:
        parameter.grad = None


def scaled_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def filled_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(0.25)


def replaced_by_new_tensors(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.125)


def some_replaced(model: nn.Module) -> None:
    for parameter in list(model.parameters())[1::2]:
        parameter.grad = torch.full_like(parameter, 0.125)


def replaced_by_clones(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def replaced_by_aliases(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.detach()


def replaced_by_other_strides(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.grad = torch.full_like(parameter.t(), 0.125).contiguous().t()


TREATMENTS = [
    nothing,
    set_to_zero,
    some_to_none,
    scaled_in_place,
    filled_in_place,
    replaced_by_new_tensors,
    some_replaced,
    replaced_by_clones,
    replaced_by_aliases,
    replaced_by_other_strides,
]


@both_kinds
@pytest.mark.parametrize("treat", TREATMENTS, ids=lambda f: f.__name__)
def test_a_program_may_do_with_gradients_between_steps_as_without_ddp(
    pool: WorkerPool, treat: Callable[[nn.Module], None], views: bool
) -> None:
    def adding_up(model: nn.Module, batch_of: Callable[[int], Tensor]) -> list[Tensor]:
        """Gradients after each step; only what ``treat`` does is done between."""
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        seen = []
        for index in range(5):
            plain_step(model, batch_of(index), index)
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            treat(model)
        return seen

    def run(rank: int, world: int) -> None:
        def own(index: int) -> Tensor:
            return batch(index, rank)

        def joined(index: int) -> Tensor:
            return torch.cat([batch(index, each) for each in range(world)])

        single = adding_up(seeded(Net), joined)
        kinds = ({}, {"bucket_cap_mb": 0}, {"find_unused_parameters": True}, {"static_graph": True})
        for more in kinds:
            settings = {"gradient_as_bucket_view": views} | more
            ours = adding_up(DDP(seeded(Net), **settings), own)
            torch.testing.assert_close(ours, single, rtol=1e-5, atol=1e-6)

    pool.run(run, timeout=LIMIT)
    pool.run(run, timeout=LIMIT, ranks=1)


@pytest.mark.parametrize(
    "treat", [nothing, set_to_zero, scaled_in_place, filled_in_place], ids=lambda f: f.__name__
)
def test_views_that_are_changed_in_place_or_added_to_give_torchs_result(
    pool: WorkerPool, treat: Callable[[nn.Module], None]
) -> None:
    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, index: int) -> None:
            for half in (x[::2], x[1::2]):
                treat(model)
                plain_step(model, half, index)

        for views in (False, True):
            settings = {"gradient_as_bucket_view": views}
            check(rank, world, Net, step=step, ddp=settings, set_to_none=False)

    pool.run(run, timeout=LIMIT)


def test_replaced_gradients_are_views_again_after_the_next_step(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        for treat in TREATMENTS:
            model = DDP(seeded(Net), gradient_as_bucket_view=True)
            for index in range(4):
                plain_step(model, batch(index, rank), index)
                if index < 3:
                    treat(model)
            assert len(storages(model)) == 1, treat.__name__

    pool.run(run, timeout=LIMIT)


def test_the_optimizer_may_replace_gradients_by_others_after_the_step(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, _index: int) -> None:
            loss_of(model(x)).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.sign()

        for views in (False, True):
            for set_to_none in (False, True):
                settings = {"gradient_as_bucket_view": views}
                check(rank, world, Net, step=step, ddp=settings, set_to_none=set_to_none)

    pool.run(run, timeout=LIMIT)
