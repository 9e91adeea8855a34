# SPDX-License-Identifier: Apache-2.0
"""``/keys``: the write keys, how much each is used, and the lines that send events with them."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from tornado.web import HTTPError

from engage.api import EngageError, StorageUnavailable
from engage.config.erasures_file import erasures_path
from engage.console.base import ConsoleHandler
from engage.console.data.history import Overview
from engage.console.display.snippets import server_url, snippets
from engage.console.pages.sending import send_test_event
from engage.keys.changes import MAX_NAME_LENGTH, KeyState, change_key, create_key
from engage.keys.effective import (
    KEY_ID,
    Key,
    effective_keys,
    options_of,
    rate_of,
    read_key_records,
    shown_rate,
    words,
)

__all__ = ["KeysHandler"]

#: Minutes over which the rate of a key is measured.
RATE_MINUTES: Final = 5
#: The name of a key that replaces another begins with this.
REPLACES: Final = "replaces "


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How much a key is used."""

    #: Events in each of the last 60 minutes.
    minutes: Sequence[int]
    #: Events in a minute, lately.
    rate: float
    #: The step in which it was last used: milliseconds since 1970 UTC; ``None``: not in 14 days.
    last: int | None
    #: Whether the key was used within 24 hours.
    today: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShownKey:
    """A key as the page shows it."""

    key: Key
    header: str
    #: ``None``: the storage does not answer.
    use: Use | None
    #: The id of the key that this one replaces, while both are accepted.
    replaces: str | None = None


class KeysHandler(ConsoleHandler):
    """The keys of a workspace."""

    async def get(self) -> None:
        """Show the keys."""
        await self._show()

    async def post(self) -> None:
        """Change a key or send a test event, then show the keys."""
        store, workspaces = self.console.store, self.console.config.workspaces
        actor, now = self.actor, self.console.now()
        key_id = self.get_body_argument("id", "")
        expected = self.whole("version")
        action = self.get_body_argument("action", "")
        if action == "disable" and await self._asks(key_id):
            self.go("keys", ask=key_id)
            return
        chosen = None
        try:
            if action == "create":
                for problem in self.console.config.cors.missing(
                    words(self.get_body_argument("origins", ""))
                ):
                    raise EngageError(problem)
            if action in ("create", "rotate"):
                name = self.get_body_argument("name", "")[:MAX_NAME_LENGTH]
                options = {
                    "kind": self.get_body_argument("kind", ""),
                    "origins": words(self.get_body_argument("origins", "")),
                    "operations": words(self.get_body_argument("operations", "")),
                    "rate": rate_of(self.get_body_argument("rate", "")),
                }
                if action == "rotate":
                    name = f"{REPLACES}{key_id}"
                    keys = {key.id: key for key in await self._keys()}
                    if key_id not in keys:
                        raise EngageError(f"the key {key_id!r} does not exist; reload the page")
                    options = options_of(keys[key_id])
                    key_id = _free_id(key_id, keys)
                made = await self.console.reader.read(
                    create_key(
                        store,
                        workspaces,
                        self.workspace.id,
                        key_id,
                        name=name,
                        options={option: chosen for option, chosen in options.items() if chosen},
                        actor=actor,
                        now=now,
                    )
                )
                if made.kind == "server":
                    # No redirect: a secret is shown in this answer, and never again.
                    await self._show(made=made)
                    return
            elif action == "test":
                sent, problem = await send_test_event(self)
                if problem:
                    await self._show(problem)
                    return
                key_id, chosen = sent, self.get_query_argument("key", "")
            elif action in _STATES:
                await self.console.reader.read(
                    change_key(
                        store,
                        workspaces,
                        self.workspace.id,
                        key_id,
                        _STATES[action],
                        actor=actor,
                        now=now,
                        expected_version=expected,
                        notes=erasures_path(self.console.config),
                    )
                )
            else:
                raise HTTPError(400, reason="This page has no such action")
        except StorageUnavailable:
            raise
        except EngageError as error:
            self.set_status(400)
            await self._show(str(error))
            return
        self.go("keys", key=chosen, done=action, id=key_id)

    async def _asks(self, key_id: str) -> bool:
        """Return whether to ask before a key is disabled: it may be in use."""
        if self.get_body_argument("sure", ""):
            return False
        use = _use(key_id, await self.numbers("1h"), await self.numbers("14d"))
        return self.outage is None and (use is None or use.today)

    async def _keys(self) -> Sequence[Key]:
        """Return the keys of the workspace, as they are in the store now."""
        workspaces = self.console.config.workspaces
        stored = await self.read(read_key_records(self.console.store))
        if stored is None and self.unverified:
            return []
        if stored is None:  # The store does not answer: use the last known keys.
            return [key for key in self.console.app.keys.keys if self._is_here(key)]
        return [key for key in effective_keys(workspaces, stored).keys if self._is_here(key)]

    def _is_here(self, key: Key) -> bool:
        return key.workspace_id == self.workspace.id

    async def _show(self, error: str = "", *, made: Key | None = None) -> None:
        keys = await self._keys()
        hour, fortnight = await self.numbers("1h"), await self.numbers("14d")
        active = {key.id for key in keys if not key.disabled}
        # Server keys are secrets: they are in no snippet.
        public = {key.id: key.key for key in keys if key.key and key.id in active}
        shown = [
            ShownKey(
                key=key,
                header="Basic " + base64.b64encode(f"{key.key}:".encode()).decode(),
                use=_use(key.id, hour, fortnight),
                replaces=_replaced(key, active),
            )
            for key in keys
        ]
        chosen = self.get_query_argument("key", "")
        if chosen not in public:
            # The key of the last change, such as a new one.
            changed = self.get_query_argument("id", "")
            chosen = changed if changed in public else next(iter(public), "")
        key = public.get(chosen, "YOUR_WRITE_KEY")
        url = server_url(self.console.config)
        ask = self.get_query_argument("ask", "")
        self.page(
            "keys.html",
            title="Keys",
            nav="keys",
            shown=[row for row in shown if not row.key.archived],
            archived=[row for row in shown if row.key.archived],
            uses={row.key.id: row.use for row in shown},
            asked=next((row for row in shown if row.key.id == ask and ask in active), None),
            error=error,
            made=made,
            done=self.get_query_argument("done", "") if made is None else "create",
            changed=self.get_query_argument("id", "") if made is None else made.id,
            url=url,
            public=self.console.config.server.public_url is not None,
            write_key=key,
            snippets=snippets(url, key),
            chosen=chosen,
            public_keys=list(public),
            secret=bool(self.workspace.subscription_secrets),
            key_id=KEY_ID.pattern,
            max_name=MAX_NAME_LENGTH,
            shown_rate=shown_rate,
        )


