"""Programs that end without destroying their group: threads of ours must not end them otherwise."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A thread of torch's gloo that lets go of a tensor while Python ends aborts any program, if rarely:
# we leave it some time, which may be too short on a busy machine.
GLOO = pytest.mark.slow

START = """
import os, signal, sys, time
rank, where = int(sys.argv[1]), sys.argv[2]
"""
JOIN = """
import torch, torch.distributed as dist
import gradsync
dist.init_process_group("gradsync", init_method=where, rank=rank, world_size=2)
dist.all_reduce(torch.ones(3))
"""
BETWEEN_MACHINES = """
os.environ["GRADSYNC_MACHINE"] = str(rank)
from gradsync.backend import board
board.PERIOD_SECONDS = 0.002  # so that it looks when the interpreter ends
"""
ENDS = {
    "nothing more": "",
    "gloo, done": "dist.all_reduce(torch.ones(3) > 0)",
    "gloo, under way": "work = dist.all_reduce(torch.ones(1000) > 0, async_op=True)",
    "gloo, a future": "done = dist.all_reduce(torch.ones(3) > 0, async_op=True).get_future()",
}
LATE = """
if rank == 1:
    time.sleep(2.5)  # longer than rank 0 waits when it ends
try:
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    if rank == 1:
        work.wait()
except gradsync.FaultError:
    pass
"""
LAST = """
import atexit
@atexit.register
def last():
    import torch, torch.distributed as dist
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor > 0)
    if not tensor.eq(2).all():
        os._exit(3)
"""
WAITS = """
if rank == 1:
    time.sleep(60)
open(sys.argv[3], "w").close()
dist.all_reduce(torch.ones(3).to_sparse())
"""


def start(program: str, *arguments: str) -> list[subprocess.Popen[bytes]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        where = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    return [
        subprocess.Popen(
            [sys.executable, "-c", START + program, rank, where, *arguments], stderr=subprocess.PIPE
        )
        for rank in "01"
    ]


@pytest.mark.parametrize(
    "end", [name if name == "nothing more" else pytest.param(name, marks=GLOO) for name in ENDS]
)
@pytest.mark.parametrize("before", ["", BETWEEN_MACHINES], ids=["one machine", "two machines"])
def test_a_program_may_end_without_destroying_its_group(before: str, end: str) -> None:
    for rank in start(before + JOIN + ENDS[end]):
        _, output = rank.communicate(timeout=100)
        assert rank.returncode == 0, output.decode()


@GLOO
@pytest.mark.parametrize("before", ["", BETWEEN_MACHINES], ids=["one machine", "two machines"])
def test_who_ends_before_the_others_have_come_ends_well(before: str) -> None:
    first, second = start(before + JOIN + LATE)
    for rank in (first, second):
        _, output = rank.communicate(timeout=100)
        assert rank.returncode == 0, output.decode()


@GLOO
@pytest.mark.parametrize("before", ["", BETWEEN_MACHINES], ids=["one machine", "two machines"])
def test_a_program_s_own_handlers_may_use_the_group_at_exit(before: str) -> None:
    for rank in start(LAST + before + JOIN + ENDS["gloo, done"]):
        _, output = rank.communicate(timeout=100)
        assert rank.returncode == 0, output.decode()
        assert b"Error" not in output, output.decode()


@GLOO
def test_ctrl_c_in_a_collective_through_gloo_ends_the_program_as_ever(tmp_path: Path) -> None:
    waiting = tmp_path / "waiting"
    first, second = start(JOIN + WAITS, str(waiting))
    try:
        deadline = time.monotonic() + 60
        while not waiting.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)
        first.send_signal(signal.SIGINT)
        _, output = first.communicate(timeout=20)
        assert "KeyboardInterrupt" in output.decode()
        assert first.returncode == -signal.SIGINT, output.decode()
    finally:
        second.kill()
        second.communicate(timeout=20)
