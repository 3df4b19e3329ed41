"""The side of a conformance run that has torch: finds the tests and runs them one by one.

``run_conformance.py`` starts this file as a process of its own, with ``--serve`` for each
suite it has loaded, or with ``--worker`` for a single test.
"""

import contextlib
import inspect
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest


def functions_of(obj):
    """The functions behind a test method: decorated, bound, or in a closure."""
    found, todo = [], [obj]
    while todo:
        item = todo.pop()
        if isinstance(item, (staticmethod, classmethod, types.MethodType)):
            todo.append(item.__func__)
        elif isinstance(item, property):
            todo.append(item.fget)
        elif isinstance(item, type):
            todo.extend(v for v in vars(item).values() if callable(v) or hasattr(v, "__func__"))
        elif isinstance(item, types.FunctionType) and item not in found:
            found.append(item)
            todo.append(getattr(item, "__wrapped__", None))
            for cell in item.__closure__ or ():
                try:
                    todo.append(cell.cell_contents)
                except ValueError:  # an empty cell
                    continue
                if isinstance(todo[-1], type):  # __class__, for super()
                    todo.pop()
    return found


def names_in(code):
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= names_in(const)
    return names


def reachable(case, method):
    """The functions of the test files that a test runs: its own, helpers, models."""
    files = {
        inspect.getsourcefile(c)
        for c in case.__mro__
        if c.__module__.startswith(("test_", "ddp_conform"))
        or ".testing._internal.distributed." in c.__module__
    }
    seen = []
    todo = functions_of(inspect.getattr_static(case, method))
    while todo:
        function = todo.pop()
        if function in seen:
            continue
        seen.append(function)
        for name in names_in(function.__code__):
            named = function.__globals__.get(name), inspect.getattr_static(case, name, None)
            for target in named:
                todo.extend(f for f in functions_of(target) if f.__code__.co_filename in files)
    return seen


def uses_ddp(case, method):
    """Does the test, or what it calls in the test files, name the DDP class?"""
    for function in reachable(case, method):
        for name in names_in(function.__code__):
            value = function.__globals__.get(name)
            if name in ("DistributedDataParallel", "DDP"):
                return True
            if getattr(value, "__module__", "") == "torch.distributed._composable.replicate":
                return True
    return False


def discover(module_name):
    module = __import__(module_name)
    tests = []
    for case in vars(module).values():
        if not (isinstance(case, type) and issubclass(case, unittest.TestCase)):
            continue
        if case.__module__ != module_name or case.__name__.startswith("_"):
            continue
        for name in unittest.defaultTestLoader.getTestCaseNames(case):
            method = getattr(case, name)
            skip = None
            for thing in (case, method):
                if getattr(thing, "__unittest_skip__", False):
                    skip = thing.__unittest_skip_why__
            tests.append(
                {
                    "case": case.__name__,
                    "test": name,
                    "skip": skip,
                    "ddp": uses_ddp(case, name),
                    "gpus": getattr(method, "ddp_conform_gpus", 0),
                }
            )
    return tests


def fork_in_place_of_spawn():
    """Ranks start as forks of the process that runs the test."""
    import torch.multiprocessing
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    torch.multiprocessing.set_start_method("fork", force=True)
    process = torch.multiprocessing.get_context("fork").Process
    MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(process)


def run_one(job):
    """Runs one test in this very process; returns its outcome and the reason."""
    module = __import__(job["module"])
    result = unittest.TestResult()
    # A suite, and not the bare test, so that the fixtures of the class run too.
    unittest.TestSuite([getattr(module, job["case"])(job["test"])]).run(result)
    broken = result.failures + result.errors
    if broken:
        return "fail", "\n".join(text for _, text in broken)
    if result.unexpectedSuccesses:
        return "fail", "unexpected success"
    if result.skipped:
        return "skip", result.skipped[0][1]
    return "pass", ""


def become_worker(job):
    """The rest of a process's life: run the test and leave the outcome in a file."""
    os.environ.update(job["env"])
    tempfile.tempdir = None
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        if job["start"] == "fork":
            fork_in_place_of_spawn()
        outcome, text = run_one(job)
    except BaseException:
        outcome, text = "error", traceback.format_exc()
    with open(job["outcome"] + ".new", "w") as out:
        json.dump([outcome, text], out)
    os.rename(job["outcome"] + ".new", job["outcome"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def supervise(pid, limit, harness=None):
    """Waits for a leader of a process group, then ends what is left of the group.

    The group ends early when the pipe ``harness`` has lost its writer, or when this
    process is interrupted: a run leaves no process behind, however it ends.
    The leader is reaped last: till then no other process can get its number.
    Returns whether it ran out of time, and its wait status.
    """
    deadline = time.monotonic() + limit
    late = False
    try:
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > deadline or (harness is not None and hung_up(harness)):
                late = True
                break
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    return late, status


def hung_up(pipe):
    poll = select.poll()
    poll.register(pipe, 0)  # a hang-up is reported unasked
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def serve(module_name, commands, replies):
    """Loads a suite once; then forks a worker for each job that comes in."""
    replies = os.fdopen(replies, "w")

    def reply(thing):
        replies.write(json.dumps(thing) + "\n")
        replies.flush()

    try:
        reply(discover(module_name))
    except BaseException:
        reply({"error": traceback.format_exc()})
        return
    for line in os.fdopen(commands):
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                become_worker(job)
            finally:
                os._exit(99)
        reply(supervise(pid, job["timeout"], commands))


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        assert sys.argv[1] == "--worker"
        become_worker(json.loads(sys.argv[2]))
