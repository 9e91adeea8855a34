# SPDX-License-Identifier: Apache-2.0
"""The headers of every answer that keep other sites, and text of strangers, from doing harm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["CONTENT_SECURITY_POLICY", "HEADERS"]

#: Nothing but files of the console is loaded or run, and no page of another origin shows or reads
#: the console. Without a Trusted Types policy, no script can turn text into HTML.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
