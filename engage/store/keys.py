# SPDX-License-Identifier: Apache-2.0
"""Short keys that stand for several strings."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

#: Length of a key.
KEY_BYTES: Final = 16


def key_of(*parts: str) -> bytes:
    """Return 16 bytes that identify these strings: different strings give different bytes.

    :raises UnicodeEncodeError: if a string contains a lone surrogate.
    """
    digest = blake2b(digest_size=KEY_BYTES)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.digest()
