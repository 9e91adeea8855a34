# SPDX-License-Identifier: Apache-2.0
"""Which web pages may talk to the server, in the browsers' words (CORS, in the Fetch standard).

Event routes echo the origin and allow credentials: ``navigator.sendBeacon`` always sends them, and
a browser then takes nothing less. Other routes allow reading without credentials. Nothing is lost
by this: a write key is public, and no route looks at a cookie.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from engage.http1.grammar import TCHAR

if TYPE_CHECKING:
    from engage.config import Cors

__all__ = ["CorsPolicy"]

#: One origin as a browser writes it; what else comes under that name is not echoed.
_ORIGIN: Final = re.compile(r"[!-+\--~]{1,512}")
#: What a preflight may ask for: names of headers.
_NAMES: Final = re.compile(rf"[ \t]*{TCHAR}+(?:[ \t]*,[ \t]*{TCHAR}+)*[ \t]*")
_NAMES_LENGTH: Final = 1024
#: What is allowed when the preflight does not say it in a form that can be echoed.
_USUAL_HEADERS: Final = "authorization, content-type"
_EXPOSED: Final = "Retry-After, X-Request-Id"


class CorsPolicy:
    """The ``[cors]`` table as headers of answers."""

    def __init__(self, cors: Cors) -> None:
        self._any = "*" in cors.origins
        self._origins = frozenset(origin.lower() for origin in cors.origins)
        self._max_age = str(cors.max_age)

    def headers(self, origin: str | None, *, credentials: bool) -> Mapping[str, str]:
        """What belongs on every answer, errors too.

        :param origin: the header ``Origin`` of the request.
        :param credentials: whether it is a route that beacons are sent to.
        """
        allowed = self._allowed(origin, credentials)
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
        """What belongs on the answer to ``OPTIONS``.

        :param requested: ``Access-Control-Request-Headers``; echoed, because ``*`` does not cover
            ``Authorization``.
        :param methods: what the route can do.
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
                "Access-Control-Max-Age": self._max_age,
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
