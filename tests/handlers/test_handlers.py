# SPDX-License-Identifier: Apache-2.0
"""What handlers take over from Tornado; all else is tested through HTTP in ``contract/``."""

from __future__ import annotations

from typing import Any

from tornado import httputil, web

from engage.handlers.base import Handler


class _Connection:
    context = None

    def set_close_callback(self, callback: object) -> None:
        """As Tornado wants it."""


def _cleared(handler_class: type[web.RequestHandler]) -> dict[str, Any]:
    request = httputil.HTTPServerRequest(
        connection=_Connection(),  # type: ignore[arg-type]
        start_line=httputil.RequestStartLine("GET", "/", "HTTP/1.0"),
    )
    handler = handler_class.__new__(handler_class)
    handler.request = request
    handler.application = web.Application()
    handler.clear()
    return {name: value for name, value in vars(handler).items() if name.startswith("_")}


def test_clear_sets_what_tornado_sets() -> None:
    """``Handler.clear`` replaces Tornado's: a new version may have more to clear."""
    ours, theirs = _cleared(Handler), _cleared(web.RequestHandler)
    ours.pop("_headers")
    theirs.pop("_headers")
    assert ours == theirs
