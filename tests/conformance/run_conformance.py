#!/usr/bin/env python3
"""Runs PyTorch's own DDP tests against any class that claims to be a DDP.

    run_conformance.py --ddp mypkg.ddp:MyDDP --jobs 2 --json out.json

The tests are the ones inside the installed torch wheel, for the gloo backend
on the CPU.  With --torch-tests DIR, where DIR is the ``test/distributed``
folder of a PyTorch checkout of about the same version, the DDP tests that the
wheel leaves out run too.  Nothing of PyTorch is copied into this file.

Every process, ranks included, gets the candidate in the place of
torch.nn.parallel.DistributedDataParallel: see conform_site/sitecustomize.py.
Each test runs in a process group of its own, under a time limit: see worker.py.
This file never loads torch.

--start fork (the default) loads torch once and forks a process per test and
per rank, which is some ten times faster than --start spawn, where each of them
loads torch afresh, as in PyTorch's own continuous integration.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

from worker import supervise

HERE = os.path.dirname(os.path.abspath(__file__))
SITE = os.path.join(HERE, "conform_site")
WORKER = os.path.join(HERE, "worker.py")
TORCH_DDP = "torch.nn.parallel:DistributedDataParallel"

# name: (module, folder below --torch-tests, or None for what is in the wheel)
SUITES = {
    "dist": ("ddp_conform_dist", None),
    "rpc": ("ddp_conform_rpc", None),
    "c10d_gloo": ("test_c10d_gloo", "."),
    "c10d_pypg": ("test_c10d_pypg", "."),
    "c10d_spawn_gloo": ("test_c10d_spawn_gloo", "."),
    "ddp_hooks": ("test_ddp_hooks", "algorithms/ddp_comm_hooks"),
    "join": ("test_join", "algorithms"),
    "zero": ("test_zero_redundancy_optimizer", "optim"),
    "replicate": ("test_replicate", "_composable"),
    "state_dict": ("test_state_dict", "checkpoint"),
    "dynamo": ("test_dynamo_distributed", "."),
    "replicate_compiler": ("test_replicate_with_compiler", "_composable"),
}
COMPILES = ("dynamo", "replicate_compiler")


class Server:
    """A process that has a suite loaded, under one WORLD_SIZE."""

    def __init__(self, options, suite, world_size):
        self.key = (suite, world_size)
        module = SUITES[suite][0]
        command_r, command_w = os.pipe()
        reply_r, reply_w = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, WORKER, "--serve", module, str(command_r), str(reply_w)],
            env=environment(options, suite, world_size),
            cwd=options.work,
            pass_fds=(command_r, reply_w),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if not options.verbose else None,
            stderr=subprocess.DEVNULL if not options.verbose else None,
        )
        os.close(command_r)
        os.close(reply_w)
        self.commands = os.fdopen(command_w, "w")
        self.replies = os.fdopen(reply_r)
        self.tests = self._read(options.load_timeout)

    def _read(self, limit):
        if not select.select([self.replies], [], [], limit)[0]:
            return {"error": f"no answer in {limit:.0f} s"}
        line = self.replies.readline()
        return json.loads(line) if line else {"error": "the process died"}

    def run(self, job):
        try:
            self.commands.write(json.dumps(job) + "\n")
            self.commands.flush()
        except OSError as error:
            return {"error": str(error)}
        return self._read(job["timeout"] + 60)

    def close(self):
        with contextlib.suppress(OSError):  # it is gone already
            self.commands.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.replies.close()


def environment(options, suite, world_size):
    folder = SUITES[suite][1]
    paths = [SITE]
    if folder is not None:
        paths += [os.path.join(options.torch_tests, folder), options.torch_tests]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths += [os.path.abspath(path) for path in inherited if path]
    env = dict(os.environ)
    env.update(
        PYTHONPATH=os.pathsep.join(paths),
        DDP_CONFORM_CANDIDATE=options.ddp,
        BACKEND="gloo",
        WORLD_SIZE=str(world_size),
        TEMP_DIR=options.work,
        TMPDIR=options.work,
        # The limit of the tests themselves, which tells where each rank stands, comes first.
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(max(5, int(options.timeout * 0.7))),
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
    )
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.setdefault("TP_SOCKET_IFNAME", "lo")
    if options.cpu_shim:
        env["DDP_CONFORM_CPU_SHIM"] = "compile" if suite in COMPILES else "eager"
    if options.run_disabled:
        env["DDP_CONFORM_DISABLED"] = "1"
    if options.backend:
        env["DDP_CONFORM_BACKEND"] = options.backend
    return env


def first_line(text):
    """The line that best says what went wrong: the first exception of a rank."""
    lines = [line for line in text.splitlines() if line.strip()]
    error = r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Failure|Warning|Unsupported)\b"
    wrapper = "exited with error code|exited with exception:|Exception in worker process"
    at = [i for i, line in enumerate(lines) if re.match(error, line)]
    inner = [i for i in at if not re.search(wrapper, lines[i])]
    if not lines:
        return ""
    pick = (inner or at[-1:] or [len(lines) - 1])[0]
    more = lines[pick].endswith(":") and lines[pick + 1 :][:1]
    return " ".join([lines[pick].strip(), *(line.strip() for line in more or ())])[:300]


def run_test(options, server, test):
    """Runs one test, in a process group of its own; returns the finished record."""
    folder = tempfile.mkdtemp(dir=options.work)
    suite, world_size = test["suite"], test["world_size"]
    job = {
        "module": SUITES[suite][0],
        "case": test["case"],
        "test": test["test"],
        "start": options.start,
        "timeout": options.timeout,
        "log": os.path.join(folder, "log"),
        "outcome": os.path.join(folder, "outcome"),
        "env": {"TMPDIR": folder, "DDP_CONFORM_TRACE": os.path.join(folder, "trace")},
    }
    begin = time.monotonic()
    if options.start == "fork":
        ended = server.run(job)
    else:
        process = subprocess.Popen(
            [sys.executable, WORKER, "--worker", json.dumps(job)],
            env=environment(options, suite, world_size),
            cwd=options.work,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        ended = supervise(process.pid, options.timeout)
    seconds = time.monotonic() - begin

    text = ""
    if os.path.exists(job["outcome"]):
        with open(job["outcome"]) as file:
            outcome, text = json.load(file)
    elif isinstance(ended, dict):
        outcome, text = "error", f"lost: {ended['error']}"
    elif ended[0]:
        outcome, text = "error", f"timeout after {options.timeout:.0f} s"
    else:
        outcome, text = "error", f"the process that ran the test died, status {ended[1]}"

    made = {"candidate": 0, "torch": 0}
    ranks = set()
    if os.path.exists(job["env"]["DDP_CONFORM_TRACE"]):
        with open(job["env"]["DDP_CONFORM_TRACE"]) as file:
            for line in file:
                kind, pid = line.split()
                made[kind] += 1
                ranks.add(pid)
    record = {
        "id": test["id"],
        "world_size": world_size,
        "outcome": outcome,
        "reason": first_line(text) if outcome != "pass" else "",
        "seconds": round(seconds, 2),
        "constructed": made["candidate"],
        "constructed_torch_ddp": made["torch"],
        "processes": len(ranks),
    }
    if options.logs and outcome in ("fail", "error"):
        os.makedirs(options.logs, exist_ok=True)
        name = re.sub(r"\W+", "_", test["id"])
        with open(os.path.join(options.logs, f"{name}.{outcome}.txt"), "w") as out:
            out.write(text + "\n\n======== output ========\n")
            if os.path.exists(job["log"]):
                with open(job["log"], errors="replace") as file:
                    shutil.copyfileobj(file, out)
    shutil.rmtree(folder, ignore_errors=True)
    return record


def list_tests(options, suite):
    """The tests of a suite with the world size each needs, and the loaded server."""
    server = Server(options, suite, options.world_size)
    if isinstance(server.tests, dict):
        print(f"cannot load suite {suite}:\n{server.tests['error']}", file=sys.stderr)
        server.close()
        return [], None
    tests = []
    for test in server.tests:
        if test["ddp"] if options.backend else not (test["ddp"] or options.all):
            continue
        test["suite"] = suite
        test["id"] = f"{suite}::{test['case']}.{test['test']}"
        needs = re.search(r"world size of (\d+)", test["skip"] or "")
        gpus = test["gpus"] if suite == "dist" else 0
        test["world_size"] = int(needs.group(1)) if needs else max(options.world_size, gpus)
        if re.search(options.select, test["id"]) and test["world_size"] <= options.max_world_size:
            tests.append(test)
    tests.sort(key=lambda t: t["world_size"])
    return tests, server


class Run:
    """Hands tests out to --jobs threads and collects the records."""

    def __init__(self, options, suites):
        self.options = options
        self.suites = list(suites)
        self.queue = []
        self.idle = []  # servers, kept for the thread that next needs one like it
        self.records = []
        self.unloaded = []
        self.lock = threading.Lock()
        self.listing = threading.Lock()

    def next_test(self, key):
        """Prefers a test for the server the caller has; lists a suite if none is left."""
        while True:
            with self.lock:
                mine = [t for t in self.queue if (t["suite"], t["world_size"]) == key]
                if mine or self.queue:
                    test = (mine or self.queue)[0]
                    self.queue.remove(test)
                    return test
            with self.listing:
                with self.lock:
                    if self.queue:
                        continue
                    if not self.suites:
                        return None
                    suite = self.suites.pop(0)
                tests, server = list_tests(self.options, suite)
                with self.lock:
                    self.queue.extend(tests)
                    if server is None:
                        self.unloaded.append(suite)
                    elif self.options.start == "fork":
                        self.idle.append(server)
                    else:
                        server.close()

    def server_for(self, key):
        with self.lock:
            for server in self.idle:
                if server.key == key:
                    self.idle.remove(server)
                    return server
        return Server(self.options, *key)

    def work(self):
        server = None
        while (test := self.next_test(server and server.key)) is not None:
            key = (test["suite"], test["world_size"])
            if server is not None and server.key != key:
                server.close()
                server = None
            record = None
            judged = self.options.judged is None or test["id"] in self.options.judged
            for attempt in range(1 + judged * self.options.retries):
                if record and record["outcome"] in ("pass", "skip"):
                    break
                if self.options.start == "fork" and server is None:
                    server = self.server_for(key)
                record = run_test(self.options, server, test)
                record["attempts"] = attempt + 1
                if record["reason"].startswith("lost: "):
                    server.close()
                    server = None
            with self.lock:
                self.records.append(record)
                self.show(record)
        if server is not None:
            server.close()

    def show(self, record):
        left = len(self.queue)
        note = f"  {record['reason'][:110]}" if record["outcome"] in ("fail", "error") else ""
        print(
            f"{record['outcome'].upper():5s} {record['seconds']:6.1f}s {record['id']}"
            f" [ws {record['world_size']}; {left} queued]{note}",
            flush=True,
        )

    def go(self):
        # Daemons: so that an interrupt ends the run.  Servers go when their pipe closes.
        threads = [
            threading.Thread(target=self.work, daemon=True) for _ in range(self.options.jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for server in self.idle:
            server.close()
        self.records.sort(key=lambda r: r["id"])


def main():
    options = parse()
    if options.list:
        return show_list(options)
    report = run_suites(options)
    if options.json:
        with open(options.json, "w") as out:
            json.dump(report, out, indent=1)
    lost = show(report)
    print(f"\n{options.ddp}: {report['seconds']:.0f} s\n{report['summary']}")
    return 1 if lost or report["suites_not_loaded"] else 0


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ddp", default=TORCH_DDP, metavar="MODULE:CLASS")
    parser.add_argument("--select", default="", metavar="REGEX", help="on suite::Case.test")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each test")
    parser.add_argument(
        "--retries", type=int, default=1, help="for a test that fails; default: %(default)s"
    )
    parser.add_argument("--json", metavar="OUT")
    parser.add_argument("--torch-tests", metavar="DIR", help="a checkout's test/distributed")
    parser.add_argument("--suites", default=",".join(SUITES), help="default: %(default)s")
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--max-world-size", type=int, default=4)
    parser.add_argument("--cpu-shim", action="store_true", help="run GPU tests on the CPU")
    parser.add_argument(
        "--run-disabled", action="store_true", help="run tests PyTorch has switched off"
    )
    parser.add_argument(
        "--backend",
        choices=("gloo", "gradsync"),
        help="the tests of collectives and groups, not of DDP: on torch's gloo, or on ours for it",
    )
    parser.add_argument("--all", action="store_true", help="also tests that name no DDP")
    parser.add_argument("--list", action="store_true", help="print the tests and stop")
    parser.add_argument("--logs", metavar="DIR", help="keep the output of failed tests")
    parser.add_argument("--load-timeout", type=float, default=120)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    if options.torch_tests:
        options.torch_tests = os.path.abspath(options.torch_tests)
    suites = [
        name for name in options.suites.split(",") if SUITES[name][1] is None or options.torch_tests
    ]
    # Do not load the other suites for a regex that begins with a suite's name.
    named = [name for name in suites if options.select.lstrip("^").startswith(name + "::")]
    if "|" in options.select:
        named = []
    options.suites = named or suites
    options.judged = None  # or the ids of the tests worth another attempt when they fail
    return options


@contextlib.contextmanager
def work_folder(options):
    """Everything that a run writes goes there; a signal to end is an orderly exit."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="ddp_conform_", ignore_cleanup_errors=True) as folder:
        options.work = folder
        yield


