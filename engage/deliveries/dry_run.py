# SPDX-License-Identifier: Apache-2.0
"""A delivery from a file: what the server would make of it, storing nothing."""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson

from engage.api import EVENT_TYPES, EngageError, Provider, SignatureMismatch, WebhookRequest
from engage.config import Config
from engage.deliveries.delivery import named_workspaces
from engage.deliveries.fetcher import Fetcher
from engage.deliveries.receive import translated, unkeepable
from engage.deliveries.recipients import of_nobody
from engage.errors import ApiError, Limit, Problem, located
from engage.pipeline.decode import check_encoding, decompress
from engage.pipeline.normalise import Arrival, normalise
from engage.pipeline.validate import Schemas

__all__ = ["Recording", "Rehearsal", "read_recording", "rehearse"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recorded delivery."""

    #: Path and query.
    target: str
    headers: Sequence[tuple[str, str]]
    body: bytes
    #: Seconds since 1970, if it says when it arrived.
    now: float | None

    @property
    def workspace(self) -> str | None:
        """The workspace that its URL or header names, if one does.

        :raises EngageError: they name several; the server would refuse it.
        """
        named = named_workspaces(self.target, self.headers)
        if len(named) > 1:
            raise EngageError("the recording names several workspaces in its URL and headers")
        return next(iter(named), None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What would be stored."""

    documents: Sequence[Mapping[str, Any]]
    ignored: int
    problems: Sequence[Problem]


def read_recording(data: bytes, provider: str) -> Recording:
    """Read a recorded delivery.

    :param data: JSON (an object with ``headers`` as an object or list of pairs, ``body`` or
        ``body_base64``, optionally ``url`` and ``now``), or the request as it came over the wire.
    :param provider: its path, if the recording does not say.
    :raises EngageError: it is neither.
    """
    path = f"/api/public/webhooks/{provider}"
    if data.lstrip()[:1] == b"{":
        return _from_json(data, path)
    separator = b"\r\n\r\n" if b"\r\n\r\n" in data else b"\n\n"
    head, found, body = data.partition(separator)
    if not found:
        raise EngageError("the recording has no empty line between its headers and its body")
    lines = head.decode("latin-1").splitlines()
    if lines and lines[0].rpartition(" ")[2].startswith("HTTP/"):
        path = _target(lines.pop(0).split(" ")[1])
    headers = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise EngageError("the recording has a line among its headers that is none")
        headers.append((name.strip(), value.strip()))
    return Recording(target=path, headers=headers, body=body, now=None)


def _from_json(data: bytes, path: str) -> Recording:
    try:
        found = orjson.loads(data)
        pairs = found["headers"]
        pairs = pairs.items() if isinstance(pairs, dict) else pairs
        headers = [(str(name), _latin(str(value))) for name, value in pairs]
        encoded, text = found.get("body_base64"), found.get("body")
        body = base64.b64decode(encoded) if text is None else text.encode()
        now = found.get("now")
        return Recording(
            target=_target(found["url"]) if found.get("url") else path,
            headers=headers,
            body=body,
            now=None if now is None else float(now),
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, binascii.Error) as error:
        raise EngageError(
            "the recording is no JSON object with headers and body (or body_base64)"
        ) from error


def _target(url: str) -> str:
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _latin(value: str) -> str:
    """Headers travel as bytes; they are read as Latin-1."""
    return value.encode().decode("latin-1")


async def rehearse(
    config: Config,
    name: str,
    workspace: str,
    provider: Provider,
    recording: Recording,
    *,
    now: float,
    fetcher: Fetcher,
) -> Rehearsal:
    """Verify, translate, validate and normalise a delivery.

    Recipients are not looked up, transforms do not run, and no call of a provider's is made but
    for what it needs to verify.

    :raises EngageError: it does not verify; the message says why.
    """
    encodings = [value for key, value in recording.headers if key.lower() == "content-encoding"]
    request = WebhookRequest(
        method="POST",
        headers=recording.headers,
        body=decompress(
            recording.body,
            check_encoding(encodings),
            Limit(config.limits.decompressed_bytes, "limits.decompressed_bytes"),
        ),
        url=(config.server.public_url or "") + recording.target,
        now=now,
    )
    if provider.probe(request) is not None:
        return Rehearsal(documents=[], ignored=0, problems=[])
    try:
        needed = provider.needs(request)
        fetched = None if needed is None else await fetcher.get(needed, provider.hosts)
        provider.verify(request, fetched)
    except SignatureMismatch as error:
        raise EngageError(f"it does not verify: {error}") from error
    except EngageError:
        raise
    except Exception as error:
        raise EngageError(f"it does not verify: {type(error).__name__}") from error
    translation, problems = translated(provider, request)
    schemas = Schemas.load()
    arrival = Arrival.of_delivery(
        workspace, name, received_at=int(now * 1000), limits=config.limits
    )
    documents = []
    for event in translation.events:
        prefix = f"/{event.index}"
        reason = unkeepable(event.document, config.limits.json_depth)
        if reason is not None:
            problems.append(Problem(prefix, reason))
            continue
        document = of_nobody(event)
        kind = str(document.get("type"))
        found = schemas.problems(kind if kind in EVENT_TYPES else "item", document)
        if found:
            problems += [problem.under(prefix) for problem in found]
            continue
        try:
            documents.append(normalise(document, kind, arrival).document())
        except ApiError as error:
            problems += located(error, prefix)
    return Rehearsal(documents=documents, ignored=translation.ignored, problems=problems)
