"""What is trained: ``Benchmark``, the built-in workloads, torchvision's models, and your own.

The built-in ones have random but learnable data: gradients stay normal numbers for thousands of
steps, so nothing is slowed down by denormals or sped up by zeros.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradsync import ArgumentError

# What torch's benchmark.py measures when it is not told what.
TORCHVISION_DEFAULTS: Final = ("resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d")
_IMAGE_SIZES: Final = {"inception_v3": 299}  # of the others: 224


class Benchmark:
    """A workload. Subclass it in any file and run ``gradsync bench --benchmark FILE:Class``.

    The constructor takes what that of torch's benchmark.py takes, so that its subclasses run as
    they are. ``generate_inputs`` gives what the model is called with, as a list. The seed is set
    before each method is called: for the model to the same on all ranks, for the data to another.

    >>> class Tiny(Benchmark):
    ...     batch_size = 4
    ...     def create_model(self):
    ...         return nn.Linear(8, 3)
    ...     def generate_inputs(self):
    ...         return [torch.rand(self.batch_size, 8)]
    ...     def generate_target(self):
    ...         return torch.randint(3, (self.batch_size,))
    >>> tiny = Tiny()
    >>> output = tiny.create_model()(*tiny.generate_inputs())
    >>> tiny.loss(output, tiny.generate_target()).ndim
    0
    """

    batch_size: int = 32  # of one rank; ``--batch-size`` sets it

    def __init__(
        self,
        device: torch.device | str = "cpu",
        distributed_backend: str = "gloo",
        bucket_size: float | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.distributed_backend = distributed_backend
        self.bucket_size = bucket_size

    def create_model(self) -> nn.Module:
        """The model, on ``self.device``."""
        raise NotImplementedError(f"{type(self).__name__} needs a method create_model")

    def generate_inputs(self) -> Sequence[Any]:
        """The arguments of one call of the model, for ``self.batch_size`` examples."""
        raise NotImplementedError(f"{type(self).__name__} needs a method generate_inputs")

    def generate_target(self) -> Any:
        """What the loss compares the output with."""
        raise NotImplementedError(f"{type(self).__name__} needs a method generate_target")

    def loss(self, output: Any, target: Any) -> Tensor:
        """Cross entropy, unless a subclass knows better."""
        return F.cross_entropy(output, target)

    def create_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The SGD of torch's benchmark.py, unless a subclass knows better."""
        return torch.optim.SGD(model.parameters(), 0.001, momentum=0.9, weight_decay=1e-4)


# ------------------------------------------------------------------------- built in


class MLP(Benchmark):
    """A wide MLP: 6 M parameters in 8 tensors, much communication for the computing."""

    WIDTH = 1536

    def create_model(self) -> nn.Module:
        """Three hidden layers."""
        width = self.WIDTH
        return nn.Sequential(
            nn.Linear(1024, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 10),
        ).to(self.device)  # fmt: skip

    def generate_inputs(self) -> Sequence[Any]:
        """Features."""
        return [torch.randn(self.batch_size, 1024, device=self.device)]

    def generate_target(self) -> Any:
        """Classes."""
        return torch.randint(10, (self.batch_size,), device=self.device)


class Transformer(Benchmark):
    """A pre-norm encoder of 6 layers over 64 tokens: 7 M parameters in 75 tensors."""

    batch_size = 8
    VOCABULARY = 4096
    LENGTH = 64
    WIDTH = 256
    LAYERS = 6

    def create_model(self) -> nn.Module:
        """With a word for every position as its output."""
        return _Encoder(self.VOCABULARY, self.LENGTH, self.WIDTH, self.LAYERS).to(self.device)

    def generate_inputs(self) -> Sequence[Any]:
        """Tokens."""
        shape = (self.batch_size, self.LENGTH)
        return [torch.randint(self.VOCABULARY, shape, device=self.device)]

    def generate_target(self) -> Any:
        """A word for each of them."""
        return torch.randint(self.VOCABULARY, (self.batch_size * self.LENGTH,), device=self.device)


