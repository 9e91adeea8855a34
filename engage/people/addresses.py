# SPDX-License-Identifier: Apache-2.0
"""The addresses of a person: those that an operator names, and those in a delivery.

An address stands here for the anonymous id that its events have if no user has it:
``email:ann@example.com`` or ``phone:+4912345``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import parse_qsl

from engage.api import EngageError, identifier_value

__all__ = ["addresses_in", "named_addresses"]

#: A whole e-mail address or phone number, also in ``Name <address>`` and after ``whatsapp:``.
_ADDRESS: Final = re.compile(
    r"(?:[^<>]*<)?\s*(?:[A-Za-z]+:)?"
    r"(?:(?P<email>[^\s@<>,;\"]+@[^\s@<>,;\"]+)|(?P<phone>\+?[0-9(][0-9 ()./-]*))>?"
)
#: A string in JSON.
_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def named_addresses(texts: Iterable[str]) -> set[str]:
    """Return the addresses that an operator names.

    :param texts: e-mail addresses and phone numbers.
    :raises EngageError: if one is neither.
    """
    addresses = set()
    for text in texts:
        address = _address(text)
        if address is None:
            raise EngageError(f"{text!r} is neither an e-mail address nor a phone number")
        addresses.add(address)
    return addresses


def addresses_in(item: bytes) -> Iterator[str]:
    """Yield the addresses that are whole values in a delivery: JSON, also in a string of JSON or a
    field of a form. A delivery that was cut off may be a part of JSON."""
    text = item.decode("utf-8", "replace")
    form = () if _is_json(text) else parse_qsl(text)
    for value in [value for _, value in form] or [text]:
        for string in _strings(value):
            for inner in _strings(string):
                for part in re.split("[,;]", inner):
                    if (address := _address(part)) is not None:
                        yield address


def _strings(text: str) -> Iterator[str]:
    """Yield the strings in JSON, or a text that is none."""
    if not _is_json(text):
        yield text
        return
    for match in _STRING.finditer(text):
        try:
            yield json.loads(match[0], strict=False)
        except ValueError:
            continue


def _is_json(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[")


def _address(text: str) -> str | None:
    match = _ADDRESS.fullmatch(text.strip())
    kind = None if match is None else match.lastgroup
    value = None if match is None or kind is None else identifier_value(kind, match[kind])
    return None if value is None else f"{kind}:{value}"
