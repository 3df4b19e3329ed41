"""Builds the native part. Everything else about the package is in pyproject.toml."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile("GRADSYNC_BUILD_JOBS", default=0).install()

setup(
    ext_modules=[
        Pybind11Extension(
            "gradsync.backend._native",
            sorted(glob("csrc/*.cc") + glob("csrc/python/*.cc")),
            include_dirs=["csrc"],
            depends=sorted(glob("csrc/*.h") + glob("csrc/*.inl") + glob("csrc/python/*.h")),
            cxx_std=17,
            # The same numbers on every machine: no fused multiply-add where it happens to exist.
            extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread"],
            extra_link_args=["-pthread"],
        )
    ]
)
