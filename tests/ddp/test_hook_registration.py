"""Registering a communication hook: what can be one, when it may come, and what keeps it."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from hook_parts import LIMIT, OPTIONS, done, power_sgd
from oracles import Net, loss_of, seeded
from oracles import batch as net_batch
from replicas import CLASSES, OurDDP, caught, quiet
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)

from gradsync import ArgumentError, GradsyncError, StateError
from gradsync.testing import WorkerPool


class Module(nn.Linear):
    """Small."""

    def __init__(self) -> None:
        super().__init__(3, 2)


class TestRegistration:
    def test_what_cannot_be_a_hook_is_refused_in_torchs_words(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            def wrong_bucket(state, bucket: int):
                return done(bucket)

            def wrong_return(state, bucket: dist.GradBucket) -> int:
                return 1

            def almost(state, bucket: dist.GradBucket) -> torch.futures.Future[int]:
                return done(1)

            annotate(wrong_bucket, bucket=int)
            annotate(wrong_return, bucket=dist.GradBucket, **{"return": int})
            annotate(almost, bucket=dist.GradBucket, **{"return": torch.futures.Future[int]})
            for hook in (1, "allreduce", None, wrong_bucket, wrong_return, almost):
                theirs, ours = (
                    caught(lambda: cls(Module()).register_comm_hook(None, hook))  # noqa: B023
                    for cls in CLASSES
                )
                kind = TypeError if not callable(hook) else ValueError
                assert isinstance(theirs, kind)
                assert isinstance(ours, kind)
                assert isinstance(ours, GradsyncError)
                assert str(theirs).rstrip(".") in str(ours)

            def one_argument(bucket):
                return done(bucket.buffer())

            error = caught(lambda: OurDDP(Module()).register_comm_hook(None, one_argument))
            assert isinstance(error, ArgumentError)
            assert "one_argument takes 1 arguments" in str(error)

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_annotations_may_be_text_and_hooks_may_be_objects_methods_and_partials(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            class Hook:
                def __call__(self, state, bucket):
                    return done(bucket.buffer() * state)

                def method(self, state, bucket):
                    return self(state, bucket)

            def text(state: int, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
                return done(bucket.buffer() * state)

            def more(state, bucket, factor):
                return done(bucket.buffer() * state * factor)

            def anything(*arguments):
                return done(arguments[1].buffer() * arguments[0])

            assert text.__annotations__["bucket"] == "dist.GradBucket"
            for hook in (Hook(), Hook().method, text, partial(more, factor=1), anything):
                ddp = OurDDP(Module())
                ddp.register_comm_hook(3, hook)
                ddp(torch.ones(1, 3)).sum().backward()
                assert ddp.module.bias.grad.tolist() == [3, 3]
                assert isinstance(ddp._get_ddp_logging_data()["comm_hook"], str)

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_a_second_hook_is_refused_and_the_first_one_stays(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for cls in CLASSES:
                ddp = cls(Module())
                ddp.register_comm_hook(None, default_hooks.allreduce_hook)
                for again in (
                    lambda d: d.register_comm_hook(None, debugging_hooks.noop_hook),
                    lambda d: d._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
                ):
                    error = caught(lambda: again(ddp), RuntimeError)  # noqa: B023
                    assert "can only be called once" in str(error)
                    assert "register_builtin_comm_hook" in str(error)
                ddp(torch.full((1, 3), float(rank))).sum().backward()
                assert ddp.module.weight.grad.tolist() == [[0.5] * 3] * 2

        pool.run(run, timeout=LIMIT)

    def test_a_hook_can_come_after_training_and_not_during_a_backward(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            for options in OPTIONS.values():
                with quiet():
                    ddp = OurDDP(seeded(Net), **options)
                for step in range(2):
                    ddp.zero_grad()
                    loss_of(ddp(net_batch(step, rank))).backward()
                errors = []

                def late(_: Tensor, ddp=ddp, errors=errors) -> None:
                    if not errors:
                        register = partial(ddp.register_comm_hook, None, debugging_hooks.noop_hook)
                        errors.append(caught(register, StateError))

                handle = ddp.module.second.weight.register_hook(late)
                loss_of(ddp(net_batch(2, rank))).backward()
                handle.remove()
                assert "should be called before calling backward" in str(errors[0])
                ddp.register_comm_hook(None, lambda _, bucket: done(bucket.buffer() * 0 + rank))
                for step in range(3):  # with gradients that are there, and without
                    loss_of(ddp(net_batch(step, rank))).backward()
                    for parameter in ddp.parameters():
                        assert (parameter.grad == rank).all()
                    if step == 1:
                        ddp.zero_grad()

        pool.run(run, timeout=LIMIT)

    def test_a_sum_and_a_hook_exclude_each_other(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(Module(), reduce="sum")
            register = partial(ddp.register_comm_hook, None, default_hooks.allreduce_hook)
            assert "exclude each other" in str(caught(register, StateError))

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_logging_data_names_the_hook_as_torch_does(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            kinds = dist.BuiltinCommHookType
            for register in (
                lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
                lambda ddp: ddp.register_comm_hook(*power_sgd(powerSGD_hook.powerSGD_hook)),
                lambda ddp: ddp._register_builtin_comm_hook(kinds.FP16_COMPRESS),
                lambda ddp: ddp._register_builtin_comm_hook(kinds.ALLREDUCE),
            ):
                named = []
                for cls in CLASSES:
                    ddp = cls(Module())
                    assert not ddp._get_ddp_logging_data().get("comm_hook")
                    register(ddp)
                    named.append(ddp._get_ddp_logging_data()["comm_hook"])
                assert named[0] == named[1]

        pool.run(run, ranks=1, timeout=LIMIT)

    def test_a_pickled_or_copied_model_has_its_hook_again(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            for state in (None, dist.group.WORLD):
                ddp = OurDDP(nn.Linear(3, 2))
                ddp.register_comm_hook(state, default_hooks.allreduce_hook)
                builtin = OurDDP(nn.Linear(3, 2))
                builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
                for each in map(roundtrip, (ddp, builtin)):
                    assert each._get_ddp_logging_data()["comm_hook"]
                    each(torch.full((1, 3), float(rank))).sum().backward()
                    assert each.module.weight.grad.tolist() == [[0.5] * 3] * 2
                copied = copy.deepcopy(ddp)
                copied(torch.full((1, 3), float(rank))).sum().backward()
                assert copied.module.weight.grad.tolist() == [[0.5] * 3] * 2
            powered = OurDDP(nn.Linear(3, 2))
            powered.register_comm_hook(*power_sgd(powerSGD_hook.powerSGD_hook))
            powered(torch.ones(1, 3)).sum().backward()
            with quiet():
                ((_, state),) = roundtrip(powered)._comm_hooks
            assert state.iter == 1

        pool.run(run, timeout=LIMIT)

    def test_a_hook_and_its_state_go_with_the_model(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            class State:
                pass

            def hook(state, bucket):
                return done(bucket.buffer())

            state = State()
            ddp = OurDDP(Module())
            ddp.register_comm_hook(state, hook)
            ddp(torch.ones(1, 3)).sum().backward()
            left = weakref.ref(state)
            del state, ddp
            gc.collect()
            assert left() is None

        pool.run(run, ranks=1, timeout=LIMIT)


def annotate(function: Any, **annotations: Any) -> None:
    """As types: in this file they would be text, which torch takes for wrong."""
    function.__annotations__ = annotations


def roundtrip(ddp: nn.Module) -> Any:
    memory = io.BytesIO()
    torch.save(ddp, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)
