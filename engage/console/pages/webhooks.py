# SPDX-License-Identifier: Apache-2.0
"""``/webhooks``: the providers, the URL to enter at each, and the deliveries of 24 hours."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import sys
from collections.abc import Mapping
from typing import Final

from engage.api import DAY_MS, Provider
from engage.console.base import ConsoleHandler
from engage.console.listing import find
from engage.monitoring.history import MINUTE, WEBHOOKS

__all__ = ["WebhooksHandler"]


#: Outcomes of a delivery that are no problem.
FINE: Final = frozenset({"accepted", "ignored", "not_understood", "probe", "test"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Enabled:
    """A provider that the workspace has enabled."""

    name: str
    url: str
    setup: str
    #: How a delivery is verified, in a sentence.
    verified: str
    #: Outcome → deliveries in 24 hours, of all workspaces.
    outcomes: Mapping[str, int]
    #: When a delivery was last accepted: the minute, in milliseconds since 1970 UTC.
    last_fine: int | None


class WebhooksHandler(ConsoleHandler):
    """The webhook providers."""

    async def get(self) -> None:
        """Show the providers."""
        console = self.console
        server = console.config.server
        outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        last_fine: dict[str, int] = {}
        store, now = console.store, console.now()
        read = functools.partial(
            store.counts, MINUTE, since=now - DAY_MS, until=now + 60_000, names=[WEBHOOKS]
        )
        counts = await find(
            self, read, by="after", limit=sys.maxsize, size=10_000, seconds=math.inf
        )
        for count in counts.rows:
            name, outcome = count.labels
            outcomes[name][outcome] += count.total
            if outcome in FINE:
                last_fine[name] = max(last_fine.get(name, 0), count.at)
        made = console.registry.make_webhooks(console.config)
        enabled = []
        for name, options in sorted(self.workspace.webhooks.items()):
            own = options.get("public_url")
            enabled.append(
                Enabled(
                    name=name,
                    url=own if isinstance(own, str) else self._url(name),
                    setup=self._setup(name),
                    verified=_verified(made[name][self.workspace.id]),
                    outcomes=outcomes[name],
                    last_fine=last_fine.get(name),
                )
            )
        self.page(
            "webhooks.html",
            title="Webhooks",
            nav="webhooks",
            enabled=enabled,
            others=[
                (name, self._url(name), self._setup(name))
                for name in sorted(set(console.registry.webhooks) - set(self.workspace.webhooks))
            ],
            reachable=server.public_url is not None,
            fine=FINE,
        )

    def _url(self, name: str) -> str:
        server = self.console.config.server
        base = server.public_url or f"http://{server.host}:{server.port}"
        return f"{base}/api/public/webhooks/{name}?workspaceId={self.workspace.id}"

    def _setup(self, name: str) -> str:
        registered = self.console.registry.webhooks.get(name)
        return getattr(getattr(registered, "factory", None), "setup", "")


def _verified(provider: Provider) -> str:
    header = provider.signing.credential
    if header is None:
        return "Each delivery is verified by its signature."
    return f"Each delivery is verified by a secret in its header {header}; it is not signed."