def show_list(options):
    with work_folder(options):
        for suite in options.suites:
            tests, server = list_tests(options, suite)
            for test in tests:
                print(test["id"], f"[ws {test['world_size']}]", test["skip"] or "")
            if server is not None:
                server.close()
    return 0


def run_suites(options):
    """Runs the tests that the options ask for; returns the report, ready for JSON."""
    begin = time.monotonic()
    with work_folder(options):
        run = Run(options, options.suites)
        run.go()
    return {
        "ddp": options.ddp,
        "torch": importlib.metadata.version("torch"),
        "start": options.start,
        "jobs": options.jobs,
        "world_size": options.world_size,
        "cpu_shim": options.cpu_shim,
        "run_disabled": options.run_disabled,
        "seconds": round(time.monotonic() - begin, 1),
        "suites_not_loaded": run.unloaded,
        "summary": summary(run.records),
        "tests": run.records,
    }


def summary(records):
    count = dict.fromkeys(("pass", "fail", "skip", "error"), 0)
    for record in records:
        count[record["outcome"]] += 1
    line = f"{count['pass']} passed, {count['fail']} failed, {count['skip']} skipped"
    if count["error"]:
        line += f", {count['error']} errors (time-outs and crashes)"
    return line


def show(report):
    """Prints what needs a look; returns the records of the tests that failed."""
    tests = report["tests"]
    lost = [r for r in tests if r["outcome"] in ("fail", "error")]
    for record in lost:
        print(f"\n{record['outcome'].upper()} {record['id']}\n    {record['reason']}")
    passed = [r for r in tests if r["outcome"] == "pass"]
    for records, what in (
        ([r for r in passed if not r["constructed"]], f"passed without a {report['ddp']}"),
        ([r for r in passed if r["attempts"] > 1], "passed only when run again"),
        ([r for r in tests if r["constructed_torch_ddp"]], "constructed torch's own DDP"),
    ):
        if records:
            print(f"\n{len(records)} {what}:")
            print("".join(f"    {r['id']}\n" for r in records), end="")
    return lost


if __name__ == "__main__":
    sys.exit(main())
