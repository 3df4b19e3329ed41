"""What torch builds on process groups runs on ours unchanged, and learns what it does on gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import LIMIT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gradsync import SharedMemoryGroup
from gradsync.testing import WorkerPool

Weights = list[Tensor]
pytestmark = pytest.mark.timeout(LIMIT + 30)


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8)]
    return nn.Sequential(*layers)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(6, 16, generator=generator)).square().mean().backward()
        optimizer.step()


def torchs_ddp(rank: int, mesh: DeviceMesh) -> Weights:
    model = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.01)
    train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), rank)
    return [parameter.detach() for parameter in model.parameters()]


def ddp_with_a_hook(rank: int, mesh: DeviceMesh) -> Weights:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = nn.parallel.DistributedDataParallel(network())
    model.register_comm_hook(None, fp16_compress_hook)
    train(model, torch.optim.SGD(model.parameters(), 0.1), rank)
    return [parameter.detach() for parameter in model.parameters()]


def ddp_with_power_sgd(rank: int, mesh: DeviceMesh) -> Weights:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )

    model = nn.parallel.DistributedDataParallel(network())  # with more buckets gloo hangs
    state = PowerSGDState(None, 2, start_powerSGD_iter=2, random_seed=1)
    model.register_comm_hook(state, powerSGD_hook)
    train(model, torch.optim.SGD(model.parameters(), 0.1), rank)
    return [parameter.detach() for parameter in model.parameters()]


def ddp_with_uneven_inputs(rank: int, mesh: DeviceMesh) -> Weights:
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for _ in range(rank + 1):
            train(model, optimizer, rank)
    return [parameter.detach() for parameter in model.parameters()]


def ddp_compiled(rank: int, mesh: DeviceMesh) -> Weights:
    model = nn.parallel.DistributedDataParallel(network(), static_graph=True)
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, torch.optim.SGD(model.parameters(), 0.1), rank)
    return [parameter.detach() for parameter in model.parameters()]


def fully_sharded(rank: int, mesh: DeviceMesh) -> Weights:
    from torch.distributed.fsdp import fully_shard

    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.Adam(model.parameters(), 0.01), rank)
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def zero_optimizer(rank: int, mesh: DeviceMesh) -> Weights:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer, rank)
    return [parameter.detach() for parameter in model.parameters()]


def distributed_tensors(rank: int, mesh: DeviceMesh) -> Weights:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(5)
    a, b = torch.randn(12, 8), torch.randn(8, 10)
    left = distribute_tensor(a, mesh, [Shard(0)])
    right = distribute_tensor(b, mesh, [Shard(1)])
    results = [
        (left @ right.redistribute(mesh, [Replicate()])).full_tensor(),
        (left.redistribute(mesh, [Shard(1)]) @ right.redistribute(mesh, [Shard(0)])).full_tensor(),
        left.redistribute(mesh, [Shard(1)]).to_local(),
        left.sum(0).redistribute(mesh, [Shard(0)]).full_tensor(),
        left.softmax(0).full_tensor(),
    ]
    torch.testing.assert_close(results[0], a @ b)
    torch.testing.assert_close(results[1], a @ b)
    torch.testing.assert_close(results[3], a.sum(0))
    torch.testing.assert_close(results[4], a.softmax(0))
    return results


def tensor_parallel(rank: int, mesh: DeviceMesh) -> Weights:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    model = parallelize_module(plain, mesh, plan)
    train(model, torch.optim.SGD(model.parameters(), 0.1), 0)  # the same data on all ranks
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "learn",
    [
        torchs_ddp,
        ddp_with_a_hook,
        ddp_with_power_sgd,
        ddp_with_uneven_inputs,
        ddp_compiled,
        fully_sharded,
        zero_optimizer,
        distributed_tensors,
        tensor_parallel,
    ],
    ids=lambda learn: learn.__name__,
)
def test_learns_on_our_group_what_it_learns_on_gloo(
    pool: WorkerPool, learn: Callable[[int, DeviceMesh], Weights]
) -> None:
    def body(rank: int, world: int) -> Weights:
        return [tensor.clone() for tensor in learn(rank, init_device_mesh("cpu", (world,)))]

    theirs, ours = (
        pool.run(body, ranks=2, backend=backend, timeout=LIMIT) for backend in ("gloo", "gradsync")
    )
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b)  # gloo may add up in another order
    if learn is not distributed_tensors:  # some of its results are one rank's part
        for a, b in zip(*ours, strict=True):
            assert torch.equal(a, b)


def test_meshes_of_two_dimensions_have_groups_of_ours(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        for name, size in (("replicas", 2), ("shards", 2)):
            group = mesh.get_group(name)
            assert isinstance(group, SharedMemoryGroup)
            tensor = torch.full((3,), float(rank))
            dist.all_reduce(tensor, group=group)
            members = dist.get_process_group_ranks(group)
            assert len(members) == size
            assert torch.equal(tensor, torch.full((3,), float(sum(members))))
        flat = mesh["replicas", "shards"]._flatten("all").get_group()
        assert flat.size() == world
        model = fully_shard(network(), mesh=mesh)  # sharded inside replicas
        train(model, torch.optim.SGD(model.parameters(), 0.1), rank)
        whole = model[0].weight.full_tensor()
        gathered = [torch.empty_like(whole) for _ in range(world)]
        dist.all_gather(gathered, whole)
        assert all(torch.equal(whole, other) for other in gathered)

    pool.run(body, ranks=4, backend="gradsync", timeout=LIMIT)
