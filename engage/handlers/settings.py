# SPDX-License-Identifier: Apache-2.0
"""The settings that SDKs of Segment and RudderStack fetch before they start.

Without these routes a page or an app would need the settings inline, because the SDKs would
otherwise fetch them from their vendors' hosts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import orjson

from engage.api import render_time
from engage.errors import ApiError, key_refused
from engage.handlers.base import Handler
from engage.keys.auth import UnknownKeyError
from engage.pipeline.clock import Clock

if TYPE_CHECKING:
    from engage.keys.auth import Principal

__all__ = ["ProjectSettingsHandler", "SourceConfigHandler"]

#: When the settings last changed: they come from the config, which is read once at the start.
STARTED: Final = render_time(Clock()())

#: How often @segment/analytics-next may send an event again. It sends each alone, so all that wait
#: beyond a rate limit come back at the same time. Its own default is 10; this is its maximum.
_RETRIES: Final = {"maxRetryCount": 100}
HTTP_CONFIG: Final = {"rateLimitConfig": _RETRIES, "backoffConfig": _RETRIES}


class _SettingsHandler(Handler):
    """Answers with settings, which a client may use again only if they are still the same.

    A key can be disabled at any time, so a cache must ask the server before each use.
    """

    async def when_known(self, find: Callable[[], Principal | None]) -> Principal | None:
        """Call a function that finds the principal; call it again if the key may be a new one."""
        try:
            return find()
        except UnknownKeyError as unknown:
            await self.wait_for_key(unknown)
        return find()

    def answer_settings(
        self,
        settings: Mapping[str, Any],
        *,
        changing: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answer 200, or 304 if the client has the settings.

        :param changing: more members, which differ between the processes of a server.
        """
        digest = hashlib.sha256(orjson.dumps(settings)).hexdigest()[:16]
        # Weak, because bodies with the same settings may differ.
        etag = f'W/"{digest}"' if changing else f'"{digest}"'
        headers = {"Cache-Control": "no-cache", "ETag": etag, **(headers or {})}
        if self.client_has(etag):
            self.answer(b"", status=304, headers=headers)
        else:
            self.answer(orjson.dumps({**settings, **(changing or {})}), headers=headers)


class ProjectSettingsHandler(_SettingsHandler):
    """``GET /v1/projects/<write key>/settings``, for @segment/analytics-next (its ``cdnURL``)."""

    async def get(self, writeKey: str) -> None:  # noqa: N803 (the name in the path)
        """Answer as ``schemas/answers/project-settings.json`` describes."""
        keys = [unquote(writeKey)]
        find = self.services.authenticator.header_or_query
        try:
            principal = await self.when_known(lambda: find(None, keys))
        except ApiError as error:
            if error.status >= 500:
                raise
            principal = None
        if principal is None or principal.write_key.kind == "server":
            raise ApiError("not_found", "there is no such write key")
        destination: dict[str, Any] = {"apiKey": principal.write_key.key, "httpConfig": HTTP_CONFIG}
        public_url = self.services.config.server.public_url
        if public_url:
            scheme, _, address = public_url.partition("://")
            destination |= {"apiHost": f"{address}/v1", "protocol": scheme}
        self.answer_settings(
            {"integrations": {"Segment.io": destination}, "metrics": {"sampleRate": 0}}
        )

    head = get


class SourceConfigHandler(_SettingsHandler):
    """``GET /sourceConfig/``, for RudderStack's SDKs in browsers and apps (their control plane)."""

    async def get(self) -> None:
        """Answer as ``schemas/answers/source-config.json`` describes."""
        try:
            principal = await self.when_known(self.principal_of_head)
        except ApiError as error:
            if error.code != "write_key_disabled":
                raise
            raise ApiError("invalid_write_key", error.message) from None
        # There is no body that could have a key: without a key here, the answer is 401.
        principal = principal or self.services.authenticator.body(None)
        self.principal = principal
        if principal.write_key.kind == "server":
            raise key_refused("it is a server key; web pages and apps need a public one")
        workspace = principal.workspace
        off = {"enabled": False}
        source = {
            "id": principal.write_key.id,
            "name": workspace.name,
            "writeKey": principal.write_key.key,
            "enabled": True,
            "workspaceId": workspace.id,
            "config": {"statsCollection": {"errors": off, "metrics": off}},
            "connections": [],
            "destinations": [],
            "dataplanes": {},
        }
        self.answer_settings(
            {"source": source},
            # RudderStack's SDKs for Kotlin and Swift need it in the source.
            changing={"source": {**source, "updatedAt": STARTED}, "updatedAt": STARTED},
            headers={"Vary": "Authorization"},
        )

    head = get
