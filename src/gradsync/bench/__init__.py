"""Measure data-parallel training, and compare two runs honestly.

``gradsync bench``, ``bench-comm``, ``diff`` and ``report`` are its face; docs/bench.md tells how to
use them. A program needs one name, to add a workload of its own: ``Benchmark``.
"""

from gradsync.bench.workloads import Benchmark

__all__ = ["Benchmark"]