_STATES: Final[Mapping[str, KeyState]] = {
    "disable": "disabled",
    "enable": "enabled",
    "archive": "archived",
}


def _free_id(key_id: str, taken: Collection[str]) -> str:
    """Return the id of the key that replaces another: ``ios``, ``ios-2``, ``ios-3`` …"""
    stem, _, number = key_id.rpartition("-")
    if not stem or not number.isdecimal():
        stem = key_id
    stem = stem[:58]
    return next(name for n in range(2, len(taken) + 3) if (name := f"{stem}-{n}") not in taken)


def _replaced(key: Key, active: set[str]) -> str | None:
    """Return the id of the key that this one replaces, while both are accepted."""
    if not key.name.startswith(REPLACES) or key.disabled:
        return None
    old = key.name.removeprefix(REPLACES)
    return old if old in active else None


def _use(key_id: str, hour: Overview | None, fortnight: Overview | None) -> Use | None:
    if hour is None or fortnight is None:
        return None
    minutes = hour.keys.get(key_id, [0] * len(hour.at))
    hours = fortnight.keys.get(key_id, [0] * len(fortnight.at))
    used = [at for at, count in zip(hour.at, minutes, strict=True) if count]
    used = used or [at for at, count in zip(fortnight.at, hours, strict=True) if count]
    return Use(
        minutes=minutes,
        rate=sum(minutes[-RATE_MINUTES:]) / RATE_MINUTES,
        last=used[-1] if used else None,
        today=any(hours[-25:]),
    )
