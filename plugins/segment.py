# SPDX-License-Identifier: Apache-2.0
"""Segment's webhook destinations: their events already have the form that engage stores.

If the body is an array, Segment signs only its first element. Arrays are therefore refused, unless
the option ``allow_batch`` accepts that nothing proves that the other elements come from Segment.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from engage.api import (
    EVENT_TYPES,
    NothingSigned,
    PayloadInvalid,
    ProviderContext,
    SignatureMismatch,
    Signing,
    TranslatedEvent,
    Translation,
    WebhookRequest,
)
from engage.webhooks import (
    ElementIds,
    SecretProvider,
    at,
    check_hmac,
    content_id,
    decode_hex,
    message_id,
    one_header,
    parse_json,
    registration,
    text,
    translated,
)

#: The number of bytes that are searched for the first element: the sender is not verified yet.
#: Segment's events have at most 32 KiB.
MAX_ELEMENT: Final = 128 * 1024
#: A string matches even if it does not end. Otherwise each quote inside it would start a search for
#: the end, which takes hours for a megabyte of ``\\"``.
_TOKENS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


class Segment(SecretProvider):
    """Deliveries of one Segment destination."""

    setup = (
        "1. Choose a long random secret, enter it in the option secret, and restart engage.\n"
        "2. Segment > Destinations > Webhooks (Actions): enter the URL, and the secret as\n"
        "   shared secret. Leave batching off: of a batch only the first event is signed (see\n"
        "   the option allow_batch)."
    )

    signing = Signing(signature="x-signature", body=True)

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        super().__init__(options, context)
        self._allow_batch = options.get("allow_batch", False)

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """Check HMAC-SHA1 over the body, or over the first element of an array."""
        signed = request.body
        if signed.lstrip()[:1] == b"[":
            if not self._allow_batch:
                raise SignatureMismatch("an array: only its first element is signed")
            signed = first_element(signed)
        check_hmac(
            self.keys, signed, [decode_hex(one_header(request, "x-signature"))], algorithm="sha1"
        )

    def translate(self, request: WebhookRequest) -> Translation:
        """Return the events as they are, and who is to be deleted; ignore other types."""
        payload = parse_json(request.body)
        erasures: list[str] = []
        elements = payload if isinstance(payload, list) else [payload]
        ids = ElementIds(elements)

        def event(item: Any, index: int) -> TranslatedEvent | Literal["ignored", "unknown"]:
            if not isinstance(item, dict):
                raise PayloadInvalid("is not an object")
            kind = item.get("type")
            if not isinstance(kind, str):
                raise PayloadInvalid("type: required")
            if kind.lower() == "delete":
                if isinstance(item.get("userId"), str):
                    erasures.append(item["userId"])
                return "ignored"
            if kind.lower() not in EVENT_TYPES:
                return "unknown"
            document = {**item, "type": kind.lower()}
            timed = item.get("timestamp") or item.get("originalTimestamp")
            document["messageId"] = message_id(item.get("messageId")) or (
                content_id(item) if timed else ids(index)
            )
            return TranslatedEvent(document, index=index)

        result = translated(elements, event, (text(at(item, "type")) for item in elements))
        if result.rejected and not result.events and not result.ignored:
            raise PayloadInvalid(f"no element is an event; the first {result.rejected[0].message}")
        return dataclasses.replace(result, erasures=erasures)


def first_element(array: bytes) -> bytes:
    """Return the bytes of the first element of a JSON array.

    The array is not parsed: parsing and printing would not give the bytes that were signed, and the
    text of an unverified sender must not cost a megabyte of objects.

    :raises NothingSigned: if the array is empty.
    :raises SignatureMismatch: if its first element is not an object, or does not end.
    """
    start = array[: MAX_ELEMENT + 1].lstrip()[1:]
    if start.lstrip()[:1] == b"]":
        raise NothingSigned("the array is empty, so nothing in it is signed")
    if start[:1] != b"{":
        raise SignatureMismatch("the first element is not an object")
    depth = 0
    for token in _TOKENS.finditer(start):
        sign = token[0][:1]
        if sign in b"[{":
            depth += 1
        elif sign in b"]}":
            depth -= 1
            if depth == 0:
                return start[: token.end()]
    raise SignatureMismatch("the first element does not end")


engage_register_webhook = registration("segment", Segment)
