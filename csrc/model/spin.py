"""Runs spin on protocol.pml: all scenarios, for 2 and 3 ranks, and mistakes that it has to find.

Needs spin (`apt-get install spin`) and a C compiler. `--quick`: 2 ranks only.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = Path(__file__).with_name("protocol.pml").resolve()
SCENARIOS = {
    1: "small ones",
    2: "small, through slots, scatter",
    3: "exchange, scatter, small",
    4: "in place",
    5: "disagreement, through slots, scatter",
    6: "in place, then small",
}
MISTAKES = {  # and what they are found in
    "ONE_SLOT": {"SCENARIO": 1},
    "ONE_TURN_MORE": {"SCENARIO": 2},
    "NO_WAKE": {"SCENARIO": 1, "STAYS": 1},
    "NO_RECHECK": {"SCENARIO": 1, "STAYS": 1},
    "NO_LOOK": {"SCENARIO": 1, "VICTIM": 0, "for_ever": True},
    "CLOCK_FIRST": {"SCENARIO": 1, "VICTIM": 0},
    "TAKEN_TWICE": {"SCENARIO": 4},
    "COUNT_TAKEN": {"SCENARIO": 4},
    "NO_BEGIN": {"SCENARIO": 6, "VICTIM": 0},
    "NO_SECOND_LOOK": {"SCENARIO": 4},
    "DEAF": {"SCENARIO": 1, "ABORTER": 0, "ABSENT": 2},
}


def check(folder: str, *, for_ever: bool = False, **defines: int) -> tuple[int, int]:
    """Errors, and states visited. ``for_ever``: looks for ranks that never end instead."""
    flags = [f"-D{name}={value}" for name, value in defines.items()]
    run = {"cwd": folder, "check": True, "capture_output": True, "text": True}
    subprocess.run(["spin", "-a", *flags, str(MODEL)], **run)
    kind = "-DNP" if for_ever else "-DSAFETY"
    limits = ["-DMEMLIM=6144", "-DVECTORSZ=2048", "-DCOLLAPSE"]
    subprocess.run(["gcc", "-O1", "-w", kind, *limits, "-o", "pan", "pan.c"], **run)
    run["check"] = False
    output = subprocess.run(["./pan", "-m2000000", *(["-l"] if for_ever else [])], **run).stdout
    errors = re.search(r"errors: (\d+)", output)
    states = re.search(r"(\d+) states, stored", output)
    is_cut = "max search depth too small" in output or "out of memory" in output
    if not errors or not states or is_cut:
        raise RuntimeError(output)
    return int(errors[1]), int(states[1])


def main(arguments: list[str]) -> int:
    if shutil.which("spin") is None:
        print("skipped: there is no spin here (on Debian: apt-get install spin)")
        return 0
    worlds = (2,) if "--quick" in arguments else (2, 3)
    total, wrong, began = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for world in worlds:
            for scenario, name in SCENARIOS.items():
                ways = {
                    "all leave": {},
                    "all stay": {"STAYS": 1},
                    "rank 0 may die": {"VICTIM": 0},
                    "rank 0 aborts, the last is absent": {"ABORTER": 0, "ABSENT": world - 1},
                }
                for way, defines in ways.items():
                    errors, states = check(folder, N=world, SCENARIO=scenario, **defines)
                    if "VICTIM" in defines and world == 2:
                        errors += check(folder, N=2, SCENARIO=scenario, for_ever=True, **defines)[0]
                    total, wrong = total + states, wrong + errors
                    verdict = "ERROR" if errors else "ok"
                    print(f"{verdict}: {world} ranks, {name}, {way}: {states} states", flush=True)
            for mistake, defines in MISTAKES.items():
                if defines.get("ABSENT", 0) >= world:  # it takes a third
                    continue
                errors, _ = check(folder, N=world, **{mistake: 1}, **defines)
                wrong += not errors
                print(f"{'found' if errors else 'NOT FOUND'}: {world} ranks, {mistake}", flush=True)
    print(f"spin: {total} states, {wrong} errors, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
