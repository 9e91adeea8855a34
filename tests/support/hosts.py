# SPDX-License-Identifier: Apache-2.0
"""Separate hosts on this machine: network namespaces, connected by a bridge.

A process in such a host reaches this machine at :attr:`Network.address`, and is reached at
:attr:`Host.address`. A host that is cut off is like one whose cable was pulled: what is sent to it
or by it disappears, and connections stay open until one side gives up waiting.

Needs root on Linux, as in CI.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from support.processes import alive

_CLONE_NEWNET: Final = 0x40000000
_NAME: Final = re.compile(r"engage(\d+)-\d+")


def _ip(*arguments: str) -> str:
    """Run ``ip``.

    :raises RuntimeError: if it fails; with what it printed.
    """
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def why_not() -> str | None:
    """Return why this machine cannot have such hosts; ``None``: it can."""
    if sys.platform != "linux":
        return "network namespaces are a feature of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (Debian: apt-get install iproute2)"
    try:
        with network(1):
            pass
    except RuntimeError as error:
        return f"network namespaces cannot be made here: {error}"
    return None


class Host:
    """A network namespace."""

    def __init__(self, name: str, address: str, link: str) -> None:
        #: The name of the namespace.
        self.name = name
        #: Where it is reached.
        self.address = address
        self._link = link
        self._libc = ctypes.CDLL(None, use_errno=True)

    def enter(self) -> None:
        """Move this process into the host; for ``preexec_fn``."""
        file = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        if self._libc.setns(file, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)

    def cut(self) -> None:
        """Cut it off."""
        _ip("link", "set", self._link, "down")

    def connect(self) -> None:
        """Connect it again."""
        _ip("link", "set", self._link, "up")


class Network:
    """A bridge on this machine, with hosts; see :func:`network`."""

    def __init__(self, address: str, hosts: list[Host]) -> None:
        #: The address at which the hosts reach this machine.
        self.address = address
        self.hosts = hosts


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """Have some hosts.

    :raises RuntimeError: if they cannot be made.
    """
    _remove_those_of_dead_processes()
    pid = os.getpid()
    # The addresses for measurements (RFC 2544), which no network uses.
    subnet = f"198.{random.choice((18, 19))}.{random.randrange(256)}"
    bridge = f"engbr{pid}"
    with contextlib.ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        hosts = []
        for number in range(count):
            name, link = f"engage{pid}-{number}", f"eng{pid}v{number}"
            address = f"{subnet}.{10 + number}"
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            stack.callback(_delete_link, link)
            _ip("link", "set", link, "master", bridge, "up")
            for arguments in (
                ("link", "set", "lo", "up"),
                ("addr", "add", f"{address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
            ):
                _ip("-n", name, *arguments)
            hosts.append(Host(name, address, link))
        yield Network(f"{subnet}.1", hosts)


def _delete_link(link: str) -> None:
    # It disappears with the namespace of its peer, which may have happened already.
    with contextlib.suppress(RuntimeError):
        _ip("link", "del", link)


def _remove_those_of_dead_processes() -> None:
    for line in _ip("netns", "list").splitlines():
        match = _NAME.match(line)
        if match is not None and not alive(int(match[1])):
            with contextlib.suppress(RuntimeError):
                _ip("netns", "del", match[0])
            with contextlib.suppress(RuntimeError):
                _ip("link", "del", f"engbr{match[1]}")
