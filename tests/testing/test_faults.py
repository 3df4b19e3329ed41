from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradsync.testing import Fault, InjectedFault, RankFailure, WorkerPool, fail_at
from gradsync.testing.faults import Action, Phase


def train_with(fault: Fault, steps: int = 3) -> tuple[int, str, nn.Module]:
    """Steps that succeeded, the error if there was one, and the model."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fault.install(model, optimizer)
    for step in range(steps):
        try:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        except InjectedFault as error:
            return step, str(error), model
        if any(p.isnan().any() for p in model.parameters()):
            return step, "nan", model
    return steps, "", model


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize(("action", "words"), [("raise", "rank 0, step 1, {}"), ("nan", "nan")])
def test_the_fault_strikes_in_its_step_and_phase_only(
    phase: Phase, action: Action, words: str
) -> None:
    step, error, _ = train_with(Fault(rank=0, step=1, phase=phase, action=action))
    assert step == 1
    assert words.format(phase) in error


def test_a_fault_in_backward_leaves_forward_alone() -> None:
    model = nn.Linear(2, 2)
    with fail_at(model, rank=0, step=0, phase="backward", action="nan"):
        loss = model(torch.ones(1, 2)).sum()
    assert not loss.isnan()
    loss.backward()
    assert model.weight.grad is not None
    assert model.weight.grad.isnan().all()


def test_outputs_in_containers_are_struck_too() -> None:
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"pair": (x, x + 1), "name": "kept", "count": torch.ones(1, dtype=torch.int64)}

    model = Nested()
    with fail_at(model, rank=0, step=0, action="nan"):
        output = model(torch.ones(1))
    assert all(t.isnan().all() for t in output["pair"])
    assert (output["name"], output["count"].item()) == ("kept", 1)


def test_a_removed_fault_does_not_strike() -> None:
    model = nn.Linear(2, 2)
    with fail_at(model, rank=0, step=0):
        pass
    model(torch.ones(1, 2))


def test_the_fault_strikes_its_rank_and_no_other(pool: WorkerPool) -> None:
    def train(rank: int, world: int) -> int:
        return train_with(Fault(rank=1, step=2))[0]

    assert pool.run(train) == [3, 2]


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_kill_and_stop_take_the_process(pool: WorkerPool) -> None:
    pids = pool.run(lambda rank, world: os.getpid(), backend=None)

    def train(rank: int, world: int) -> None:
        while rank == 0 and not is_stopped(pids[1]):  # the death ends the run
            time.sleep(0.01)
        train_with(Fault(rank=0, step=1, phase="backward", action="kill"))
        train_with(Fault(rank=1, step=0, phase="optimizer", action="stop"))
        time.sleep(60 if rank == 0 else 0)

    with pytest.raises(RankFailure) as caught:
        pool.run(train, timeout=50, grace=0.5)
    assert signal.SIGKILL.name in caught.value.failures[0].message
    assert "stopped" in caught.value.failures[1].traceback


def test_wrong_words_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="phase='sideways' is not one of forward, backward"):
        Fault(rank=0, step=0, phase="sideways")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs install"):
        Fault(rank=0, step=0, phase="optimizer").install(nn.Linear(1, 1))
    assert not dist.is_initialized()
