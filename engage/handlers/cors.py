# SPDX-License-Identifier: Apache-2.0
"""Which web pages may call the server: CORS, as the Fetch standard defines it.

Routes for events echo the origin and allow credentials, because ``navigator.sendBeacon`` always
sends them and browsers then require both. Other routes allow reading without credentials. This is
safe: a write key is public, and no route reads a cookie.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from engage.http1.request import TCHAR

if TYPE_CHECKING:
    from engage.config import Cors

__all__ = ["CorsPolicy"]

#: One origin as a browser writes it; nothing else is echoed.
_ORIGIN: Final = re.compile(r"[!-+\--~]{1,512}")
#: The names of headers that a preflight may request.
_NAMES: Final = re.compile(rf"[ \t]*{TCHAR}+(?:[ \t]*,[ \t]*{TCHAR}+)*[ \t]*")
_NAMES_LENGTH: Final = 1024
#: Allowed when a preflight does not request headers in a form that can be echoed.
_USUAL_HEADERS: Final = "authorization, content-type"
#: Seconds for which a browser may cache the answer to a preflight request: as long as Chromium does
#: at most.
_MAX_AGE: Final = "7200"
_EXPOSED: Final = "Retry-After, X-Request-Id"


class CorsPolicy:
    """Turns the ``[cors]`` table of the config into headers of answers."""

    def __init__(self, cors: Cors) -> None:
        self._any = "*" in cors.origins
        self._origins = frozenset(origin.lower() for origin in cors.origins)

    def headers(self, origin: str | None, *, credentials: bool) -> Mapping[str, str]:
        """Return the headers for every answer, errors included.

        :param origin: the header ``Origin`` of the request.
        :param credentials: whether beacons are sent to the route.
        """
        allowed = None if origin is None else self._allowed(origin, credentials)
        if allowed is None:
            return {"Vary": "Origin"} if credentials or not self._any else {}
        allowed["Access-Control-Expose-Headers"] = _EXPOSED
        return allowed

    def preflight(
        self,
        origin: str | None,
        requested: str | None,
        methods: Sequence[str],
        *,
        credentials: bool,
    ) -> Mapping[str, str]:
        """Return the headers for the answer to ``OPTIONS``.

        :param requested: ``Access-Control-Request-Headers``; echoed, because ``*`` does not include
            ``Authorization``.
        :param methods: those that the route answers.
        """
        allowed = self._allowed(origin, credentials)
        vary = {"Vary": "Origin, Access-Control-Request-Headers"}
        if allowed is None:
            return vary
        names = _USUAL_HEADERS
        if requested and len(requested) <= _NAMES_LENGTH and _NAMES.fullmatch(requested):
            names = requested.strip(" \t")
        return (
            allowed
            | vary
            | {
                "Access-Control-Allow-Methods": ", ".join(methods),
                "Access-Control-Allow-Headers": names,
                "Access-Control-Max-Age": _MAX_AGE,
            }
        )

    def _allowed(self, origin: str | None, credentials: bool) -> dict[str, str] | None:
        if origin is None or _ORIGIN.fullmatch(origin) is None:
            return None
        if not self._any and origin.lower() not in self._origins:
            return None
        if credentials:
            return {
                "Access-Control-Allow-Origin": origin,
                "Access-Control-Allow-Credentials": "true",
                "Vary": "Origin",
            }
        if self._any:
            return {"Access-Control-Allow-Origin": "*"}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
