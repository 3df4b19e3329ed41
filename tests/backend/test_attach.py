"""How ranks come to share a segment: whom they believe, who is kept out, what if there is none."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import time
import warnings
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import pytest
import seccomp
import torch
import torch.distributed as dist
from cases import check_against_gloo
from forked import Nursery
from operations import OPERATIONS, perform
from promptness import check_best_of_three
from torch.distributed import FileStore, HashStore, TCPStore

from gradsync import FaultError, PeerLostError, SharedMemoryGroup
from gradsync.backend import _native
from gradsync.backend.attach import _parse, _parse_answer
from gradsync.backend.members import Member, by_machine, exchange, fetch, machine, myself, parse

WORLD = 2
OWN = myself(0, 0)

# ---------------------------------------------------------------- who shares a machine


def test_processes_share_a_machine_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine()
    assert machine() == here
    monkeypatch.setenv("GRADSYNC_MACHINE", "elsewhere")
    assert machine() != here


def test_members_are_grouped_by_machine_in_the_order_of_ranks() -> None:
    members = [replace(OWN, rank=rank, machine=name) for rank, name in enumerate("abacb")]
    groups = [[member.rank for member in group] for group in by_machine(members)]
    assert groups == [[0, 2], [1, 4], [3]]


# ---------------------------------------------------------------- messages of others

GARBAGE = [
    b"",
    b"\x00\xff\xfe",
    b"null",
    b"[]",
    b"7",
    b'"text"',
    b"{}",
    b"[" * 100_000,
    b"x" * 10_000_000,
    b'{"rank": 0}',
    b'{"problem": 3}',
]
CHANGES: list[dict[str, Any]] = [
    {"rank": 1},
    {"rank": "0"},
    {"rank": True},
    {"pid": -1},
    {"pid": 0},
    {"pid": 1.5},
    {"pid": 2**22 + 1},
    {"pid": 2**64},
    {"started": -1},
    {"started": 0},
    {"started": 2**63},
    {"started": 2**64},
    {"name": -1},
    {"name": 2**31},
    {"host": None},
    {"host": "h" * 256},
    {"host": "a\nrank 1"},
    {"host": "\ud800"},
    {"machine": ["a"]},
    {"machine": "m" * 1025},
    {"extra": 1},
]


@pytest.mark.parametrize("message", GARBAGE, ids=lambda message: repr(message[:12]))
def test_garbage_in_the_store_is_an_error_that_says_so(message: bytes) -> None:
    with pytest.raises(FaultError, match="rank 0 was not written by gradsync"):
        parse(message, 0)
    with pytest.raises(FaultError, match=r"segment of rank 0 .* was not written by gradsync"):
        _parse(message, OWN)
    problem, is_fault = _parse_answer(message, OWN)
    assert is_fault
    assert "not written by gradsync" in problem


@pytest.mark.parametrize("change", CHANGES, ids=repr)
def test_a_member_with_a_wrong_field_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(FaultError, match="rank 0 was not written by gradsync"):
        parse(json.dumps(asdict(OWN) | change).encode(), 0)


def ticket(**changes: Any) -> bytes:
    good = {"pid": os.getpid(), "descriptor": 5, "bytes": 4096, "nonces": [1, 2]}
    return json.dumps(good | changes).encode()


@pytest.mark.parametrize(
    "change",
    [
        {"pid": 1},
        {"pid": -1},
        {"pid": "7"},
        pytest.param({"pid": float(os.getpid())}, id="a pid that is no whole number"),
        {"pid": True},
        {"descriptor": -1},
        {"descriptor": 2**31},
        {"descriptor": 2**64},
        {"descriptor": None},
        {"descriptor": 1e3},
        {"bytes": -4096},
        {"bytes": 2**63},
        {"bytes": "4096"},
        {"bytes": True},
        {"nonces": []},
        {"nonces": [1]},
        {"nonces": [1, -2]},
        {"nonces": [1, 2**64]},
        {"nonces": ["1", "2"]},
        {"nonces": {"1": 2}},
    ],
    ids=repr,
)
def test_a_ticket_with_a_wrong_field_is_an_error(change: dict[str, Any]) -> None:
    assert _parse(ticket(), OWN) == (os.getpid(), 5, 4096, [1, 2])
    with pytest.raises(FaultError, match="was not written by gradsync"):
        _parse(ticket(**change), OWN)


def test_a_store_that_was_tampered_with_fails_the_group_on_all_ranks(nursery: Nursery) -> None:
    def run(rank: int, world: int, path: str) -> None:
        store = FileStore(path + ".tampered", world)
        store.set_timeout(timedelta(seconds=5))
        if rank == 0:
            original = type(store).set

            class Liar:  # changes the ticket on its way
                def __getattr__(self, name: str) -> Any:
                    return getattr(store, name)

                def set(self, key: str, value: str) -> None:
                    if key.startswith("segment/"):
                        value = json.dumps(json.loads(value) | {"pid": 1})
                    original(store, key, value)

            from gradsync.backend.attach import attach

            own = myself(rank, rank)
            members = exchange(store, own, world)
            with pytest.raises(FaultError, match="cannot share memory"):
                attach(Liar(), own, members)
        else:
            from gradsync.backend.attach import attach

            own = myself(rank, rank)
            members = exchange(store, own, world)
            with pytest.raises(FaultError, match="it names process 1"):
                attach(store, own, members)

    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        for ending in nursery.run(run, args=(directory + "/store",), backend=None):
            ending.unwrap()


# ---------------------------------------------------------------- segments of others


def segment_bytes() -> int:
    context = _native.Context(
        _native.Segment.create(1), 0, [(os.getpid(), OWN.started, "rank 0", 0, "a")], 1, 2, True
    )
    size = context.ticket()[2]
    context.close()
    return size


def descriptors() -> dict[str, int]:
    """Files that are no segment of ours, each for a reason of its own."""
    size = segment_bytes()
    made = {"a pipe": os.pipe()[0], "a socket": socket.socket().detach()}
    made["unsealed memory"] = os.memfd_create("gradsync", os.MFD_ALLOW_SEALING)
    os.ftruncate(made["unsealed memory"], size)
    made["memory of another size"] = os.memfd_create("gradsync", os.MFD_ALLOW_SEALING)
    os.ftruncate(made["memory of another size"], 4096)
    made["a directory"] = os.open("/", os.O_RDONLY)
    made["a device"] = os.open("/dev/zero", os.O_RDWR)
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        made["a file"] = os.dup(file.fileno())
        os.ftruncate(made["a file"], size)
    return made


def test_other_files_are_not_taken_for_a_segment() -> None:
    size = segment_bytes()
    for what, descriptor in descriptors().items():
        with pytest.raises((_native.InvalidError, _native.SystemError), match="/proc/") as caught:
            _native.Segment.open(1, os.getpid(), descriptor, size)
        assert isinstance(caught.value, _native.InvalidError) or what in ("a socket", "a directory")
        os.close(descriptor)


@pytest.mark.parametrize(
    ("pid", "descriptor", "change"),
    [(0, 3, 0), (-1, 3, 0), (None, -1, 0), (None, 3, 1), (None, 3, -4096), (None, 10_000, 0)],
)
def test_a_ticket_that_leads_nowhere_is_an_error(
    pid: int | None, descriptor: int, change: int
) -> None:
    size = segment_bytes() + change
    with pytest.raises((_native.InvalidError, _native.SystemError)):
        _native.Segment.open(1, os.getpid() if pid is None else pid, descriptor, size)


def test_a_segment_of_another_group_is_an_error() -> None:
    peers = [(os.getpid(), OWN.started, f"rank {rank}", rank, "a") for rank in range(2)]
    founder = _native.Context(_native.Segment.create(2), 0, peers, 1, 2, True)
    pid, descriptor, size = founder.ticket()
    for nonces in ((1, 3), (3, 2)):
        segment = _native.Segment.open(2, pid, descriptor, size)
        with pytest.raises(_native.InvalidError, match="another group"):
            _native.Context(segment, 1, peers, *nonces, False)
    founder.close()


def test_a_process_that_took_over_the_pid_is_not_watched_in_its_place() -> None:
    peers = [(os.getpid(), OWN.started, "rank 0", 0, "a"), (1, 12345, "rank 1", 1, "a")]
    with pytest.raises(_native.SystemError, match="not the one that announced itself"):
        _native.Context(_native.Segment.create(2), 0, peers, 1, 2, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_open_nor_map_a_segment(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        peers = [(os.getpid(), myself(0, 0).started, "rank 0", 0, "a")]
        context = _native.Context(_native.Segment.create(1), 0, peers, 1, 2, True)
        pid, descriptor, size = context.ticket()
        mode = os.stat(f"/proc/self/fd/{descriptor}").st_mode & 0o777
        assert mode == 0o600
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                tries = [
                    lambda: _native.Segment.open(1, pid, descriptor, size),
                    lambda: os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY),
                    lambda: os.open(f"/proc/{pid}/mem", os.O_RDONLY),
                    lambda: os.listdir(f"/proc/{pid}/map_files"),
                ]
                refused = 0
                for each in tries:
                    try:
                        each()
                    except OSError as error:
                        refused += error.errno in (None, errno.EACCES, errno.EPERM)
                        refused += 0 if error.errno else -("Permission denied" not in str(error))
                code = 0 if refused == len(tries) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        context.close()

    (ending,) = nursery.run(run, 1, backend=None)
    ending.unwrap()


def test_ranks_of_two_users_are_two_machines() -> None:
    assert f"/{os.geteuid()}/" in machine()


# ---------------------------------------------------------------- while the group is made


def test_a_rank_that_dies_while_the_group_is_made_is_named_at_once(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> float:
        from gradsync.backend import attach

        if rank == 0:
            attach._map = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError, match=r"rank 0 \(pid .*has ended") as caught:
            dist.new_group(backend="gradsync")
        assert caught.value.rank == 0
        return time.monotonic()

    def kill() -> float:
        first, second = nursery.run(run, group_timeout=20)
        return second.unwrap() - first.ended

    check_best_of_three(kill, promise=1.5)


def test_a_rank_that_dies_before_a_further_group_is_made_is_named_at_once(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> float:
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            return 0.0
        with pytest.raises(PeerLostError, match=r"rank 2 \(pid .*has ended") as caught:
            dist.new_group([1, 2], backend="gradsync", use_local_synchronization=True)
        assert caught.value.rank == 1  # in that group
        return time.monotonic()

    def kill() -> float:
        _, second, third = nursery.run(run, ranks=3)
        return second.unwrap() - third.ended

    check_best_of_three(kill, promise=1.0)


def test_a_store_that_ends_while_a_group_is_made_is_an_error_that_says_so(
    nursery: Nursery,
) -> None:
    def run(rank: int, world: int, port: int) -> Any:
        store = TCPStore(
            "127.0.0.1", port, world, is_master=rank == 0, timeout=timedelta(seconds=20)
        )
        store.set(f"came{rank}", "")
        if rank == 0:
            store.wait(["came1"])
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(FaultError, match=r"rank 1 .* the store cannot be asked") as caught:
            SharedMemoryGroup(store, rank, world, timedelta(seconds=20))
        return str(caught.value)

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    _, second = nursery.run(run, args=(port,), backend=None)
    assert "while a group with it was made" in second.unwrap()


def test_a_death_while_the_group_is_made_is_not_taken_for_memory_that_cannot_be_shared(
    nursery: Nursery,
) -> None:
    def run(rank: int, world: int) -> float:
        from gradsync.backend import attach

        if rank == 0:  # says that all is well, and dies
            attach.fetch = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        original = attach._map

        def wait_and_map(*args: Any) -> Any:
            if rank == 1:
                time.sleep(0.5)  # rank 0 has died by then; if not, it dies while we map
            return original(*args)

        attach._map = wait_and_map
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(PeerLostError, match=r"rank 0 \(pid .*has ended") as caught:
                dist.new_group(backend="gradsync")
        assert caught.value.rank == 0
        return time.monotonic()

    def kill() -> float:
        first, second = nursery.run(run)
        return second.unwrap() - first.ended

    check_best_of_three(kill, promise=1.5)


def test_a_store_without_an_answer_is_waited_for_no_longer_than_it_says() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        fetch(store, ["member/1"], [OWN])
    assert 0.9 < time.monotonic() - began < 3


# ---------------------------------------------------------------- no memory to share


def fall_back(rank: int, world: int, reason: str) -> None:
    group = dist.group.WORLD
    assert not group.shares_memory
    for name, make in OPERATIONS.items():
        if "symmetric" not in name:
            perform(make(rank, world), "sync")
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.eq(1).all()
    check_against_gloo(rank, world)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = dist.new_group(backend="gradsync")
    told = [str(each.message) for each in caught if "gradsync" in str(each.message)]
    assert len(told) == (rank == 0), told
    if told:
        assert "uses gloo" in told[0]
        assert reason in told[0]
    dist.all_reduce(tensor, group=again)
    dist.destroy_process_group(again)


@seccomp.needed
@pytest.mark.parametrize(
    ("call", "where"),
    [
        ("memfd_create", [0]),  # who makes the segment
        ("memfd_create", [0, 1]),
        ("fallocate", [0]),
        ("pidfd_open", [0]),
        ("pidfd_open", [1]),
        ("pidfd_open", [0, 1]),
    ],
    ids=str,
)
def test_ranks_that_must_not_share_memory_use_gloo_and_say_why_once(
    nursery: Nursery, call: str, where: list[int]
) -> None:
    code = errno.ENOSPC if call == "fallocate" else errno.EPERM

    def prepare(rank: int) -> None:
        if rank in where:
            seccomp.forbid(call, code)

    for ending in nursery.run(fall_back, args=(call,), prepare=prepare):
        ending.unwrap()


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE"])
def test_ranks_whose_files_are_limited_use_gloo(nursery: Nursery, limit: str) -> None:
    def prepare(rank: int) -> None:
        if rank == 0:
            resource.setrlimit(getattr(resource, limit), (1_000_000, 1_000_000))

    for ending in nursery.run(fall_back, args=("File too large",), prepare=prepare):
        ending.unwrap()


@seccomp.needed
def test_symmetric_memory_that_is_not_to_be_had_is_an_error_and_the_group_lives(
    nursery: Nursery,
) -> None:
    def run(rank: int, world: int) -> None:
        seccomp.forbid("fallocate", errno.ENOSPC)
        with pytest.raises(FaultError, match="fallocate"):
            dist.group.WORLD.symmetric_empty(1_000_000, torch.float32)
        tensor = torch.ones(300_000)
        dist.all_reduce(tensor)
        assert tensor.eq(world).all()

    for ending in nursery.run(run):
        ending.unwrap()


def test_members_know_their_label() -> None:
    member = Member(rank=1, name=5, machine="m", host="a", pid=17, started=1)
    assert member.label == "rank 5 (pid 17 on a)"
    assert FaultError  # one tree
