# SPDX-License-Identifier: Apache-2.0
"""The connection string: what it says, whether it can be used, and what of it may be shown.

The driver reads it, not this module: an option may be spelt in many ways (``w=%30`` is ``w=0``).
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
    """What a connection string says."""

    #: Hosts and database, for people; never the credentials.
    name: str
    #: Whether its hosts are in the DNS.
    is_srv: bool
    #: The options as the driver understands them (times are seconds), names in lower case.
    options: Mapping[str, Any]

    def seconds(self, option: str, default: float) -> float:
        """:return: a time that it names; ``default`` if it names none, or no limit."""
        return float(self.options.get(option.lower()) or default)

    def weaknesses(self) -> list[str]:
        """:return: what in it lets an acknowledged event be lost; one line each.

        :raises ConfigError: it asks for no acknowledgement at all.
        """
        found = []
        w = self.options.get("w", "majority")
        if w == 0:
            raise ConfigError(
                "url: w=0 acknowledges nothing at all, not even a repeated message id; remove it"
            )
        if w != "majority":
            found.append(
                f"w={str(w)[:80]}: engage answers 200 before a majority of the replica set has the "
                "event; a failover may lose it"
            )
        if not self.options.get("journal", True):
            found.append(
                "journal=false: engage answers 200 before the event is in the journal; a power cut "
                "may lose it"
            )
        return found


def read(url: str) -> ConnectionString:
    """Read a connection string.

    :raises ConfigError: it cannot be used. Its text is never quoted: it may hold a password.
    """
    srv = url.startswith(_SRV)
    rest = url.removeprefix(_SRV).removeprefix(_PLAIN)
    if _is_cut_in_a_password(rest):
        raise _unusable()
    place, _, query = rest.partition("?")
    try:
        with warnings.catch_warnings():
            # What is doubtful is said when the client is made.
            warnings.simplefilter("ignore")
            if srv:
                # The driver would ask for the names now, and wait for them.
                found = pymongo.uri_parser.parse_uri(_PLAIN + place, warn=False)
                options = pymongo.uri_parser.split_options(query, warn=False) if query else {}
            else:
                found = pymongo.uri_parser.parse_uri(url, warn=False)
                options = found["options"]
                # Options that do not go together, also with our defaults; the TLS files.
                journal = options.get("journal", options.get("w") != 0)
                pymongo.MongoClient(url, connect=False, journal=journal).close()
    except OSError as error:
        raise ConfigError(
            f"url: a file that it names cannot be read ({error.strerror or type(error).__name__})"
        ) from None
    except (PyMongoError, ValueError, TypeError):
        raise _unusable() from None
    if srv:
        # The place as it stands: the ports are in the DNS.
        hosts, scheme = place.rpartition("@")[2].partition("/")[0], _SRV
        if len(found["nodelist"]) != 1 or ":" in hosts:
            raise _unusable()
    else:
        hosts, scheme = ",".join(f"{host}:{port}" for host, port in found["nodelist"]), _PLAIN
    return ConnectionString(
        name=f"{scheme}{hosts}/{found['database'] or DEFAULT_DATABASE}",
        is_srv=srv,
        options={name.lower(): value for name, value in options.items()},
    )


def _is_cut_in_a_password(rest: str) -> bool:
    """Whether a ``/`` or ``?`` that is not percent-encoded cuts the credentials, so that a part of
    them would be taken for the name of a host or a database."""
    authority = re.split("[/?]", rest, maxsplit=1)[0]
    after = rest[len(authority) :]
    if after.startswith("/"):
        return "@" in after.partition("?")[0]
    return "@" in after and "@" not in authority


def _unusable() -> ConfigError:
    return ConfigError(
        "url: not a valid connection string (percent-encode user and password; the "
        "options are those of the MongoDB drivers, and must go together)"
    )
