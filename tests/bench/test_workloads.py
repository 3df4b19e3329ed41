"""Workloads by name and from files."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from gradsync import ArgumentError
from gradsync.bench import Benchmark, workloads

SOURCE = """
import torch
from gradsync.bench import Benchmark

class Tiny(Benchmark):
    def create_model(self):
        return torch.nn.Linear(8, 3)

# As torch's benchmark.py has it: the constructor is its own.
class Torchs(Benchmark):
    def __init__(self, device, distributed_backend, bucket_size):
        super().__init__(device, distributed_backend, bucket_size)
        self.batch_size = 16

class NotOurs:
    pass
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    return path


def test_a_class_of_a_file_is_loaded(file):
    tiny = workloads.load(f"{file}:Tiny", batch_size=4, bucket_size=50)
    assert isinstance(tiny.create_model(), torch.nn.Linear)
    assert (tiny.batch_size, tiny.bucket_size, type(tiny).__name__) == (4, 50, "Tiny")


def test_a_class_written_for_torchs_benchmark_is_loaded(file):
    found = workloads.load(f"{file}:Torchs", backend="gradsync", bucket_size=25)
    assert (found.batch_size, found.distributed_backend) == (16, "gradsync")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{file}:Missing", "there is no Missing in"),
        ("{file}:NotOurs", "NotOurs is no subclass of gradsync.bench.Benchmark"),
        ("{file}x:Tiny", "there is no file"),
        ("{file}:1", "'1' is not the name of a class"),
        ("{file}", "name the class too"),
        ("transfromer", "did you mean 'transformer'"),
        ("xyzzy", "Built in are mlp, transformer, convnet, dlrm"),
    ],
)
def test_what_cannot_be_loaded_is_named(file, spec, message):
    with pytest.raises(ArgumentError, match=message):
        workloads.load(spec.format(file=file))


def test_a_workload_without_its_methods_says_which():
    for name in ("create_model", "generate_inputs", "generate_target"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(Benchmark(), name)()


def test_the_default_models_are_torchs_where_torchvision_is(monkeypatch):
    monkeypatch.setattr(workloads, "has_torchvision", lambda: True)
    assert workloads.default_models() == (
        "resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d",
    )  # fmt: skip
    monkeypatch.setattr(workloads, "has_torchvision", lambda: False)
    assert workloads.default_models() == ("mlp", "transformer", "convnet", "dlrm")
    with pytest.raises(ArgumentError, match="pip install"):
        workloads.import_torchvision()


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="no torchvision")
def test_a_classifier_of_torchvision_is_loaded():
    found = workloads.load("resnet18", batch_size=2)
    output = found.create_model()(*found.generate_inputs())
    assert found.loss(output, found.generate_target()).ndim == 0
