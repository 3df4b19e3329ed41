from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gradsync.testing import RankFailure, WorkerPool, supervise

MODULE_CONSTANT = 7


class HomemadeError(ValueError):
    def is_homemade(self) -> bool:
        return True


def add_constant(rank: int, world: int, number: int) -> int:
    return number + MODULE_CONSTANT


def all_ranks_sum(rank: int, world: int) -> float:
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


def works(pool: WorkerPool, ranks: int = 2) -> bool:
    """The pool is healthy: a collective gives the right sum on all ranks."""
    return pool.run(all_ranks_sum, ranks=ranks) == [ranks * (ranks + 1) / 2] * ranks


def fail_alone(rank: int, world: int, time_limit: float | None = None) -> None:
    """Rank 1 fails once rank 0 is about to wait for it, ``time_limit`` seconds if given."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["waiting"])
        raise HomemadeError("the cause")
    if time_limit is not None:  # only now: the start of the group may take longer
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=time_limit))
    store.set("waiting", "")
    dist.barrier()


def state_of(pid: int) -> str:
    """As in /proc; X if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("Z", "X")


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(is_running, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if is_running(pid)]


class TestRunning:
    def test_returns_the_values_by_rank(self, pool: WorkerPool) -> None:
        def where(rank: int, world: int) -> tuple[int, int, int, int]:
            return rank, world, dist.get_rank(), dist.get_world_size()

        assert pool.run(where, ranks=2) == [(0, 2, 0, 2), (1, 2, 1, 2)]

    def test_the_ranks_are_different_processes_that_are_used_again(self, pool: WorkerPool) -> None:
        first = pool.run(lambda rank, world: os.getpid())
        assert len({*first, os.getpid()}) == 3
        assert pool.run(lambda rank, world: os.getpid()) == first

    @pytest.mark.parametrize("ranks", [1, 2, 3, 4])
    def test_collectives_span_exactly_the_ranks_of_the_run(
        self, pool: WorkerPool, ranks: int
    ) -> None:
        assert works(pool, ranks)

    def test_module_functions_and_closures_reach_workers_with_arguments(
        self, pool: WorkerPool
    ) -> None:
        captured = torch.arange(3)

        def scaled(rank: int, world: int, factor: int, *, shift: int) -> list[int]:
            return (captured * factor + shift).tolist()  # type: ignore[no-any-return]

        assert pool.run(add_constant, args=(1,), ranks=1) == [8]
        assert pool.run(scaled, args=(2,), kwargs={"shift": 1}, ranks=1) == [[1, 3, 5]]

    @pytest.mark.parametrize("variable", [None, "GRADSYNC_INIT_METHOD"])
    def test_without_a_backend_there_is_no_group_but_functions_can_start_their_own(
        self, pool: WorkerPool, variable: str | None
    ) -> None:
        def own_group(rank: int, world: int) -> tuple[bool, float]:
            before = dist.is_initialized()
            method = os.environ[variable] if variable else "env://"
            dist.init_process_group(
                "gloo", method, timedelta(seconds=20), rank=rank, world_size=world
            )
            return before, all_ranks_sum(rank, world)

        assert pool.run(own_group, backend=None) == [(False, 3.0)] * 2
        assert pool.run(own_group, backend=None) == [(False, 3.0)] * 2

    def test_the_group_time_out_is_the_one_asked_for(self, pool: WorkerPool) -> None:
        def asked_for(rank: int, world: int) -> timedelta:
            group = dist.distributed_c10d._get_default_group()
            return group._get_backend(torch.device("cpu")).options._timeout

        assert pool.run(asked_for, group_timeout=17.0) == [timedelta(seconds=17)] * 2

    def test_views_come_back_as_their_own_bytes_only(self, pool: WorkerPool) -> None:
        def view(rank: int, world: int) -> torch.Tensor:
            return torch.arange(100_000.0)[rank : rank + 2]

        first, second = pool.run(view)
        assert (first.tolist(), second.tolist()) == ([0, 1], [1, 2])
        assert first.untyped_storage().nbytes() == 8

    def test_large_values_pass_in_both_directions(self, pool: WorkerPool) -> None:
        big = torch.ones(4_000_000)
        assert torch.equal(pool.run(lambda rank, world, t: t + 1, args=(big,), ranks=1)[0], big + 1)

    def test_instances_of_test_classes_come_back_as_the_same_class(self, pool: WorkerPool) -> None:
        method = HomemadeError.is_homemade
        [error] = pool.run(lambda rank, world: HomemadeError("x"), ranks=1)
        assert type(error) is HomemadeError
        assert HomemadeError.is_homemade is method

    @pytest.mark.parametrize("ranks", [0, 5])
    def test_a_wrong_number_of_ranks_is_refused(self, pool: WorkerPool, ranks: int) -> None:
        with pytest.raises(ValueError, match=f"ranks={ranks}.*1 to 4"):
            pool.run(all_ranks_sum, ranks=ranks)

    def test_a_pool_in_its_own_function_is_refused_by_name(self, pool: WorkerPool) -> None:
        pids = pool.pids()
        with pytest.raises(TypeError, match="WorkerPool cannot be sent"):
            pool.run(lambda rank, world: pool.max_ranks)
        assert pool.pids() == pids


