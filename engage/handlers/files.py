# SPDX-License-Identifier: Apache-2.0
"""Files that are the same for every client: the snippet's script, the API's description, its page.

Each is made and compressed once for a process, and has an ``ETag`` of its content.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Final

import orjson
from tornado import template

import engage
from engage.handlers.base import Handler
from engage.handlers.openapi import describe

__all__ = [
    "DescriptionHandler",
    "FileHandler",
    "PageHandler",
    "SnippetHandler",
    "StaticFile",
    "welcome",
]

#: Of a page without scripts and without content from elsewhere.
_POLICY: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class StaticFile:
    """Content that does not change while the process lives."""

    content: bytes
    content_type: str
    #: Seconds for which a client may use it again without a request.
    max_age: int
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compressed: bytes = dataclasses.field(init=False)
    etag: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressed", gzip.compress(self.content, 9, mtime=0))
        object.__setattr__(self, "etag", hashlib.sha256(self.content).hexdigest()[:16])


class FileHandler(Handler):
    """Serves one :class:`StaticFile`."""

    def get(self) -> None:
        """Answer 200, or 304 if the client has the file."""
        file = self.file()
        zipped = _accepts_gzip(self.request.fields.get("Accept-Encoding", ""))
        etag = f'"{file.etag}{"-gzip" if zipped else ""}"'
        headers = {
            **file.headers,
            "Cache-Control": f"public, max-age={file.max_age}",
            "ETag": etag,
            "Vary": file.headers.get("Vary", "Accept-Encoding"),
        }
        if self.client_has(etag):
            self.answer(b"", status=304, content_type=file.content_type, headers=headers)
            return
        if zipped:
            headers["Content-Encoding"] = "gzip"
        self.answer(
            file.compressed if zipped else file.content,
            content_type=file.content_type,
            headers=headers,
        )

    def file(self) -> StaticFile:
        """Return the file to serve."""
        raise NotImplementedError

    head = get


def _accepts_gzip(header: str) -> bool:
    for part in header.lower().split(","):
        coding, _, weight = part.partition(";")
        if coding.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _packaged(name: str) -> bytes:
    return resources.files("engage.handlers").joinpath("static").joinpath(name).read_bytes()


@functools.cache
def snippet() -> StaticFile:
    """Return the tracking snippet's script."""
    return StaticFile(_packaged("engage.js"), "text/javascript; charset=utf-8", 3600)


@functools.cache
def description(public_url: str | None) -> StaticFile:
    """Return the OpenAPI document."""
    document = orjson.dumps(describe(public_url=public_url))
    return StaticFile(document, "application/json; charset=utf-8", 300)


@functools.cache
def page(public_url: str | None) -> StaticFile:
    """Return the description as one page, without scripts and without content from elsewhere."""
    text = template.Template(_packaged("docs.html"), autoescape="xhtml_escape").generate(
        document=describe(public_url=public_url), pretty=_pretty
    )
    return StaticFile(text, "text/html; charset=utf-8", 300, _POLICY)


@functools.cache
def welcome(console: str | None) -> StaticFile:
    """Return the page for someone who opens the server in a browser.

    :param console: the URL of the console on this machine; ``None``: it is not shown.
    """
    text = template.Template(_packaged("welcome.html"), autoescape="xhtml_escape").generate(
        version=engage.__version__, console=console
    )
    headers = {**_POLICY, "Vary": "Accept, Accept-Encoding"}
    return StaticFile(text, "text/html; charset=utf-8", 300, headers)


def _pretty(value: object) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()


class SnippetHandler(FileHandler):
    """``GET /engage.js``."""

    def file(self) -> StaticFile:
        return snippet()


class DescriptionHandler(FileHandler):
    """``GET /openapi.json``."""

    make: Callable[[str | None], StaticFile] = staticmethod(description)

    def file(self) -> StaticFile:
        return self.make(self.services.config.server.public_url)


class PageHandler(DescriptionHandler):
    """``GET /docs``."""

    make = staticmethod(page)
