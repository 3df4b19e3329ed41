#!/usr/bin/env python3
"""Predict clicks with two trainers and two parameter servers, and check the result.

    python examples/click_through.py
    torchrun --standalone --nproc-per-node 4 examples/click_through.py

Embeddings of users and items are tables on the servers, the network on top is replicated under DDP
on the trainers. The same model is then trained in one process, on the same batches: its predictions
have to be the same up to rounding, and the area under the ROC curve at least --target-auc.

The data is made, not downloaded. Each user and each item has a hidden vector of 4 normal numbers,
an impression shows a user 1 to 3 items (popular ones more often) with 4 numbers of context, and is
clicked with the probability

    sigmoid(hidden(user) · mean hidden(items) · 1.5 + context · fixed weights - 0.3)

so that a model which knew the hidden vectors would reach an area of 0.88: clicks are random. One
with no memory for users and items sees only the context, and stays below 0.67.
"""

import argparse
import os
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import gradsync
from gradsync import hybrid

USERS, ITEMS, HIDDEN, CONTEXT, SHOWN = 400, 300, 4, 4, 3
WIDTH = 8
TRAINERS, SERVERS = 2, 2
TOLERANCE = 1e-3  # of a predicted probability


def main():
    options = parse_arguments()
    roles = hybrid.Roles(trainer=train, trainers=TRAINERS, servers=SERVERS)
    found = hybrid.run(roles, args=(options.steps, options.batch), on_report=show)
    if isinstance(found, list):
        found = found[0]
    elif os.environ["RANK"] != "0":
        return 0  # torchrun: one process is enough for the rest
    alone = train_alone(options.steps, options.batch)
    return judge(found, alone, options.target_auc)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256, help="impressions a trainer and step")
    parser.add_argument("--target-auc", type=float, default=0.84)
    return parser.parse_args()


# --------------------------------------------------------------------------------------
# Data


@dataclass
class Impressions:
    users: torch.Tensor  # [n, 1]
    items: torch.Tensor  # [n × shown], flat
    offsets: torch.Tensor  # [n], where the items of each begin
    context: torch.Tensor  # [n, CONTEXT]
    clicked: torch.Tensor  # [n]
    truth: torch.Tensor  # [n], the probabilities that nobody is told


def impressions(count, seed):
    """Made as the top of this file says; the same for the same seed."""
    world = torch.Generator().manual_seed(0)
    user_vectors = torch.randn(USERS, HIDDEN, generator=world)
    item_vectors = torch.randn(ITEMS, HIDDEN, generator=world)
    weights = torch.randn(CONTEXT, generator=world) * 0.5
    popularity = 1 / torch.arange(1.0, ITEMS + 1).sqrt()

    numbers = torch.Generator().manual_seed(seed + 1)
    users = torch.randint(0, USERS, (count, 1), generator=numbers)
    shown = torch.randint(1, SHOWN + 1, (count,), generator=numbers)
    offsets = shown.cumsum(0) - shown
    items = torch.multinomial(popularity, int(shown.sum()), replacement=True, generator=numbers)
    context = torch.randn(count, CONTEXT, generator=numbers)
    seen = F.embedding_bag(items, item_vectors, offsets, mode="mean")
    score = (user_vectors[users[:, 0]] * seen).sum(1) * 1.5 + context @ weights - 0.3
    truth = torch.sigmoid(score)
    clicked = torch.bernoulli(truth, generator=numbers)
    return Impressions(users, items, offsets, context, clicked, truth)


def area_under_curve(scores, clicked):
    """The probability that a clicked impression has a higher score than one that was not."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positive = clicked.sum().item()
    negative = len(clicked) - positive
    above = ranks[clicked > 0].sum().item() - positive * (positive + 1) / 2
    return above / (positive * negative)


# --------------------------------------------------------------------------------------
# The model, with any two tables


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(3 * WIDTH + CONTEXT, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, items, context):
        return self.layers(torch.cat([user, items, user * items, context], dim=1))[:, 0]


def predict(network, users, items, data):
    return network(users(data.users), items(data.items, data.offsets), data.context)


def tables():
    options = {"optimizer": hybrid.Adagrad(lr=0.3), "std": 0.3}
    users = hybrid.RemoteEmbeddingBag(USERS, WIDTH, name="users", mode="mean", seed=1, **options)
    items = hybrid.RemoteEmbeddingBag(ITEMS, WIDTH, name="items", mode="mean", seed=2, **options)
    return users, items


def train(cluster, steps, batch):
    """A trainer: returns the probabilities that it predicts for the test data."""
    users, items = tables()
    network = gradsync.DistributedDataParallel(Network())
    optimizer = torch.optim.Adagrad(network.parameters(), lr=0.05)
    data = impressions(batch, seed=cluster.rank)
    ahead = users.prefetch(data.users), items.prefetch(data.items)
    for step in range(steps):
        now, rows = data, ahead
        logits = network(users(rows[0]), items(rows[1], now.offsets), now.context)
        if step + 1 < steps:  # while this step runs, the servers look for the next rows
            data = impressions(batch, seed=(step + 1) * cluster.trainers + cluster.rank)
            ahead = users.prefetch(data.users, ahead=1), items.prefetch(data.items, ahead=1)
        loss = F.binary_cross_entropy_with_logits(logits, now.clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        users.step()
        items.step()
        if (step + 1) % 50 == 0:
            cluster.report(step=step + 1, steps=steps, loss=loss.item())
    with torch.no_grad():
        return torch.sigmoid(predict(network.module, users, items, test_data()))


def train_alone(steps, batch):
    """The same model in one process, on the batches of all trainers together."""
    users, items = copies_of_the_initial_tables()
    network = Network()
    optimizers = [
        torch.optim.Adagrad(network.parameters(), lr=0.05),
        torch.optim.Adagrad([users.weight, items.weight], lr=0.3),
    ]
    for step in range(steps):
        for rank in range(TRAINERS):
            data = impressions(batch, seed=step * TRAINERS + rank)
            logits = predict(network, users, items, data)
            (F.binary_cross_entropy_with_logits(logits, data.clicked) / TRAINERS).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return torch.sigmoid(predict(network, users, items, test_data()))


def copies_of_the_initial_tables():
    with hybrid.local(), torch.no_grad():
        return [
            nn.EmbeddingBag.from_pretrained(
                table(torch.arange(table.spec.rows)[:, None]), freeze=False, mode="mean"
            )
            for table in tables()
        ]


def test_data():
    return impressions(20_000, seed=10_000_000)


# --------------------------------------------------------------------------------------
# What is said


def show(name, report):
    if name == "trainer0":
        print(f"step {report['step']:4}/{report['steps']}  loss {report['loss']:.4f}", flush=True)


def judge(found, alone, target):
    data = test_data()
    area, area_alone = area_under_curve(found, data.clicked), area_under_curve(alone, data.clicked)
    difference = (found - alone).abs().max().item()
    print(f"area under the curve   {area:.4f}  ({TRAINERS} trainers, {SERVERS} servers)")
    print(f"in one process         {area_alone:.4f}")
    print(f"with hidden vectors    {area_under_curve(data.truth, data.clicked):.4f}")
    print(f"largest difference of a probability from that of one process: {difference:.1e}")
    if area < target:
        print(f"FAILED: an area of {area:.4f} is below the target of {target:.4f}")
        return 1
    if difference > TOLERANCE:
        print(f"FAILED: predictions differ by {difference:.1e}, more than {TOLERANCE:.0e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