class TestHygiene:
    def test_nothing_set_in_one_run_is_seen_in_the_next(self, pool: WorkerPool) -> None:
        def look(rank: int, world: int) -> tuple[object, ...]:
            return (
                torch.get_default_dtype(),
                torch.is_grad_enabled(),
                torch.get_num_threads(),
                torch.rand(1).item(),
                os.environ.get("SOME_VARIABLE"),
                len(warnings.filters),
                os.getcwd(),
                tuple(sys.path),
            )

        def spoil(rank: int, world: int) -> None:
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
            torch.set_num_threads(2)
            torch.manual_seed(rank + 99)
            os.environ["SOME_VARIABLE"] = "spoilt"
            warnings.simplefilter("error")
            os.chdir("/")
            sys.path.clear()

        before = pool.run(look)
        pool.run(spoil)
        assert pool.run(look) == before
        assert before[0][:3] == (torch.float32, True, 1)

    def test_env_is_for_one_run_and_none_unsets(self, pool: WorkerPool) -> None:
        def read(rank: int, world: int) -> tuple[str | None, str | None]:
            return os.environ.get("SOME_VARIABLE"), os.environ.get("GLOO_SOCKET_IFNAME")

        env = {"SOME_VARIABLE": "x", "GLOO_SOCKET_IFNAME": None}
        assert pool.run(read, ranks=1, backend=None, env=env) == [("x", None)]
        assert pool.run(read, ranks=1)[0][0] is None

    def test_a_thread_left_behind_fails_the_run_and_costs_the_worker(
        self, pool: WorkerPool
    ) -> None:
        def leave(rank: int, world: int) -> int:
            if rank == 1:
                threading.Thread(target=time.sleep, args=(60,), name="lingerer").start()
            return os.getpid()

        with pytest.raises(RankFailure, match=r"rank 1 returned, but.*'lingerer'") as failure:
            pool.run(leave)
        assert set(failure.value.failures) == {1}
        assert 1 not in pool.pids()


class TestExceptions:
    def test_every_failed_rank_is_shown_with_its_traceback(self, pool: WorkerPool) -> None:
        def deep_inside(rank: int) -> None:
            raise HomemadeError(f"number {rank}")

        def fail(rank: int, world: int) -> None:
            print(f"printed by {rank}")
            deep_inside(rank)

        with pytest.raises(RankFailure) as caught:
            pool.run(fail)
        text = str(caught.value)
        for rank in range(2):
            assert f"rank {rank} raised HomemadeError: number {rank}" in text
            assert f"printed by {rank}" in text
        assert text.count("in deep_inside") == 2
        error = caught.value.failures[1]
        assert (error.type_name, error.message) == ("HomemadeError", "number 1")
        assert isinstance(error.exception, HomemadeError)
        assert isinstance(caught.value.__cause__, HomemadeError)

    def test_the_workers_survive_an_exception(self, pool: WorkerPool) -> None:
        def fail(rank: int, world: int) -> None:
            raise ValueError

        assert works(pool)
        pids = pool.pids()
        with pytest.raises(RankFailure):
            pool.run(fail)
        assert pool.pids() == pids
        assert works(pool)

    def test_outcomes_hold_values_and_errors_side_by_side(self, pool: WorkerPool) -> None:
        def odd_fails(rank: int, world: int) -> int:
            if rank % 2:
                raise ValueError(f"odd {rank}")
            return rank

        good, bad = pool.run(odd_fails, return_exceptions=True)
        assert (good.ok, good.value) == (True, 0)
        assert bad.error is not None
        assert (bad.ok, bad.error.message) == (False, "odd 1")
        with pytest.raises(RankFailure, match="odd 1"):
            bad.unwrap()

    def test_what_cannot_be_pickled_is_named(self, pool: WorkerPool) -> None:
        with pytest.raises(RankFailure, match="rank 0 returned a lock that cannot be pickled"):
            pool.run(lambda rank, world: threading.Lock(), ranks=1)

    def test_an_exception_that_cannot_be_pickled_keeps_its_text(self, pool: WorkerPool) -> None:
        def fail(rank: int, world: int) -> None:
            error = ValueError("told")
            error.lock = threading.Lock()  # type: ignore[attr-defined]
            raise error

        [outcome] = pool.run(fail, ranks=1, return_exceptions=True)
        assert outcome.error is not None
        assert (outcome.error.message, outcome.error.exception) == ("told", None)

    def test_sys_exit_is_a_failure_not_the_end_of_the_worker(self, pool: WorkerPool) -> None:
        pids = pool.pids()
        with pytest.raises(RankFailure, match="raised SystemExit"):
            pool.run(lambda rank, world: sys.exit(0), ranks=1)
        assert pool.pids() == pids


