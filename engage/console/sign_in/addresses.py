# SPDX-License-Identifier: Apache-2.0
"""Where the console is, and from where it accepts requests.

A page on another site must not be able to use the console in an operator's browser. Two checks
prevent it: the ``Host`` of every request must be one of the console's (otherwise a foreign name
could be made to point to this address), and a request that changes something must come from a page
of the console itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from engage.http1.addresses import parsed_address

if TYPE_CHECKING:
    from engage.config import ConsoleConfig

__all__ = ["Addresses", "is_loopback", "session_name"]

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?", re.ASCII)


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine reach a host that a config names."""
    parsed = parsed_address(host)
    return host == "localhost" if parsed is None else parsed.is_loopback


class Addresses:
    """The hosts and the origins of the console.

    :param config: ``[console]``.
    :param port: the port on which it listens.
    """

    def __init__(self, config: ConsoleConfig, port: int) -> None:
        self._hosts = {host.lower().rstrip(".") for host in config.allowed_hosts}
        self._public = urlsplit(config.public_url) if config.public_url else None
        self._listening = (config.host, port)
        if self._public is not None and self._public.hostname:
            self._hosts.add(self._public.hostname.rstrip("."))
        #: Whether browsers reach the console over TLS.
        self.https = self._public is not None and self._public.scheme == "https"
        #: The path under which it stands, without a slash at the end: ``""`` or ``/engage``.
        self.prefix = "" if self._public is None else self._public.path.rstrip("/")
        #: The port on which it listens.
        self.port = port

    @property
    def url(self) -> str:
        """The URL of the console for people, without a slash at the end."""
        if self._public is not None:
            return self._public.geturl()
        host, port = self._listening
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)  # noqa: S104
        return (
            f"http://[{host}]:{port}"
            if host.count(":") > 1 and "[" not in host
            else (f"http://{host}:{port}")
        )

    def allows_host(self, header: str) -> bool:
        """Return whether a request with this ``Host`` is for the console.

        IP addresses are: a foreign page can make a name point here, but not an address.
        """
        parts = _HOST.fullmatch(header)
        if parts is None:
            return False
        host = parts[1].lower()
        if host.startswith("["):
            return parsed_address(host[1:-1]) is not None
        host = host.rstrip(".")
        return (
            host in self._hosts
            or host == "localhost"
            or host.endswith(".localhost")
            or parsed_address(host) is not None
        )

    def cookie_name(self, host: str) -> str:
        """Return the name of the session cookie.

        Over TLS, ``__Host-`` makes browsers refuse a cookie that another host or plain HTTP set;
        a cookie for one path can only have ``__Secure-``.
        Without TLS the name has the port that the browser uses, because cookies are shared by all
        ports of a host.

        :param host: the ``Host`` of a request.
        """
        if self.https:
            return f"__{'Secure' if self.prefix else 'Host'}-engage-console"
        port = host.rpartition(":")[2]
        return f"engage-console-{port if port.isdigit() else 80}"

    def same_origin(self, headers: Mapping[str, str], host: str) -> bool:
        """Return whether a request that changes something comes from a page of the console.

        :param headers: of the request, with ``Sec-Fetch-Site`` or ``Origin``. Browsers send the
            first only over TLS and on loopback; if it is there, it decides.
        :param host: the ``Host`` of the request, which is allowed.
        """
        site = headers.get("Sec-Fetch-Site")
        if site is not None:
            return site == "same-origin"
        origin = headers.get("Origin")
        if origin is None:
            return False
        # A browser leaves out the default port in both headers, so they can be compared.
        allowed = {f"http://{host.lower()}"}
        if self._public is not None:
            allowed.add(f"{self._public.scheme}://{self._public.netloc}".lower())
        if self.https:
            allowed.discard(f"http://{host.lower()}")
            allowed.add(f"https://{host.lower()}")
        return origin.lower() in allowed


def session_name(cookie_name: str, host: str) -> str:
    """Return the name with which a session is signed: it is valid for one host only.

    A server on another port of the same host also gets the cookie. The console refuses it under
    every other name of this machine.

    :param host: the ``Host`` of a request.
    """
    parts = _HOST.fullmatch(host)
    return f"{cookie_name}@{'' if parts is None else parts[1].lower().rstrip('.')}"
