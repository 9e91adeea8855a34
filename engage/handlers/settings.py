# SPDX-License-Identifier: Apache-2.0
"""The settings that the browser SDKs of Segment and RudderStack fetch before they start.

Without these routes a page would need the settings inline, because the SDKs would otherwise fetch
them from their vendors' hosts.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

import orjson

from engage.api import render_time
from engage.errors import ApiError
from engage.handlers.ingestion import IngestionHandler
from engage.pipeline.clock import Clock

__all__ = ["ProjectSettingsHandler", "SourceConfigHandler"]

#: Seconds for which a browser may use the settings again without a request.
MAX_AGE: Final = 300

#: When the settings last changed: they come from the config, which is read once at the start.
STARTED: Final = render_time(Clock()())


class ProjectSettingsHandler(IngestionHandler):
    """``GET /v1/projects/<write key>/settings``, for @segment/analytics-next (its ``cdnURL``)."""

    def get(self, writeKey: str) -> None:  # noqa: N803 (the name in the path)
        """Answer as ``schemas/answers/project-settings.json`` describes."""
        try:
            principal = self.services.authenticator.header_or_query([], [unquote(writeKey)])
        except ApiError:
            principal = None
        if principal is None:
            raise ApiError("not_found", "there is no such write key")
        destination = {"apiKey": principal.write_key.key}
        public_url = self.services.config.server.public_url
        if public_url:
            scheme, _, address = public_url.partition("://")
            destination |= {"apiHost": f"{address}/v1", "protocol": scheme}
        self.answer(
            orjson.dumps(
                {"integrations": {"Segment.io": destination}, "metrics": {"sampleRate": 0}}
            ),
            headers={"Cache-Control": f"public, max-age={MAX_AGE}"},
        )

    head = get


class SourceConfigHandler(IngestionHandler):
    """``GET /sourceConfig/``, for @rudderstack/analytics-js (its ``configUrl``)."""

    def get(self) -> None:
        """Answer as ``schemas/answers/source-config.json`` describes."""
        # There is no body that could have a key: without a key here, the answer is 401.
        principal = self.principal_of_head() or self.services.authenticator.body(None)
        self.principal = principal
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
        self.answer(
            orjson.dumps({"source": source, "updatedAt": STARTED}),
            headers={
                "Cache-Control": f"private, max-age={MAX_AGE}",
                "Vary": "Authorization",
            },
        )

    head = get