class ConvNet(Benchmark):
    """A small ResNet with BatchNorm on 32 × 32 images: 1 M parameters, 36 buffers."""

    batch_size = 16

    def create_model(self) -> nn.Module:
        """Four residual blocks."""
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            _ResidualBlock(32, 32, 1),
            _ResidualBlock(32, 64, 2),
            _ResidualBlock(64, 128, 2),
            _ResidualBlock(128, 208, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(208, 10),
        ).to(self.device)

    def generate_inputs(self) -> Sequence[Any]:
        """Images."""
        return [torch.randn(self.batch_size, 3, 32, 32, device=self.device)]

    def generate_target(self) -> Any:
        """Classes."""
        return torch.randint(10, (self.batch_size,), device=self.device)


class DLRM(Benchmark):
    """A recommendation model like DLRM: 8 embedding tables with sparse gradients, small MLPs."""

    batch_size = 128
    TABLES = 8
    ROWS = 20_000
    WIDTH = 32
    DENSE = 13

    def create_model(self) -> nn.Module:
        """Dense features and table rows meet in their products."""
        return _Recommender(self.TABLES, self.ROWS, self.WIDTH, self.DENSE).to(self.device)

    def generate_inputs(self) -> Sequence[Any]:
        """Dense features, and one row of each table for each example."""
        dense = torch.randn(self.batch_size, self.DENSE, device=self.device)
        rows = torch.randint(self.ROWS, (self.TABLES, self.batch_size), device=self.device)
        return [dense, rows]

    def generate_target(self) -> Any:
        """Clicked or not."""
        return torch.randint(2, (self.batch_size,), device=self.device)

    def create_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Plain SGD: weight decay would make sparse gradients dense."""
        return torch.optim.SGD(model.parameters(), 0.001)


class _Encoder(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, nhead=4, dim_feedforward=4 * width, dropout=0.0,
                batch_first=True, norm_first=True,
            )
            for _ in range(layers)
        )  # fmt: skip
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits.flatten(0, 1)  # (batch * length, vocabulary)


class _ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class _Recommender(nn.Module):
    def __init__(self, tables: int, rows: int, width: int, dense: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width, sparse=True) for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(dense, 128), nn.ReLU(), nn.Linear(128, width), nn.ReLU()
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 128), nn.ReLU(), nn.Linear(128, 2))
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = [x, *(table(row) for table, row in zip(self.tables, rows, strict=True))]
        features = torch.stack(vectors, 1)  # (batch, tables + 1, width)
        products = features @ features.transpose(1, 2)
        logits: Tensor = self.top(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], 1))
        return logits


BUILT_IN: Final[dict[str, type[Benchmark]]] = {
    "mlp": MLP,
    "transformer": Transformer,
    "convnet": ConvNet,
    "dlrm": DLRM,
}


# ------------------------------------------------------------------------- torchvision


class TorchvisionBenchmark(Benchmark):
    """A classifier of torchvision, as in torch's benchmark.py: 224 × 224 images, one class."""

    def __init__(self, *arguments: Any, model: str) -> None:
        super().__init__(*arguments)
        self.model = model

    def create_model(self) -> nn.Module:
        """With random weights."""
        model: nn.Module = import_torchvision().models.get_model(self.model, weights=None)
        return model.to(self.device)

    def generate_inputs(self) -> Sequence[Any]:
        """Images."""
        size = _IMAGE_SIZES.get(self.model, 224)
        return [torch.rand(self.batch_size, 3, size, size, device=self.device)]

    def generate_target(self) -> Any:
        """The same class for each."""
        return torch.ones(self.batch_size, dtype=torch.long, device=self.device)

    def loss(self, output: Any, target: Any) -> Tensor:
        """Cross entropy; of the main output where there are auxiliary ones."""
        return F.cross_entropy(output[0] if isinstance(output, tuple) else output, target)


