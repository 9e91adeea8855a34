# SPDX-License-Identifier: Apache-2.0
"""The connection string: its parts, whether it can be used, and how it is shown.

The driver parses it, not this module: an option has many spellings (``w=%30`` is ``w=0``).
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping
from typing import Any, Final

import pymongo
from pymongo.errors import PyMongoError

from engage.api import ConfigError

DEFAULT_URL: Final = "mongodb://localhost:27017/engage"
DEFAULT_DATABASE: Final = "engage"

_SRV: Final = "mongodb+srv://"
_PLAIN: Final = "mongodb://"


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionString:
    """The content of a connection string."""

    #: Hosts and database, for messages; never the credentials.
    name: str
    #: Whether the DNS has the hosts (``mongodb+srv``).
    is_srv: bool
    #: The options as the driver parses them: names in lower case, times in seconds.
    options: Mapping[str, Any]

    def seconds(self, option: str, default: float) -> float:
        """Return a time in seconds, or ``default`` if the option is not set or means no limit."""
        return float(self.options.get(option.lower()) or default)

    def weaknesses(self) -> list[str]:
        """Return the options that allow acknowledged events to be lost, explained in a line each.

        :raises ConfigError: if the write concern requests no acknowledgement.
        """
        lines = []
        w = self.options.get("w", "majority")
        if w == 0:
            raise ConfigError(
                "url: with w=0 the server acknowledges nothing, not even a repeated message id; "
                "remove the option"
            )
        if w != "majority":
            lines.append(
                f"w={str(w)[:80]}: engage answers 200 before a majority of the replica set has the "
                "event; a failover may lose it"
            )
        if not self.options.get("journal", True):
            lines.append(
                "journal=false: engage answers 200 before the event is in the journal; a power cut "
                "may lose it"
            )
        return lines


def parse_url(url: str) -> ConnectionString:
    """Return the content of a connection string.

    :raises ConfigError: if it cannot be used. The message never quotes it: it may contain a
        password.
    """
    srv = url.startswith(_SRV)
    rest = url.removeprefix(_SRV).removeprefix(_PLAIN)
    if _credentials_are_cut(rest):
        raise _unusable()
    place, _, query = rest.partition("?")
    try:
        with warnings.catch_warnings():
            # The driver warns when the client is made.
            warnings.simplefilter("ignore")
            if srv:
                # The driver would request the names from the DNS now, and wait for them.
                parsed = pymongo.uri_parser.parse_uri(_PLAIN + place, warn=False)
                options = pymongo.uri_parser.split_options(query, warn=False) if query else {}
            else:
                parsed = pymongo.uri_parser.parse_uri(url, warn=False)
                options = parsed["options"]
                # This checks which options can be combined, with our defaults, and the TLS files.
                journal = options.get("journal", options.get("w") != 0)
                pymongo.MongoClient(url, connect=False, journal=journal).close()
    except OSError as error:
        raise ConfigError(
            f"url: a file named in it cannot be read ({error.strerror or type(error).__name__})"
        ) from None
    except (PyMongoError, ValueError, TypeError):
        raise _unusable() from None
    if srv:
        # The host as it is: the DNS has the ports.
        hosts, scheme = place.rpartition("@")[2].partition("/")[0], _SRV
        if len(parsed["nodelist"]) != 1 or ":" in hosts:
            raise _unusable()
    else:
        hosts, scheme = ",".join(f"{host}:{port}" for host, port in parsed["nodelist"]), _PLAIN
    return ConnectionString(
        name=f"{scheme}{hosts}/{parsed['database'] or DEFAULT_DATABASE}",
        is_srv=srv,
        options={name.lower(): value for name, value in options.items()},
    )


def _credentials_are_cut(rest: str) -> bool:
    """Return whether a ``/`` or ``?`` that is not percent-encoded ends the credentials early: the
    driver would take a part of them for the name of a host or a database."""
    authority = re.split("[/?]", rest, maxsplit=1)[0]
    after = rest[len(authority) :]
    if after.startswith("/"):
        return "@" in after.partition("?")[0]
    return "@" in after and "@" not in authority


def _unusable() -> ConfigError:
    return ConfigError(
        "url: not a valid connection string (percent-encode user and password; use only options "
        "that the MongoDB drivers know and that can be combined)"
    )
