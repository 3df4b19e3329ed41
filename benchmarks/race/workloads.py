"""The models that race, from a policy of 6 tensors to 22 M parameters.

All data is random but learnable in kind: gradients stay normal numbers for thousands of steps, so
no contender is slowed down by denormals or sped up by zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]

BATCHES = 4
LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    summary: str
    title: str  # in the README
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]

    def model(self, seed: int = 0) -> nn.Module:
        """The same weights on every rank and for every contender."""
        torch.manual_seed(seed)
        return self.build()

    def batches(self, rank: int) -> list[Batch]:
        """The same batches for every contender, other ones on every rank."""
        generator = torch.Generator().manual_seed(1000 + rank)
        return [self.batch(generator) for _ in range(BATCHES)]


def policy_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    )


def many_small_mlp(layers: int = 300, width: int = 32) -> nn.Module:
    net = nn.Sequential()
    for _ in range(layers):
        linear = nn.Linear(width, width)
        nn.init.orthogonal_(linear.weight)  # keeps the gradient's size through 300 layers
        net.extend([linear, nn.Tanh()])
    return net


def wide_mlp(width: int = 3072) -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


class ResidualBlock(nn.Module):
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


def small_resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        ResidualBlock(32, 32, 1),
        ResidualBlock(32, 64, 2),
        ResidualBlock(64, 128, 2),
        ResidualBlock(128, 208, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(208, 10),
    )


class SmallTransformer(nn.Module):
    """A pre-norm encoder over tokens with a word for every position as target."""

    VOCABULARY = 4096
    LENGTH = 64

    def __init__(self, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, width)
        self.positions = nn.Embedding(self.LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, nhead=4, dim_feedforward=4 * width, dropout=0.0,
                batch_first=True, norm_first=True,
            )
            for _ in range(layers)
        )  # fmt: skip
        self.head = nn.Linear(width, self.VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits.flatten(0, 1)  # (batch * length, vocabulary)


def _features(batch: int, *shape: int, classes: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        x = torch.randn(batch, *shape, generator=generator)
        return x, torch.randint(classes, (batch,), generator=generator)

    return make


def _tokens(batch: int, length: int, vocabulary: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        x = torch.randint(vocabulary, (batch, length), generator=generator)
        return x, torch.randint(vocabulary, (batch * length,), generator=generator)

    return make


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            name="policy",
            summary="RL-size policy MLP, batch 64",
            title="policy, 6 k parameters",
            build=policy_mlp,
            batch=_features(64, 24, classes=4),
        ),
        Workload(
            name="many-small",
            summary="300-layer MLP of 32x32, batch 32",
            title="300 layers of 32×32, 600 tensors",
            build=many_small_mlp,
            batch=_features(32, 32, classes=32),
        ),
        Workload(
            name="convnet",
            summary="small ResNet with BatchNorm, 32x32 images, batch 16",
            title="convnet with BatchNorm",
            build=small_resnet,
            batch=_features(16, 3, 32, 32, classes=10),
        ),
        Workload(
            name="wide",
            summary="wide MLP, batch 16",
            title="wide MLP, 22 M parameters",
            build=wide_mlp,
            batch=_features(16, 1024, classes=10),
        ),
        Workload(
            name="transformer",
            summary="6-layer transformer, 64 tokens, batch 8",
            title="transformer, 7 M parameters",
            build=SmallTransformer,
            batch=_tokens(8, SmallTransformer.LENGTH, SmallTransformer.VOCABULARY),
        ),
    )
}
