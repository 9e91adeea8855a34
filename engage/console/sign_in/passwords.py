# SPDX-License-Identifier: Apache-2.0
"""Passwords: their hashes, and how many guesses there may be."""

from __future__ import annotations

import asyncio
import base64
import collections
import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable
from typing import Final

from engage.http1.addresses import network_of

__all__ = ["Passwords", "Throttle", "hash_password", "is_password"]

#: The cost of scrypt: 32 MiB of memory, and about a quarter of a second.
LOG_N: Final = 15
R: Final = 8
P: Final = 3
#: Characters of a new password: eight are the least that guidelines accept.
MIN_LENGTH: Final = 8

#: Wrong passwords from one address within ``ADDRESS_SECONDS``, and from all within ``ALL_SECONDS``.
ADDRESS_FAILURES: Final = 5
ADDRESS_SECONDS: Final = 15 * 60.0
ALL_FAILURES: Final = 20
ALL_SECONDS: Final = 60.0
#: Addresses whose failures are remembered.
MAX_ADDRESSES: Final = 10_000


def hash_password(password: str) -> str:
    """Return the value for ``console.password``. It takes about a quarter of a second."""
    salt = secrets.token_bytes(16)
    hashed = _scrypt(password, salt, LOG_N, R, P)
    return f"scrypt${LOG_N}${R}${P}${_encoded(salt)}${_encoded(hashed)}"


def is_password(setting: str, password: str) -> bool:
    """Return whether a password has the hash ``console.password``."""
    _, log_n, r, p, salt, hashed = setting.split("$")
    derived = _scrypt(password, _decoded(salt), int(log_n), int(r), int(p))
    return hmac.compare_digest(_encoded(derived), hashed)


def _scrypt(password: str, salt: bytes, log_n: int, r: int, p: int) -> bytes:
    n = 2**log_n
    return hashlib.scrypt(
        password.encode(), salt=salt, n=n, r=r, p=p, dklen=32, maxmem=128 * r * (n + p + 16)
    )


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


class Passwords:
    """Checks passwords in a thread, one at a time, so that guesses do not use up the machine."""

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._turn = asyncio.Lock()

    async def check(self, password: str) -> bool:
        """Return whether a password is right. :class:`Throttle` bounds how many checks wait."""
        async with self._turn:
            return await asyncio.to_thread(is_password, self._setting, password)


class Throttle:
    """Counts wrong passwords, and refuses more of them for a while.

    This locks no one out: a one-time link always works.

    :param clock: seconds that only go forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of_address: collections.OrderedDict[str, collections.deque[float]] = (
            collections.OrderedDict()
        )
        self._all: collections.deque[float] = collections.deque(maxlen=ALL_FAILURES)

    def wait(self, address: str) -> int:
        """Return the seconds until a password from an address is checked; 0 means now."""
        now = self._clock()
        waits = [0.0]
        mine = self._of_address.get(network_of(address))
        if mine is not None and len(mine) == ADDRESS_FAILURES:
            waits.append(mine[0] + ADDRESS_SECONDS - now)
        if len(self._all) == ALL_FAILURES:
            waits.append(self._all[0] + ALL_SECONDS - now)
        return math.ceil(max(waits))

    def failed(self, address: str) -> None:
        """Count a guess. Call it before the check, so that guesses sent together all count."""
        now = self._clock()
        network = network_of(address)
        mine = self._of_address.setdefault(network, collections.deque(maxlen=ADDRESS_FAILURES))
        self._of_address.move_to_end(network)
        mine.append(now)
        self._all.append(now)
        while len(self._of_address) > MAX_ADDRESSES:
            self._of_address.popitem(last=False)

    def succeeded(self, address: str) -> None:
        """Forget the guesses of an address, whose last one was right."""
        self._of_address.pop(network_of(address), None)
        if self._all:
            self._all.pop()
