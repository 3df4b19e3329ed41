"""Forbid this process a system call, as containers do."""

from __future__ import annotations

import ctypes
import platform
import struct

import pytest

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_ALLOW = 0x7FFF0000
SECCOMP_RET_ERRNO = 0x00050000
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # classic BPF
NUMBERS = {
    "x86_64": {"memfd_create": 319, "fallocate": 285, "pidfd_open": 434},
    "aarch64": {"memfd_create": 279, "fallocate": 47, "pidfd_open": 434},
}


def is_supported() -> bool:
    return platform.machine() in NUMBERS


needed = pytest.mark.skipif(
    not is_supported(), reason="the numbers of system calls are not known here"
)


def forbid(call: str, errno: int) -> None:
    """From now on ``call`` fails with ``errno``; there is no way back."""
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (LOAD_WORD, 0, 0, 0),  # the number of the system call
            (JUMP_IF_EQUAL, 0, 1, NUMBERS[platform.machine()][call]),
            (RETURN, 0, 0, SECCOMP_RET_ERRNO | errno),
            (RETURN, 0, 0, SECCOMP_RET_ALLOW),
        )
    )
    code = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    pointer = ctypes.create_string_buffer(fprog, len(fprog))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(pointer)), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
