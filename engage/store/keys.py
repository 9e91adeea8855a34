# SPDX-License-Identifier: Apache-2.0
"""Which strings can be stored, and short keys that stand for several of them."""

from __future__ import annotations

import hmac
from hashlib import blake2b, sha256
from typing import Final

import orjson

from engage.api import EngageError

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


def fingerprint(secret: str) -> str:
    """Return what names a secret without revealing it: the first 8 digits of its SHA-256."""
    return sha256(secret.encode(errors="surrogateescape")).hexdigest()[:8]


def hash_of(key: str, workspace_id: str, name: str) -> str:
    """Return the keyed hash of the id of a user or a visitor: HMAC-SHA256 (RFC 2104), hexadecimal.

    A user and a visitor with the same id have the same hash; the same ids of two workspaces do not.

    :raises EngageError: if the id is not Unicode text: nothing can have it.
    """
    try:
        message = orjson.dumps([workspace_id, name])
    except TypeError:
        raise EngageError("the id is not Unicode text") from None
    return hmac.digest(key.encode(), message, "sha256").hex()
