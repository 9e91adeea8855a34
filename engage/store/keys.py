# SPDX-License-Identifier: Apache-2.0
"""Which strings can be stored, and short keys that stand for several of them."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

#: Length of a key.
KEY_BYTES: Final = 16


def is_text(*values: str) -> bool:
    """Return whether strings can be stored: one with a lone surrogate cannot."""
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        return False
    return True


def key_of(*parts: str) -> bytes:
    """Return 16 bytes that identify these strings: different strings give different bytes.

    :raises UnicodeEncodeError: if a string contains a lone surrogate.
    """
    digest = blake2b(digest_size=KEY_BYTES)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.digest()
