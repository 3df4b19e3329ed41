"""The module seen through its wrapper: plain names in the state, attributes, methods."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from replicas import caught
from torch import Tensor, nn

from gradsync import DistributedDataParallel as DDP
from gradsync.testing import WorkerPool

pytestmark = pytest.mark.timeout(60)

LIMIT = {"timeout": 40.0, "group_timeout": 15.0}


# ------------------------------------------------------------------ plain_state_dict


class Versioned(nn.Linear):
    """Loads by the version that is in the metadata."""

    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
        self.loaded_version = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *more)


def test_names_are_the_modules_and_both_kinds_load(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        module = nn.Sequential(Versioned(3, 3), nn.BatchNorm1d(3))
        plain = DDP(module, plain_state_dict=True)
        usual = DDP(copy.deepcopy(module))
        names = list(module.state_dict())
        assert list(plain.state_dict()) == names
        assert list(usual.state_dict()) == [f"module.{name}" for name in names]
        assert plain.state_dict()["0.weight"].data_ptr() == module[0].weight.data_ptr()
        assert plain.state_dict(keep_vars=True)["0.weight"] is module[0].weight
        assert list(plain.state_dict(prefix="x.")) == [f"x.{name}" for name in names]
        with torch.no_grad():
            for param in usual.parameters():
                param.add_(1)
        for state in (usual.state_dict(), usual.module.state_dict()):
            given = list(state)
            with torch.no_grad():
                for param in module.parameters():
                    param.zero_()
            module[0].loaded_version = None
            plain.load_state_dict(state)
            assert torch.equal(module[0].weight, usual.module[0].weight)
            assert module[0].loaded_version == 3
            assert list(state) == given, "the caller's state was changed"
        assert "Missing key" in str(caught(lambda: plain.load_state_dict({}), RuntimeError))
        wrong = {**plain.state_dict(), "more": torch.ones(1)}
        assert "more" in str(caught(lambda: plain.load_state_dict(wrong), RuntimeError))
        assert plain.load_state_dict(wrong, strict=False).unexpected_keys == ["more"]

    pool.run(run, ranks=1, **LIMIT)


def test_names_of_a_module_that_has_a_module(pool: WorkerPool) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    def run(rank: int, world: int) -> None:
        plain = DDP(Holder(), plain_state_dict=True)
        state = {name: torch.ones_like(value) for name, value in plain.state_dict().items()}
        assert sorted(state) == ["module.bias", "module.weight"]
        plain.load_state_dict(state)
        assert plain.module.module.weight.eq(1).all()
        plain.load_state_dict({f"module.{n}": torch.zeros_like(v) for n, v in state.items()})
        assert plain.module.module.weight.eq(0).all()

    pool.run(run, ranks=1, **LIMIT)


def test_as_a_part_of_a_larger_module_it_is_saved_and_loaded(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        outer = nn.ModuleDict({"part": DDP(nn.Linear(2, 2), plain_state_dict=True)})
        state = {name: torch.ones_like(value) for name, value in outer.state_dict().items()}
        assert len(state) == 2
        outer.load_state_dict(state)
        assert outer["part"].module.weight.eq(1).all()

    pool.run(run, ranks=1, **LIMIT)


# ------------------------------------------------------------------ passthrough


class Talks(nn.Module):
    kind = "talker"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.words = 3

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def say(self, more: int = 0) -> int:
        return self.words + more

    @property
    def loud(self) -> str:
        return self.kind.upper()


def test_attributes_and_methods_of_the_module_are_read_through_the_wrapper(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(Talks(), passthrough=True)
        module = ddp.module
        assert (ddp.words, ddp.kind, ddp.loud, ddp.say(more=2)) == (3, "talker", "TALKER", 5)
        assert ddp.layer is module.layer
        assert ddp.module is module
        assert callable(ddp.stats), "the wrapper's own names come first"

        error = caught(lambda: ddp.missing, AttributeError)
        assert "missing" in str(error)
        assert "Talks" in str(error)
        assert not hasattr(ddp, "missing")
        assert getattr(ddp, "missing", 7) == 7

        ddp.words = 9  # stays with the wrapper
        assert (ddp.words, module.words, ddp.say()) == (9, 3, 3)
        del ddp.words
        assert ddp.words == 3

        nested = DDP(DDP(Talks(), passthrough=True), passthrough=True)
        assert nested.say() == 3
        ddp(torch.ones(1, 2)).sum().backward()
        assert ddp.layer.weight.grad is not None

    pool.run(run, ranks=1, **LIMIT)


def test_without_it_nothing_passes(pool: WorkerPool) -> None:
    def run(rank: int, world: int) -> None:
        ddp = DDP(Talks())
        for name in ("words", "say", "layer", "loud"):
            error = caught(lambda name=name: getattr(ddp, name), AttributeError)
            assert "DistributedDataParallel" in str(error)
            assert name in str(error)

    pool.run(run, ranks=1, **LIMIT)