class TestHangsAndDeaths:
    def test_a_failure_frees_the_run_from_peers_stuck_in_a_collective(
        self, pool: WorkerPool
    ) -> None:
        began = time.monotonic()
        with pytest.raises(RankFailure) as caught:
            pool.run(fail_alone, grace=1, timeout=50)
        assert time.monotonic() - began < 20
        assert caught.value.first.message == "the cause"
        assert caught.value.failures[0].kind == "stuck"
        assert "barrier" in caught.value.failures[0].traceback
        assert works(pool)

    def test_with_return_exceptions_the_peers_fail_for_their_own_reason(
        self, pool: WorkerPool
    ) -> None:
        outcomes = pool.run(fail_alone, args=(1.0,), grace=20, return_exceptions=True)
        assert outcomes[0].error is not None
        assert outcomes[0].error.kind == "exception"
        assert "imed out" in outcomes[0].error.message
        assert works(pool)

    def test_a_hang_is_reported_with_what_each_rank_was_doing(
        self, pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asleep = tmp_path / "asleep"

        def forgotten_sleep() -> None:
            asleep.touch()
            time.sleep(600)

        def hang(rank: int, world: int) -> None:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            print(f"child={subprocess.Popen(['sleep', '600']).pid}")
            forgotten_sleep()

        assert works(pool)
        hung = list(pool.pids().values())[:2]

        def now() -> float:
            """By this clock the time is over once both ranks hang, however long that takes."""
            return 100.0 if asleep.exists() and state_of(hung[1]) == "T" else 0.0

        with monkeypatch.context() as patched:
            patched.setattr(supervise, "time", SimpleNamespace(monotonic=now))
            with pytest.raises(RankFailure, match="rank 0 was still running after 50 s") as caught:
                pool.run(hang, timeout=50)
        errors = caught.value.failures
        assert "in forgotten_sleep" in errors[0].traceback
        assert "the process is stopped" in errors[1].traceback
        child = int(errors[0].output.partition("child=")[2].split()[0])
        assert wait_until_gone([*hung, child]) == []
        assert works(pool)

    def test_deaths_are_reported_with_their_causes_at_once(self, pool: WorkerPool) -> None:
        def die(rank: int, world: int) -> None:
            print("last words")
            if rank == 0:
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(RankFailure) as caught:
            pool.run(die, timeout=50)
        errors = caught.value.failures
        assert [errors[rank].kind for rank in range(2)] == ["died", "died"]
        assert "exited with code 3" in errors[0].message
        assert "killed by SIGKILL" in errors[1].message
        assert "last words" in errors[1].output
        assert not {0, 1} & pool.pids().keys()

    def test_a_worker_that_dies_between_runs_is_replaced(self, pool: WorkerPool) -> None:
        assert works(pool)
        os.kill(pool.pids()[1], signal.SIGKILL)
        wait_until_gone([pool.pids()[1]])
        assert works(pool)

    def test_an_interrupted_run_leaves_no_worker_at_work(self, pool: WorkerPool) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        def interrupt_and_work_on(rank: int, world: int, caller: int) -> None:
            os.kill(caller, signal.SIGALRM)  # not by a clock: it may strike before the run starts
            time.sleep(60)

        assert pool.run(lambda rank, world: rank, ranks=1) == [0]
        pid = pool.pids()[0]
        previous = signal.signal(signal.SIGALRM, interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                pool.run(interrupt_and_work_on, ranks=1, args=(os.getpid(),), backend=None)
        finally:
            signal.signal(signal.SIGALRM, previous)
        assert wait_until_gone([pid]) == []


class TestLife:
    def test_close_ends_every_process_and_a_closed_pool_says_so(self) -> None:
        with WorkerPool(max_ranks=1) as pool:
            pool.run(lambda rank, world: None, ranks=1)
            pids = list(pool.pids().values())
        assert pids
        assert wait_until_gone(pids, seconds=0.1) == []
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            pool.run(all_ranks_sum, ranks=1)

    def test_a_worker_has_what_is_preloaded_before_its_first_run(self) -> None:
        def is_there(rank: int, world: int) -> bool:
            return "this" in sys.modules

        with WorkerPool(max_ranks=1, preload=["this"]) as pool:
            assert pool.run(is_there, ranks=1, backend=None) == [True]
        with (
            WorkerPool(max_ranks=1, preload=["no_such_module"]) as pool,
            pytest.raises(RuntimeError, match=r"before it could start(.|\n)*no_such_module"),
        ):
            pool.run(is_there, ranks=1, backend=None)

    def test_workers_die_with_a_killed_parent_even_when_stopped(self, tmp_path: Path) -> None:
        script = tmp_path / "parent.py"
        script.write_text(
            textwrap.dedent(
                """
                import os, signal, threading, time
                from gradsync.testing import WorkerPool

                pool = WorkerPool(max_ranks=1)
                pool.run(lambda rank, world: None, ranks=1, backend=None)
                stop = lambda rank, world: os.kill(os.getpid(), signal.SIGSTOP)
                run = lambda: pool.run(stop, ranks=1, backend=None)
                threading.Thread(target=run, daemon=True).start()
                time.sleep(0.3)
                print(pool.pids()[0], flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
                """
            )
        )
        finished = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
        )
        assert finished.returncode == -signal.SIGKILL, finished.stderr
        assert wait_until_gone([int(finished.stdout)]) == []
