# SPDX-License-Identifier: Apache-2.0
"""Segment's webhook destinations: events that are in our form already.

Segment signs an array only in its first element, so arrays are refused unless the option
``allow_batch`` accepts that the others are not proven to come from Segment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from engage.api import (
    EVENT_TYPES,
    NothingSigned,
    PayloadInvalid,
    ProviderContext,
    ProviderFactory,
    Register,
    Rejected,
    SignatureMismatch,
    Signing,
    TranslatedEvent,
    Translation,
    WebhookRequest,
    hookimpl,
)
from engage.webhooks import (
    SecretProvider,
    check_hmac,
    content_id,
    decode_hex,
    message_id,
    one_header,
    options_schema,
    parse_json,
)

#: The first element of an array is looked for in so many bytes: nothing is known of the sender yet.
MAX_ELEMENT: Final = 1024 * 1024
#: A string also where it does not end: to look for its end from each quote inside it anew would
#: take hours for a megabyte of ``\\"``.
_TOKENS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


class Segment(SecretProvider):
    """Deliveries of one Segment destination."""

    setup = (
        "Segment > Destinations > Webhooks (Actions): paste the URL as the webhook URL.\n"
        "Set its shared secret to the option secret.\n"
        "Leave batching off: of a batch only the first event is signed (see the option "
        "allow_batch)."
    )

    signing = Signing(signature="x-signature", body=True)

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        super().__init__(options, context)
        self._allow_batch = options.get("allow_batch", False)

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """HMAC-SHA1 over the body or, of an array, over its first element."""
        signed = request.body
        if signed.lstrip()[:1] == b"[":
            if not self._allow_batch:
                raise SignatureMismatch("an array, of which only the first element is signed")
            signed = first_element(signed)
        check_hmac(
            self.keys, signed, [decode_hex(one_header(request, "x-signature"))], algorithm="sha1"
        )

    def translate(self, request: WebhookRequest) -> Translation:
        """The events as they are; a ``delete`` and other types are of no interest."""
        payload = parse_json(request.body)
        events: list[TranslatedEvent] = []
        rejected: list[Rejected] = []
        ignored = 0
        for index, item in enumerate(payload if isinstance(payload, list) else [payload]):
            if not isinstance(item, dict):
                rejected.append(Rejected(index, "is not an object"))
                continue
            kind = item.get("type")
            if not isinstance(kind, str):
                rejected.append(Rejected(index, "type: required"))
            elif kind.lower() not in EVENT_TYPES:
                ignored += 1
            else:
                document = {**item, "type": kind.lower()}
                document["messageId"] = message_id(item.get("messageId")) or content_id(item)
                events.append(TranslatedEvent(document, index=index))
        if rejected and not events and not ignored:
            raise PayloadInvalid(f"no element is an event; the first {rejected[0].message}")
        return Translation(events=events, ignored=ignored, rejected=rejected)


def first_element(array: bytes) -> bytes:
    """Cut the first element out of a JSON array as it stands in the text.

    It is not parsed: to parse and print it again would not give the bytes that were signed, and an
    unknown sender's text is not worth a megabyte of objects.

    :raises NothingSigned: the array is empty.
    :raises SignatureMismatch: its first element is not an object.
    """
    text = array[: MAX_ELEMENT + 1].lstrip()[1:]
    if text.lstrip()[:1] == b"]":
        raise NothingSigned("an empty array")
    if text[:1] != b"{":
        raise SignatureMismatch("the first element is not an object")
    depth = 0
    for token in _TOKENS.finditer(text):
        sign = token[0][:1]
        if sign in b"[{":
            depth += 1
        elif sign in b"]}":
            depth -= 1
            if depth == 0:
                return text[: token.end()]
    raise SignatureMismatch("the first element does not end")


@hookimpl
def engage_register_webhook(register: Register[ProviderFactory]) -> None:
    """Bring ``segment``."""
    register("segment", Segment, options_schema("engage_schemas", "plugins/webhooks/segment.json"))