def has_torchvision() -> bool:
    """Is it installed? It is not imported."""
    return importlib.util.find_spec("torchvision") is not None


def import_torchvision() -> ModuleType:
    """torchvision, also where its operators were built for another torch.

    It then cannot be imported before two operators, which no classifier uses, are declared.
    """
    if not has_torchvision():
        raise ArgumentError("torchvision is not installed: pip install 'gradsync[vision]'")
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for operator in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{operator}",
            "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        )
    return importlib.import_module("torchvision")


# ------------------------------------------------------------------------- by name


def default_models() -> tuple[str, ...]:
    """What is measured when no model is named."""
    return TORCHVISION_DEFAULTS if has_torchvision() else tuple(BUILT_IN)


def model_name(spec: str) -> str:
    """What results call the workload: its name, or the class of ``FILE:Class``.

    >>> model_name("mlp"), model_name("my/work.py:Tiny")
    ('mlp', 'Tiny')
    """
    return spec.rpartition(":")[2]


def check(spec: str) -> None:
    """Raise ``ArgumentError`` if there is no such workload. Files are looked for, not run.

    >>> try:
    ...     check("transfromer")
    ... except ArgumentError as error:
    ...     print(error)  # doctest: +ELLIPSIS
    there is no model 'transfromer'; did you mean 'transformer'? ...
    """
    path, colon, name = spec.rpartition(":")
    if colon:
        if not Path(path).is_file():
            raise ArgumentError(f"--benchmark {spec}: there is no file {path}")
        if not name.isidentifier():
            raise ArgumentError(f"--benchmark {spec}: {name!r} is not the name of a class")
        return
    if spec in BUILT_IN:
        return
    if spec.endswith(".py"):
        raise ArgumentError(f"--benchmark {spec}: name the class too, as {spec}:Class")
    vision = _vision_models() if has_torchvision() else []
    if spec in vision:
        return
    close = difflib.get_close_matches(spec, [*BUILT_IN, *vision], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    known = f" Built in are {', '.join(BUILT_IN)}"
    more = ", and torchvision's classifiers" if has_torchvision() else ""
    need = "" if has_torchvision() else "; torchvision's need pip install 'gradsync[vision]'"
    raise ArgumentError(f"there is no model {spec!r}{hint}{known}{more}{need}")


def load(
    spec: str,
    *,
    device: torch.device | str = "cpu",
    backend: str = "gloo",
    bucket_size: float | None = None,
    batch_size: int | None = None,
) -> Benchmark:
    """The workload of that name, or ``FILE:Class``.

    >>> load("mlp", batch_size=4).generate_inputs()[0].shape
    torch.Size([4, 1024])
    """
    check(spec)
    arguments = (device, backend, bucket_size)
    if ":" in spec:
        benchmark = _load_class(spec)(*arguments)
    elif spec in BUILT_IN:
        benchmark = BUILT_IN[spec](*arguments)
    else:
        benchmark = TorchvisionBenchmark(*arguments, model=spec)
    if batch_size is not None:
        benchmark.batch_size = batch_size
    return benchmark


def _vision_models() -> list[str]:
    models = import_torchvision().models
    names: list[str] = models.list_models(module=models)
    return names


def _load_class(spec: str) -> type[Benchmark]:
    path, _, name = spec.rpartition(":")
    file = Path(path).resolve()
    module_spec = importlib.util.spec_from_file_location(f"gradsync_bench_{file.stem}", file)
    if module_spec is None or module_spec.loader is None:
        raise ArgumentError(f"--benchmark {spec}: {path} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    module_spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if found is None:
        raise ArgumentError(f"--benchmark {spec}: there is no {name} in {path}")
    if not (isinstance(found, type) and issubclass(found, Benchmark)):
        raise ArgumentError(
            f"--benchmark {spec}: {name} is no subclass of gradsync.bench.Benchmark"
        )
    return found
