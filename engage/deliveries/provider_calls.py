# SPDX-License-Identifier: Apache-2.0
"""Calls a provider for one delivery.

A provider is a plugin, and it reads what anyone may send: whatever it raises is caught here and
becomes an error or a result that the caller expects.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import orjson

from engage.api import (
    PayloadInvalid,
    Provider,
    Reply,
    SignatureMismatch,
    TranslatedEvent,
    Translation,
    WebhookRequest,
    WebhookResult,
)
from engage.deliveries.fetcher import Fetcher, FetchError, FetchRefusedError
from engage.errors import Limit, Problem, body_too_large
from engage.pipeline.decode import decompress_in_slices, too_deep
from engage.webhooks import names_person

if TYPE_CHECKING:
    from engage.deliveries.delivery import Delivery

__all__ = ["probe", "reply", "request_of", "translate", "verify", "why_unstorable"]

_log = logging.getLogger(__name__)


async def request_of(delivery: Delivery, public_url: str | None, limit: Limit) -> WebhookRequest:
    """Return the request as a provider sees it.

    :param public_url: ``server.public_url``.
    :param limit: the largest body, compressed and decompressed.
    :raises ApiError: 413 ``body_too_large``, or 400 ``invalid_encoding`` if the body cannot be
        decompressed.
    """
    body = delivery.body
    # A body in chunks that arrives together with its head has passed the connection already.
    if len(body) > limit.bytes:
        raise body_too_large(limit)
    if delivery.encoding != "identity":
        body = await decompress_in_slices(body, delivery.encoding, limit)
    return WebhookRequest(
        method="POST",
        headers=delivery.headers,
        body=body,
        url=(public_url or "") + delivery.target,
        now=delivery.arrived_at,
    )


def probe(provider: Provider, request: WebhookRequest) -> Reply | None:
    """Return the answer to a request by which the provider only tries the URL, else ``None``."""
    try:
        return provider.probe(request)
    except Exception:  # the request is not verified yet: verify() refuses it
        return None


async def verify(provider: Provider, request: WebhookRequest, fetcher: Fetcher) -> None:
    """Verify that the provider signed the request, and fetch the document that its signature needs.

    :raises SignatureMismatch: if it did not, or if the provider failed.
    :raises FetchError: if the document that the signature needs cannot be fetched now.
    """
    try:
        needed = provider.needs(request)
        fetched = None if needed is None else await fetcher.get(needed, provider.hosts)
        provider.verify(request, fetched)
    except (SignatureMismatch, FetchError):
        raise
    except FetchRefusedError as error:
        raise SignatureMismatch(str(error)) from error
    except Exception as error:  # a forged request can make a provider fail in any way
        raise SignatureMismatch(type(error).__name__) from error


def translate(
    provider: Provider, request: WebhookRequest, depth: int
) -> tuple[Translation, list[Problem]]:
    """Translate a verified request.

    :param depth: how deeply a stored event may be nested (``limits.json_depth``).
    :return: the translation with those events that can be stored, and a problem for each part of
        the delivery that could not be translated.
    """
    try:
        translation = provider.translate(request)
    except PayloadInvalid as error:
        return Translation(types=[error.kind]), [Problem("/", str(error))]
    except RecursionError:
        return Translation(), [Problem("/", "the delivery is nested too deeply")]
    except Exception as error:
        _log.exception("translating a webhook delivery failed")
        return Translation(), [Problem("/", f"the provider failed: {type(error).__name__}")]
    problems = [Problem(f"/{item.index}", item.message) for item in translation.rejected]
    unknown: dict[int, object] = {}
    for index, element in translation.unknown.items():
        if names_person(element):
            problems.append(Problem(f"/{index}", "names a person, but is not understood"))
        else:
            unknown[index] = element
    storable: list[TranslatedEvent] = []
    for event in translation.events:
        reason = event.problem or why_unstorable(event.document, depth)
        if reason is None:
            storable.append(event)
        else:
            problems.append(Problem(f"/{event.index}", reason))
    left_out = translation.ignored - len(translation.unknown) + len(unknown)
    return (
        dataclasses.replace(translation, events=storable, ignored=left_out, unknown=unknown),
        problems,
    )


def why_unstorable(document: dict[str, Any], depth: int) -> str | None:
    """Return why a document that a provider made cannot be stored, or ``None`` if it can."""
    try:
        orjson.dumps(document)
    except TypeError:
        return "cannot be stored as JSON"
    return "is nested too deeply" if too_deep(document, depth) else None


def reply(
    name: str, provider: Provider, request: WebhookRequest, result: WebhookResult
) -> Reply | None:
    """Return the provider's own answer to a stored delivery, or ``None`` for the usual one.

    :param name: the provider's name, for the log.
    """
    try:
        return provider.reply(request, result)
    except Exception:  # everything is stored, so the usual answer is true as well
        _log.exception("webhook %s: making its reply failed", name)
        return None
