# SPDX-License-Identifier: Apache-2.0
"""Runs a recorded delivery through the steps of the server, without storing anything."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson

from engage.api import EVENT_TYPES, EngageError, SignatureMismatch
from engage.config import Config
from engage.deliveries.delivery import Delivery, Destination, body_limit
from engage.deliveries.fetcher import Fetcher
from engage.deliveries.receive import named_workspaces, request_of, translate, verify
from engage.errors import ApiError, Problem, located
from engage.pipeline.normalise import Arrival, normalise
from engage.pipeline.validate import Schemas
from engage.subscriptions.opt_outs import Effects, Owned, effects, owned_addresses
from engage.subscriptions.recipients import Recipients, is_looked_up, without_lookup

__all__ = ["Rehearsal", "named_workspace", "read_recording", "rehearse"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The result that a delivery would have on a server."""

    #: The events that it would store.
    documents: Sequence[Mapping[str, Any]]
    #: What it would change in choices and suppressions.
    effects: Effects
    #: How many elements it would ignore.
    ignored: int
    #: Why it would keep the delivery as a dead letter.
    problems: Sequence[Problem]
    #: How many events the server looks a user up for, because the delivery names none.
    lookups: int


def read_recording(data: bytes, provider: str, *, now: float | None = None) -> Delivery:
    """Read a recorded delivery.

    :param data: a JSON object with ``headers`` (an object or a list of pairs), ``body`` or
        ``body_base64``, and optionally ``url`` and ``now``; or the request as it was sent.
    :param provider: the name in the URL, if the recording has no URL.
    :param now: when it arrived, in seconds since 1970; ``None``: the recording's time, else now.
    :raises EngageError: if it is neither.
    """
    path = f"/api/public/webhooks/{provider}"
    if data.lstrip()[:1] == b"{":
        return _from_json(data, path, now)
    separator = b"\r\n\r\n" if b"\r\n\r\n" in data else b"\n\n"
    head, blank, body = data.partition(separator)
    if not blank:
        raise EngageError("the recording has no empty line between its headers and its body")
    lines = head.decode("latin-1").splitlines()
    if lines and lines[0].rpartition(" ")[2].startswith("HTTP/"):
        path = _target(lines.pop(0).split(" ")[1])
    headers = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise EngageError("the recording contains a malformed header line")
        headers.append((name.strip(), value.strip()))
    return Delivery.recorded(path, headers, body, time.time() if now is None else now)


def _from_json(data: bytes, path: str, now: float | None) -> Delivery:
    try:
        recording = orjson.loads(data)
        pairs = recording["headers"]
        pairs = pairs.items() if isinstance(pairs, dict) else pairs
        # The server reads the bytes of a header as Latin-1.
        headers = [(str(name), str(value).encode().decode("latin-1")) for name, value in pairs]
        encoded, text = recording.get("body_base64"), recording.get("body")
        body = base64.b64decode(encoded) if text is None else text.encode()
        target = _target(recording["url"]) if recording.get("url") else path
        if now is None and recording.get("now") is not None:
            now = float(recording["now"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, binascii.Error) as error:
        raise EngageError(
            "the recording is not a JSON object with headers and body (or body_base64)"
        ) from error
    return Delivery.recorded(target, headers, body, time.time() if now is None else now)


def _target(url: str) -> str:
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def named_workspace(delivery: Delivery) -> str | None:
    """Return the workspace that a delivery names, or ``None`` if it names no workspace.

    :raises EngageError: if it names several; the server would refuse it.
    """
    try:
        named = named_workspaces(delivery.target, delivery.headers)
    except ValueError:
        raise EngageError("the URL of the recording has too many parameters") from None
    if len(named) > 1:
        raise EngageError("the recording names several workspaces in its URL and headers")
    return next(iter(named), None)


async def rehearse(
    config: Config,
    destination: Destination,
    delivery: Delivery,
    fetcher: Fetcher,
    recipients: Recipients | None = None,
) -> Rehearsal:
    """Verify, translate, validate and normalise a delivery.

    Transforms do not run. The only outgoing call is for a document
    that the signature needs.

    :param recipients: looks the users of events up; ``None``: no event finds a user.
    :raises EngageError: if the delivery could not be verified; the message gives the reason.
    """
    limits = config.limits
    provider = destination.provider
    largest = body_limit(destination.name, [provider], limits)
    request = await request_of(delivery, config.server.public_url, largest)
    try:
        if await verify(provider, request, fetcher) is not None:
            return Rehearsal(documents=[], effects=Effects(), ignored=0, problems=[], lookups=0)
    except SignatureMismatch as error:
        raise EngageError(f"the webhook signature could not be verified: {error}") from error
    translation, problems = translate(provider, request, limits.json_depth)
    workspace, name = destination.workspace, destination.name
    received_at, rules = int(delivery.arrived_at * 1000), destination.rules
    arrival = Arrival.of_delivery(
        workspace.id, name, received_at=received_at, limits=limits, rules=rules
    )
    schemas = Schemas.load()
    documents = []
    changed = Effects()
    events = translation.events
    owned: Owned = {}
    if recipients is None:
        identified = [without_lookup(event) for event in events]
    else:
        identified = await recipients.identify(workspace.id, name, events)
        owned = await owned_addresses(recipients.store, workspace.id, events)
    for event, document in zip(events, identified, strict=True):
        try:
            kind = str(document.get("type"))
            document = schemas.read(kind if kind in EVENT_TYPES else "item", document)
            documents.append(normalise(document, kind, arrival).document())
        except ApiError as error:
            problems += located(error, f"/{event.index}")
        else:
            effects(workspace, name, event, arrival.received_at, changed, owned)
    return Rehearsal(
        documents=documents,
        effects=changed,
        ignored=translation.ignored,
        problems=problems,
        lookups=sum(map(is_looked_up, events)),
    )
