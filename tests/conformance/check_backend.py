#!/usr/bin/env python3
"""Runs PyTorch's own tests of collectives and groups on our backend in gloo's place.

    check_backend.py             every test in expected_backend.json passes, or the exit code is 1
    check_backend.py --update    runs all of them and writes those that pass to the list

They are those of ``DistributedTest`` that name no DDP, for gloo on the CPU, with four ranks. A test
counts only if it has made groups of ours. ``exceptions`` in the list tells why others do not pass.

What PyTorch skips on gloo too is on neither list. Of what concerns a CPU that is
``test_barrier_timeout_global``, which wants its ranks to meet in a file, and
``test_SyncBatchNorm_process_group``, which wants torchvision.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import check
import run_conformance

EXPECTED = Path(__file__).resolve().parent / "expected_backend.json"


def main():
    options = parse_arguments()
    expected = json.loads(EXPECTED.read_text())
    listed = check.selected(expected["must_pass"], options.select)
    report = run_tests(options, listed)
    if report["suites_not_loaded"]:
        print(f"not every suite could be loaded: {report['suites_not_loaded']}")
        return 1
    verdict = check.judge(report["tests"], listed, set())
    print(f"\nour backend in gloo's place: {report['summary']} in {report['seconds']:.0f} s")
    if verdict.lost:
        print(f"\n{len(verdict.lost)} on the list do not pass:")
        check.print_reasons(verdict.lost)
    if options.update:
        return update(expected, report, verdict)
    if not verdict.lost:
        print("every test on the list passes")
    return 1 if verdict.lost else 0


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="tests side by side")
    parser.add_argument("--select", default="", metavar="REGEX", help="on suite::Case.test")
    parser.add_argument("--logs", metavar="DIR", help="keep the output of failed tests there")
    parser.add_argument("--update", action="store_true", help="write what passes to the list")
    options = parser.parse_args()
    if options.update and options.select:
        parser.error("--update writes the whole list, so it needs the whole run: drop --select")
    return options


def run_tests(options, listed):
    arguments = ["--backend", "gradsync", "--suites", "dist", "--cpu-shim", "--run-disabled"]
    arguments += ["--world-size", "4", "--timeout", "40", "--jobs", str(options.jobs)]
    if not options.update:
        arguments += ["--select", f"^({'|'.join(map(re.escape, sorted(listed)))})$"]
    if options.logs:
        arguments += ["--logs", options.logs]
    run = run_conformance.parse(arguments)
    run.judged = listed  # only these are run again when they fail
    return run_conformance.run_suites(run)


def update(expected, report, verdict):
    """Write the list; every test that ran and failed needs a reason beside it."""
    failed = {r["id"] for r in report["tests"] if r["outcome"] in ("fail", "error")}
    exceptions = {id_: expected["exceptions"].get(id_, "") for id_ in sorted(failed)}
    content = {
        "torch": report["torch"].partition("+")[0],
        "must_pass": verdict.passing,
        "exceptions": exceptions,
    }
    EXPECTED.write_text(json.dumps(content, indent=2) + "\n")
    print(f"\n{EXPECTED.name}: {len(verdict.passing)} tests must pass from now on")
    unexplained = [id_ for id_, reason in exceptions.items() if not reason]
    if unexplained:
        print("tell in the list why these do not pass: " + ", ".join(unexplained))
    return 1 if unexplained else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
