"""SyncBatchNorm from other layers: converted, loaded, copied, saved."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from batch_norms import FEATURES, LIMIT, data, equal_on_all_ranks, pair
from gradsync import SyncBatchNorm
from gradsync.testing import WorkerPool


class Shared(nn.Module):
    """One layer in two places, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.BatchNorm1d(4)
        self.same = self.one
        self.more = nn.ModuleList([nn.BatchNorm3d(2, affine=False), self.one])
        self.nothing = None
        self.instance = nn.InstanceNorm1d(4)


class TestConversion:
    def test_every_layer_is_converted_with_all_that_it_has(self) -> None:
        model = nn.ModuleList(
            [
                nn.BatchNorm1d(4, eps=0.1, momentum=None).eval(),
                nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.Linear(4, 4)),
                nn.BatchNorm3d(4, track_running_stats=False),
                nn.SyncBatchNorm(4, dtype=torch.float64),
                SyncBatchNorm(4, momentum=0.3),
            ]
        )
        model[0].weight.requires_grad_(False)
        before = dict(model.state_dict(keep_vars=True))
        converted = SyncBatchNorm.convert_sync_batchnorm(model)
        assert converted is model
        after = dict(model.state_dict(keep_vars=True))
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before)
        layers = [model[0], model[1][0], *model[2:]]
        assert {type(layer) for layer in layers} == {SyncBatchNorm}
        assert [layer.training for layer in layers] == [False, True, True, True, True]
        assert (model[0].eps, model[0].momentum, model[4].momentum) == (0.1, None, 0.3)
        assert not model[0].weight.requires_grad
        assert model[1][0].weight is None
        assert model[2].running_mean is None
        assert type(model[1][1]) is nn.Linear

    def test_a_layer_alone_is_returned_as_a_new_one(self) -> None:
        plain = nn.BatchNorm2d(4)
        ours = SyncBatchNorm.convert_sync_batchnorm(plain)
        assert type(plain) is nn.BatchNorm2d
        assert type(ours) is SyncBatchNorm
        assert ours.weight is plain.weight
        linear = nn.Linear(2, 2)
        assert SyncBatchNorm.convert_sync_batchnorm(linear) is linear

    def test_a_layer_in_several_places_stays_one_layer(self) -> None:
        model = SyncBatchNorm.convert_sync_batchnorm(Shared())
        assert type(model.one) is SyncBatchNorm
        assert model.same is model.one
        assert model.more[1] is model.one
        assert type(model.more[0]) is SyncBatchNorm
        assert type(model.instance) is nn.InstanceNorm1d
        assert len(list(model.parameters())) == 2

    def test_hooks_stay_and_can_be_removed(self) -> None:
        calls = []
        plain = nn.BatchNorm1d(4)
        handle = plain.register_forward_hook(lambda *_: calls.append(1))
        ours = SyncBatchNorm.convert_sync_batchnorm(plain)
        ours(torch.randn(3, 4))
        handle.remove()
        ours(torch.randn(3, 4))
        assert calls == [1]

    def test_a_layer_of_unknown_size_cannot_be_converted_yet(self) -> None:
        with pytest.raises(gradsync.ArgumentError, match="LazyBatchNorm1d"):
            SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))

    def test_the_group_is_the_one_given_or_the_layers_own(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            convert = SyncBatchNorm.convert_sync_batchnorm
            first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
            ours = convert(nn.Sequential(nn.BatchNorm1d(4)), first)[0]
            assert ours.process_group is first
            assert convert(ours).process_group is first
            assert convert(ours, second).process_group is second
            assert convert(nn.SyncBatchNorm(4, process_group=first)).process_group is first
            assert convert(nn.BatchNorm1d(4)).process_group is None

        pool.run(run, timeout=LIMIT)

    def test_states_load_in_both_directions(self) -> None:
        for dim in (2, 4, 5):
            plain, ours = pair(dim)
            ours(data((6, FEATURES, *[2] * (dim - 2))))
            for other in (plain, nn.SyncBatchNorm(FEATURES), SyncBatchNorm(FEATURES)):
                other.load_state_dict(ours.state_dict())
                again = SyncBatchNorm(FEATURES)
                again.load_state_dict(other.state_dict())
                for name, value in ours.state_dict().items():
                    assert torch.equal(again.state_dict()[name], value)
            assert ours.state_dict()._metadata == plain.state_dict()._metadata
        assert repr(SyncBatchNorm(3)).startswith("SyncBatchNorm(3, eps=1e-05, momentum=0.1")

    def test_a_copied_or_reloaded_layer_goes_on_as_the_original(self, pool: WorkerPool) -> None:
        def run(rank: int, world: int) -> None:
            ours = SyncBatchNorm(FEATURES)
            ours(data((3 + rank, FEATURES)))
            file = io.BytesIO()
            torch.save(ours, file)
            file.seek(0)
            for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
                other(data((3 + rank, FEATURES), seed=1))
                assert other.num_batches_tracked == 2
                equal_on_all_ranks(other)

        pool.run(run, timeout=LIMIT)
