# SPDX-License-Identifier: Apache-2.0
"""The options: addresses, TLS and SASL."""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from engage.api import ConfigError

DEFAULT_SERVERS: Final = "localhost:9092"
DEFAULT_TOPIC: Final = "engage.events"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The addresses of the brokers, and the credentials of a client."""

    #: Host and port of some brokers, separated by commas.
    servers: str
    tls: ssl.SSLContext | None = None
    #: ``PLAIN``, ``SCRAM-SHA-256`` or ``SCRAM-SHA-512``; ``None``: no SASL.
    sasl_mechanism: str | None = None
    sasl_username: str = ""
    sasl_password: str = dataclasses.field(default="", repr=False)


def address(options: Mapping[str, Any], base_dir: Path) -> Address:
    """Return the address in the options.

    :param options: valid according to ``schemas/plugins/kafka.json``.
    :param base_dir: relative paths are relative to it.
    :raises ConfigError: if options do not fit together, or a file of TLS cannot be used.
    """
    mechanism = options.get("sasl_mechanism")
    for name in ("sasl_username", "sasl_password"):
        if mechanism is not None and name not in options:
            raise ConfigError(f"{name}: is required with sasl_mechanism")
        if mechanism is None and name in options:
            raise ConfigError(f"{name}: needs sasl_mechanism")
    if mechanism == "PLAIN" and not options.get("tls", False):
        raise ConfigError(
            "sasl_mechanism: PLAIN sends the password itself; set tls = true, or use SCRAM-SHA-512"
        )
    servers = [part.strip() for part in options.get("servers", DEFAULT_SERVERS).split(",")]
    for server in servers:
        # The system would connect to another port.
        if not 0 < int(server.rpartition(":")[2]) < 65536:
            raise ConfigError(f"servers: {server} has no port from 1 to 65535")
    return Address(
        servers=",".join(servers),
        tls=_tls(options, base_dir),
        sasl_mechanism=mechanism,
        sasl_username=options.get("sasl_username", ""),
        sasl_password=options.get("sasl_password", ""),
    )


def _tls(options: Mapping[str, Any], base_dir: Path) -> ssl.SSLContext | None:
    if not options.get("tls", False):
        for name in ("tls_ca", "tls_certificate", "tls_key", "tls_key_password"):
            if name in options:
                raise ConfigError(f"{name}: needs tls = true")
        return None

    def path(name: str) -> Path | None:
        return base_dir / options[name] if name in options else None

    ca, certificate, key = path("tls_ca"), path("tls_certificate"), path("tls_key")
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_ca: {_reason(error)}") from None
    if certificate is None:
        if key is not None:
            raise ConfigError("tls_key: needs tls_certificate")
        return context
    # Without a password, OpenSSL would read one from the terminal.
    password = options.get("tls_key_password", "")
    try:
        context.load_cert_chain(certificate, key, lambda: password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_certificate: {_reason(error)}") from None
    return context


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return "cannot be used: it must be PEM, and the key must fit and its password be right"
    return f"cannot be read ({error.strerror or type(error).__name__})"
