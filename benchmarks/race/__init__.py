"""The parts of `step_race.py`: workloads, contenders, track, statistics, report, memory."""
