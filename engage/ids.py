# SPDX-License-Identifier: Apache-2.0
"""Message ids that the server makes.

They ascend in the order in which the items arrived. Of two events with the same time, the one with
the greater message id wins, so that of two items without times and ids the later one wins.
"""

from __future__ import annotations

import os
import uuid
from typing import Final

__all__ = ["AscendingIds", "idempotent_id", "uuid7"]

#: Namespace of the message ids that are made from an ``Idempotency-Key``.
_IDEMPOTENCY_NAMESPACE: Final = uuid.UUID("6c1f8a0e-52d5-5a53-9d0b-3b6f2f1d7c11")

#: The bits of a UUIDv7 that are neither time, nor version, nor variant.
_RANDOM_BITS: Final = 74
#: How far 80 random bits are shifted: for the first id of a millisecond, and for a step of 48 bits.
_FIRST_SHIFT: Final = 80 - (_RANDOM_BITS - 1)
_STEP_SHIFT: Final = 80 - 48
_LOW: Final = (1 << 62) - 1


class AscendingIds:
    """Makes UUIDs of version 7, each greater than the one before (RFC 9562, section 6.2, method 2).

    They also ascend when the clock goes back; they then have the latest time that was seen. The
    steps are random, so that a client that knows one id cannot guess the next: it could send an
    event with that id first.
    """

    __slots__ = ("_random", "_time")

    def __init__(self) -> None:
        #: The time and the random bits of the last id.
        self._time = 0
        self._random = 0

    def __call__(self, milliseconds: int) -> str:
        """Return a new id.

        :param milliseconds: the current time since 1970 UTC.
        """
        random = int.from_bytes(os.urandom(10), "big")
        time = milliseconds & 0xFFFFFFFFFFFF
        if time > self._time:
            self._time = time
            # The highest random bit is 0: there is room for a million ids before the time changes.
            random >>= _FIRST_SHIFT
        else:
            time = self._time
            random = self._random + 1 + (random >> _STEP_SHIFT)
            if random >> _RANDOM_BITS:
                time = self._time = time + 1
                random &= _LOW
        self._random = random
        value = (time << 16 | 0x7000 | random >> 62) << 64 | 0x2 << 62 | random & _LOW
        text = f"{value:032x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


#: The ids of this process.
uuid7: Final = AscendingIds()


def idempotent_id(workspace_id: str, key: str, index: int) -> str:
    """Return the message id of an item whose request has an ``Idempotency-Key``.

    It is the same when the request is sent again, and ascends with the item's index.

    :param index: the item's index in its batch; 0 for a single event.
    """
    # With their lengths, different parts never make the same name.
    name = f"{len(workspace_id)}:{workspace_id}{len(key)}:{key}0"
    return str(uuid.UUID(int=uuid.uuid5(_IDEMPOTENCY_NAMESPACE, name).int + index))
