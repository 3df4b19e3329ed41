#!/usr/bin/env python3
"""Runs PyTorch's own DDP tests on our class and judges them by a list that only grows.

    check.py                    every test in expected.json passes, or the exit code is 1
    check.py --update           writes what passes to expected.json
    check.py --select REGEX     only some of the tests, on suite::Case.test

The tests and their runner are those of run_conformance.py; baseline.json tells which of
them torch's own class passes under the same conditions.
"""

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

import run_conformance

HERE = Path(__file__).resolve().parent
OURS = "gradsync:DistributedDataParallel"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A run held against the list of tests that must pass."""

    passing: list[str]  # on the candidate, and on it alone
    lost: dict[str, str]  # listed, but not passing: id -> reason
    beyond: list[str]  # passing, but not listed
    missing: dict[str, str]  # passing for torch's class, but not here: id -> reason


def main():
    options = parse_arguments()
    listed = selected(json.loads(options.expected.read_text())["must_pass"], options.select)
    baseline = selected(passed_by_torch(), options.select)
    report = run_tests(options, listed)
    if report["suites_not_loaded"]:
        print(f"not every suite could be loaded: {report['suites_not_loaded']}")
        return 1
    verdict = judge(report["tests"], listed, baseline)
    show(verdict, listed, report, options)
    if options.update:
        write_expected(options.expected, report["torch"], verdict.passing)
        return 0
    return 1 if verdict.lost else 0


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ddp", default=OURS, metavar="MODULE:CLASS", help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="tests side by side")
    parser.add_argument("--select", default="", metavar="REGEX")
    parser.add_argument("--logs", metavar="DIR", help="keep the output of failed tests there")
    parser.add_argument("--update", action="store_true", help="write what passes to the list")
    parser.add_argument("--expected", type=Path, default=HERE / "expected.json", metavar="JSON")
    options = parser.parse_args()
    if options.update and options.select:
        parser.error("--update writes the whole list, so it needs the whole run: drop --select")
    return options


def run_tests(options, listed):
    arguments = ["--ddp", options.ddp, "--suites", "dist,rpc", "--cpu-shim", "--run-disabled"]
    # The slowest test takes 16 s with torch's class; what takes a minute has hung.
    arguments += ["--jobs", str(options.jobs), "--timeout", "60", "--select", options.select]
    if options.logs:
        arguments += ["--logs", options.logs]
    run = run_conformance.parse(arguments)
    run.judged = listed  # only these are run again when they fail
    return run_conformance.run_suites(run)


def passed_by_torch():
    """The tests that torch's own class passes and that construct a DDP."""
    tests = json.loads((HERE / "baseline.json").read_text())["tests"]
    return {test["id"] for test in tests if test["outcome"] == "pass" and test["constructed"]}


def selected(ids, regex):
    return {id_ for id_ in ids if re.search(regex, id_)}


def judge(records, listed, baseline):
    reasons = {record["id"]: why_not(record) for record in records}
    passing = sorted(id_ for id_, reason in reasons.items() if reason is None)

    def failing(ids):
        return {
            id_: reasons.get(id_) or "no such test in this run"
            for id_ in sorted(ids)
            if reasons.get(id_, "") is not None
        }

    return Verdict(
        passing=passing,
        lost=failing(listed),
        beyond=[id_ for id_ in passing if id_ not in listed],
        missing=failing(baseline - listed),
    )


def why_not(record):
    """Why a test does not count as passed on the candidate; None if it does."""
    if record["outcome"] != "pass":
        return f"{record['outcome']}: {record['reason']}"
    if record["constructed_torch_ddp"]:
        return "passes, but with torch's own class"
    if not record["constructed"]:
        return "passes, but without constructing a DDP"
    return None


def show(verdict, listed, report, options):
    print(f"\n{options.ddp}: {report['summary']} in {report['seconds']:.0f} s")
    print(f"{len(verdict.passing)} passed on this class, and on no other")
    if verdict.missing:
        print(f"\n{len(verdict.missing)} not on the list pass for torch's class and not here:")
        print_reasons(verdict.missing)
    if verdict.beyond and not options.update:
        print(
            f"\n{len(verdict.beyond)} pass beyond the list (`make conformance-update` adds them):"
        )
        print("".join(f"  {id_}\n" for id_ in verdict.beyond), end="")
    if verdict.lost:
        fate = "taken off the list" if options.update else "that must pass fail"
        print(f"\n{len(verdict.lost)} {fate}:")
        print_reasons(verdict.lost)
    elif not options.update:
        print("\nevery test on the list passes" if listed else "\nno test is on the list")


def print_reasons(reasons):
    for id_, reason in reasons.items():
        print(f"  {id_}\n      {reason[:200]}")


def write_expected(path, torch_version, passing):
    content = {"torch": torch_version.partition("+")[0], "must_pass": passing}
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"\n{path.name}: {len(passing)} tests must pass from now on")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
