"""Hosts on one machine: network namespaces, joined by a bridge. Needs root and iproute2."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CLONE_NEWNET = 0x40000000


def reason_against() -> str:
    """Why there can be no namespaces here; nothing if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (Debian: iproute2)"
    try:
        with hosts(1):
            pass
    except OSError as error:
        return f"this kernel does not allow network namespaces: {error}"
    return ""


class Host:
    """One namespace, with an address on the common network."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def enter(self) -> None:
        """Move this thread, and what it starts, there."""
        descriptor = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)

    def unplug(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        ip("-n", self.name, "link", "set", "eth0", "down")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Namespaces that exist for the ``with`` block."""
    stem = f"gradsync{os.getpid()}"
    switch = f"{stem}-switch"
    made = [Host(f"{stem}-{at}", f"10.77.0.{at + 1}") for at in range(count)]
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for at, host in enumerate(made):
            ip("netns", "add", host.name)
            peer = ["peer", "name", f"port{at}", "netns", switch]
            ip("-n", host.name, "link", "add", "eth0", "type", "veth", *peer)
            ip("-n", switch, "link", "set", f"port{at}", "master", "bridge", "up")
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.name, "link", "set", "lo", "up")
            ip("-n", host.name, "link", "set", "eth0", "up")
        yield made
    finally:
        for name in (*(host.name for host in made), switch):
            with suppress(OSError):
                ip("netns", "delete", name)


def sent_bytes() -> int:
    """What the host that this process is on has sent over the network so far."""
    shown = ip("-s", "-j", "link", "show", "eth0")
    return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
