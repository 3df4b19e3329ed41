"""Trainers, servers and a master in processes of their own; some of them die."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trainers
from torch import Tensor

from gradsync import ArgumentError, hybrid
from gradsync.hybrid import Roles
from gradsync.hybrid.slow import SlowWatch
from gradsync.testing import WorkerPool


@pytest.fixture
def servers() -> Iterator[hybrid.Servers]:
    with hybrid.start_servers(2) as running:
        yield running


def initial() -> Tensor:
    with hybrid.local():
        return trainers.whole(trainers.make_table())


def assert_trained_like_one_process(found: list[dict[str, Tensor]], steps: int) -> None:
    expected = trainers.train_alone(steps, len(found), initial())
    for each in found:
        assert each["version"] == steps
        for name, value in expected.items():
            torch.testing.assert_close(each[name], value)


class TestTraining:
    @pytest.mark.parametrize("ahead", [False, True])
    def test_two_trainers_and_two_servers_train_like_one_process(
        self, servers: hybrid.Servers, ahead: bool
    ) -> None:
        roles = Roles(trainer=trainers.train, trainers=2, servers=2)
        assert_trained_like_one_process(hybrid.run(roles, args=(6, ahead), servers=servers), 6)

    def test_progress_streams_to_the_master_while_the_trainers_train(self) -> None:
        seen: list[tuple[str, int, float]] = []
        roles = Roles(trainer=trainers.train, trainers=2, master=trainers.watch)
        hybrid.run(
            roles,
            args=(5,),
            on_report=lambda name, values: seen.append((name, values["step"], time.monotonic())),
        )
        done = time.monotonic()
        for name in ("trainer0", "trainer1"):
            assert [step for who, step, _ in seen if who == name] == list(range(5))
        assert all(when < done for _, _, when in seen)

    def test_a_trainer_with_fewer_batches_takes_its_leave(self, servers: hybrid.Servers) -> None:
        roles = Roles(trainer=trainers.uneven, trainers=2)
        assert hybrid.run(roles, servers=servers) == [5, 2]

    def test_errors_of_trainers_are_told_with_their_names(self, servers: hybrid.Servers) -> None:
        with pytest.raises(hybrid.RoleFailure, match="has index 50") as caught:
            hybrid.run(Roles(trainer=trainers.wrong_index, trainers=2), servers=servers)
        assert isinstance(caught.value.__cause__, ArgumentError)
        assert "--- trainer1 ---" in str(caught.value)
        with pytest.raises(hybrid.RoleFailure, match="cannot be pickled"):
            hybrid.run(Roles(trainer=trainers.unpicklable), servers=servers)
        assert hybrid.run(Roles(trainer=trainers.group_size, trainers=2), servers=servers) == [2, 2]


class TestDeaths:
    def test_a_server_that_dies_fails_all_trainers_by_name_and_not_by_the_time_out(
        self, servers: hybrid.Servers
    ) -> None:
        killed: list[float] = []

        def kill(_name: str, values: dict[str, int]) -> None:
            if values["step"] == 5 and not killed:
                killed.append(time.monotonic())
                os.kill(servers.pids["server1"], signal.SIGKILL)

        roles = Roles(trainer=trainers.train_until_it_fails, trainers=2)
        with pytest.raises(hybrid.RoleFailure) as caught:
            hybrid.run(roles, servers=servers, on_report=kill)
        assert time.monotonic() - killed[0] < 10
        cause = caught.value.__cause__
        assert isinstance(cause, hybrid.ServerLostError)
        assert cause.args[0].startswith("server1")
        for part in str(caught.value).split("--- trainer")[1:]:
            assert re.search(r"ServerLostError: server1\b", part), part

    def test_a_trainer_that_dies_leaves_the_servers_to_a_new_set(
        self, servers: hybrid.Servers
    ) -> None:
        roles = Roles(trainer=trainers.train_and_die, trainers=2)
        with pytest.raises(hybrid.RoleFailure) as caught:
            hybrid.run(roles, args=(1, 4), servers=servers)
        assert "trainer1 died with exit code -9" in str(caught.value)
        assert "trainer1 has ended without taking its leave" in str(caught.value)
        ((left, version),) = hybrid.run(Roles(trainer=trainers.look), servers=servers)
        assert version == 4
        assert not torch.equal(left, initial())
        found = hybrid.run(Roles(trainer=trainers.train, trainers=3), args=(2,), servers=servers)
        assert all(each["version"] == 6 for each in found)
        assert all(torch.equal(each["table"], found[0]["table"]) for each in found)

    def test_a_server_that_has_stopped_is_named_after_the_time_out(
        self, servers: hybrid.Servers
    ) -> None:
        os.kill(servers.pids["server0"], signal.SIGSTOP)
        try:
            # On a busy machine the other may be late as well.
            named = "server0( and server1)? did not answer within 1 s"
            with pytest.raises(hybrid.RoleFailure, match=named):
                hybrid.run(Roles(trainer=trainers.look), servers=servers, timeout=1.0)
        finally:
            os.kill(servers.pids["server0"], signal.SIGCONT)

    def test_nothing_outlives_the_process_that_started_it(self) -> None:
        """The parent is forked from one that has imported torch."""
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        parent = context.Process(target=trainers.run_and_sleep, args=(theirs,))
        parent.start()
        assert ours.poll(60)
        pids = ours.recv()
        assert len(pids) == 2
        parent.kill()
        parent.join(10)
        deadline = time.monotonic() + 10
        while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class TestSlowness:
    def test_a_slow_server_is_named_with_its_p95(self) -> None:
        """All waits are given: those of a busy machine would be as long for any server."""
        with hybrid.local(servers=3) as cluster:
            cluster.watch = SlowWatch(cluster.servers, threshold=0.02)  # forgets those of joining
            answers = cluster._transport.replies

            def slow(requests, timeout):
                for server, message, _ in answers(requests, timeout):
                    yield server, message, 0.03 if server == "server1" else 0.001

            cluster._transport.replies = slow
            table = trainers.make_table()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in range(20):
                    table(trainers.batch(step, 0)[0])
        (message,) = {str(each.message) for each in caught}
        assert re.fullmatch(
            r"server1 is slow: the 95th percentile of the last \d+ waits for it is 30\.0 ms; "
            r"the others' is 1\.0 ms\.",
            message,
        )

    def test_a_server_that_waits_for_other_trainers_is_not_slow(self) -> None:
        watch = SlowWatch(["a", "b"], threshold=0.01)
        for _ in range(40):
            watch.record("a", 0.001)
            watch.record("b", 0.002)
        assert watch.p95("b") == 0.002


class TestLaunchers:
    def test_each_process_plays_the_role_of_its_rank(self, pool: WorkerPool) -> None:
        """As under torchrun, which test_click_through starts."""

        def play(rank: int, world: int) -> tuple[str, int, int | None]:
            import trainers

            roles = Roles(trainer=trainers.train, trainers=2, master=trainers.watch)
            seen: list[object] = []
            where = os.environ["GRADSYNC_INIT_METHOD"]
            value = hybrid.run(
                roles, args=(3,), rendezvous=where, on_report=lambda *each: seen.append(each)
            )
            return roles.role_of(rank)[0], len(seen), value and value["version"]

        assert pool.run(play, ranks=4, backend=None, timeout=90) == [
            ("trainer", 0, 3),
            ("trainer", 0, 3),
            ("server", 0, None),
            ("master", 6, None),
        ]

    @pytest.mark.parametrize("transport", ["sockets", "rpc"])
    def test_both_transports_train_alike(self, pool: WorkerPool, transport: str) -> None:
        def use_rpc_alone(rank: int, world: int) -> None:
            from torch.distributed import rpc

            where = os.environ["GRADSYNC_INIT_METHOD"]
            options = rpc.TensorPipeRpcBackendOptions(init_method=where)
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
            rpc.shutdown()

        def play(rank: int, world: int) -> object:
            import trainers

            roles = Roles(trainer=trainers.train, trainers=2)
            where = os.environ["GRADSYNC_INIT_METHOD"]
            return hybrid.run(roles, args=(4, True), rendezvous=where, transport=transport)

        if transport == "rpc":  # torch counts how often a process has started it
            pool.run(use_rpc_alone, ranks=1)
        *found, nothing = pool.run(play, ranks=3, backend=None, timeout=90)
        assert nothing is None
        assert_trained_like_one_process(found, 4)

    def test_a_wrong_number_of_processes_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ArgumentError, match=r"need 3 processes \(2 trainers, 1 servers\)"):
            hybrid.run(Roles(trainer=print, trainers=2), rendezvous="env://")
