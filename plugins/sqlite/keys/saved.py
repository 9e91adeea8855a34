# SPDX-License-Identifier: Apache-2.0
"""A file beside the store that makes opening it faster: the filter, and the keys in memory.

It is written when the store is closed. It can be deleted at any time, and is only used if it was
written for exactly the state that the store has.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import orjson

#: Length of the checksum, with which the file begins.
_DIGEST_BYTES: Final = 32


def write(path: str, head: Mapping[str, Any], parts: Sequence[bytes]) -> None:
    """Write a file in one step; only its owner can read it.

    :param head: JSON values by name, except ``sizes``.
    :param parts: the rest of the content, of any length.
    :raises OSError: if it cannot be written.
    """
    sizes = [len(part) for part in parts]
    content = [orjson.dumps({**head, "sizes": sizes}), b"\n", *parts]
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(_checksum(content))
            file.writelines(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read(path: str) -> tuple[dict[str, Any], list[bytes]] | None:
    """Return what :func:`write` was given, or ``None`` if it is missing or damaged."""
    try:
        with open(path, "rb") as file:
            checksum, content = file.read(_DIGEST_BYTES), file.read()
    except OSError:
        return None
    if checksum != _checksum([content]):
        return None
    start = content.index(b"\n") + 1
    head = orjson.loads(content[:start])
    parts = []
    for size in head.pop("sizes"):
        parts.append(content[start : start + size])
        start += size
    return head, parts


def _checksum(content: Iterable[bytes]) -> bytes:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in content:
        digest.update(part)
    return digest.digest()
