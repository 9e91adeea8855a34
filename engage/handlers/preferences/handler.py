# SPDX-License-Identifier: Apache-2.0
"""The preferences page: ``GET`` and ``HEAD`` show it, only ``POST`` changes something.

Scanners of e-mails open every link, so a link never changes a choice by itself. A ``POST`` is the
one-click unsubscription of a mail program (RFC 8058), or a form of the page. There is no session
and no cookie: the signature in the query is the permission, for all of these.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_plus

from engage.api import PayloadInvalid, Preferences
from engage.errors import ApiError, Limit, body_too_large
from engage.handlers.base import Handler
from engage.handlers.subscriptions import arguments_of, link_of, source_of
from engage.keys.auth import KEYLESS_BODY
from engage.subscriptions.choices import OBJECTION
from engage.subscriptions.links import BY_ID
from engage.webhooks import form_fields

if TYPE_CHECKING:
    from engage.config import SubscriptionGroup, Workspace
    from engage.handlers.preferences.looks import Look, Words
    from engage.subscriptions.links import Person

__all__ = ["ONE_CLICK_BODY", "PreferencesHandler", "changes_of_form", "is_one_click", "stopped"]

#: Mail programs send about 200 bytes.
ONE_CLICK_BODY: Final = Limit(4096, "of a one-click unsubscription")

#: In ``multipart/form-data``. The example of RFC 8058 has another boundary in its header than in
#: its body (erratum 5117), so that is not compared.
_ONE_CLICK_PART: Final = re.compile(
    rb'name="?List-Unsubscribe"?[^\n]*\n(?:[^\r\n]+\r?\n)*\r?\nOne-Click\s', re.IGNORECASE
)

#: The words of RFC 8058 in another form, such as JSON, and the fields of the page, of which the
#: program sends none.
_WORDS: Final = re.compile(r"(?<![\w-])list-unsubscribe\W+one-click\b", re.IGNORECASE)
_OWN: Final = re.compile(r"(?<![\w-])(?:shown|group|subscribe|unsubscribe(?:_channel|_all)?)\b")

#: The names of errors among the texts; of others: ``failed``, and ``unavailable`` for a 5xx.
_TEXTS: Final[Mapping[str, str]] = {"invalid_user_hash": "invalid", "rate_limited": "limited"}

#: What a page does not have unless it is given.
_EMPTY: Final[Mapping[str, object]] = {
    **dict.fromkeys(("status", "address", "shown"), ""),
    **dict.fromkeys(("offers", "channels", "after"), ()),
}

#: A button: the name of its field, the value, and the text.
_Offer = tuple[str, str, str]


def is_one_click(content_type: str, body: bytes) -> bool:
    """Return whether a body is that of RFC 8058: ``List-Unsubscribe=One-Click``.

    :raises ApiError: 413, if it is, and is too large; 400 ``invalid_payload`` if it is no form.
    """
    if content_type.strip().lower().startswith("multipart/"):
        # Nothing else is sent like this. The search takes the square of the size.
        if len(body) > ONE_CLICK_BODY.bytes:
            raise body_too_large(ONE_CLICK_BODY)
        return _ONE_CLICK_PART.search(body) is not None
    one_click = any(
        name.lower() == "list-unsubscribe" and value.strip().lower() == "one-click"
        for name, value in _fields(body)
    )
    if one_click and len(body) > ONE_CLICK_BODY.bytes:
        raise body_too_large(ONE_CLICK_BODY)
    return one_click


def means_one_click(body: bytes) -> bool:
    """Return whether a body can only mean one click, if it is sent to a link that names what to
    stop: it is empty, or has the words of RFC 8058 in another form and no field of the page."""
    if len(body) > ONE_CLICK_BODY.bytes:
        return False
    text = unquote_plus(body.decode("utf-8", "replace"))
    return not text.strip() or bool(_WORDS.search(text) and not _OWN.search(text))


def _fields(body: bytes) -> Sequence[tuple[str, str]]:
    try:
        return form_fields(body)
    except PayloadInvalid as error:
        raise ApiError("invalid_payload", str(error)) from None


def stopped(workspace: Workspace, group_id: str) -> list[SubscriptionGroup]:
    """Return the groups that one click on a link stops.

    :param group_id: the group that the link names; if there is none with this id, all are stopped.
    """
    groups = workspace.subscription_groups
    for group in groups:
        if group.id == group_id:
            if workspace.preferences_page.one_click == "group":
                return [group]
            return [other for other in groups if other.channel == group.channel]
    return list(groups)


def changes_of_form(workspace: Workspace, body: bytes) -> dict[str, bool]:
    """Return the changes that a form of the page means.

    Of the choices, only those that were shown and are not as they were shown any more: another page
    may have changed the others, and a group may have been added or removed since.

    :raises ApiError: 400 ``invalid_payload``, if it is not a form of the page.
    """
    groups = workspace.subscription_groups
    fields = _fields(body)
    for name, value in fields:
        if name in ("unsubscribe", "subscribe"):
            return {group.id: name == "subscribe" for group in groups if group.id == value}
        if name == "unsubscribe_channel":
            return {group.id: False for group in groups if group.channel == value}
        if name == "unsubscribe_all":
            return {group.id: False for group in groups}
    shown = " ".join(value for name, value in fields if name == "shown").split()
    if not shown:
        raise ApiError("invalid_payload", "this is neither a form of the page nor one click")
    ticked = {value for name, value in fields if name == "group"}
    before = {box.rpartition(":")[0]: box.endswith(":1") for box in shown}
    return {
        group.id: group.id in ticked
        for group in groups
        if group.id in before and before[group.id] != (group.id in ticked)
    }


class PreferencesHandler(Handler):
    """``/api/public/subscription-management/page``."""

    #: Whether a link was verified, so that an error is not about it.
    _verified = False

    def check(self) -> None:
        """Refuse a body by its encoding, then its length."""
        if self.request.method == "POST":
            self.body_limit = KEYLESS_BODY
            self.check_body()
            self.exchange.set_max_body_size(self.body_limit.bytes)
            if self.encoding != "identity":
                raise ApiError("unsupported_encoding", "send the form without compressing it")

    def check_length(self) -> None:
        """Accept a request without a body, too: see :func:`means_one_click`."""
        if self.request.length or self.request.chunked:
            super().check_length()

    async def get(self) -> None:
        """Show the page."""
        person = await self.services.pipeline.person(link_of(self.request))
        await self._show(person, asks=True)

    head = get

    async def post(self) -> None:
        """Change what the form or one click says, then show the page."""
        person = await self.services.pipeline.person(link_of(self.request))
        self._verified = True
        words = self._words(look := self.services.looks.of(person.workspace.id))
        content_type = self.request.fields.get("Content-Type", "")
        # A link of a message with which one unsubscribes; ``sub=1`` is in one that subscribes.
        stops = {"0": True, "": bool(self._query("s"))}.get(self._query("sub"), False)
        if (stops and means_one_click(self.body)) or is_one_click(content_type, self.body):
            changes = {group.id: False for group in stopped(person.workspace, self._query("s"))}
            await self._choose(person, changes, "one-click")
            self._answer(look, words, heading="title", status=_done(person, changes, words))
            return
        choices = changes_of_form(person.workspace, self.body)
        changes = {group: on for group, on in choices.items() if not (on and person.expired)}
        if person.expired and not changes:
            await self._show(person, asks=True, code=403 if choices else 200)
            return
        if changes:
            await self._choose(person, changes, "page")
        shown = any(name == "shown" for name, _ in _fields(self.body))
        # Of a form that was sent after the link had expired, only a part may be saved.
        saved = shown and changes == choices
        status = words.text("saved") if saved or not changes else _done(person, changes, words)
        await self._show(person, status=status)

    async def _choose(self, person: Person, changes: Mapping[str, bool], how: str) -> None:
        await self.services.pipeline.choose(person, changes, source_of(self, how))

    # ---------------------------------------------------------------------------------- the page
    async def _show(
        self,
        person: Person,
        *,
        status: str = "",
        asks: bool = False,
        code: int = 200,
    ) -> None:
        """Answer with the page.

        :param status: what was done.
        :param asks: whether the page first asks what the link is about.
        """
        look = self.services.looks.of(person.workspace.id)
        words = self._words(look)
        groups = person.workspace.subscription_groups
        group_id = self._query("s")
        named = next((group for group in groups if group.id == group_id), None)
        wish = self._query("sub")
        stops = wish != "1"
        everything = ("unsubscribe_all", "1", words.text("unsubscribe_all"))
        if person.expired:
            heading, detail = ("expired_title", "expired") if asks else ("title", "")
            offers = [*_offers(person, named, words), everything] if asks else []
            self._answer(
                look, words, heading=heading, detail=detail, status=status, offers=offers, code=code
            )
            return
        preferences = await self.services.pipeline.preferences(person)
        state = preferences.choices
        offers, heading, after = [], "title", [everything]
        if asks and named is not None and state[named.id] != stops:
            # There is nothing to ask any more.
            status = _done(person, {named.id: not stops}, words)
        elif asks and named is not None and stops:
            heading, offers = "unsubscribe_title", _offers(person, named, words)
        elif asks and named is not None:
            label = words.text("subscribe", group=words.group(named))
            heading, offers = "subscribe_title", [("subscribe", named.id, label)]
        elif asks and wish == "0":
            heading, offers, after = "unsubscribe_title", [everything], []
        self._answer(
            look,
            words,
            heading=heading,
            detail="" if offers else "intro",
            status=status,
            address=""
            if person.identifier_key in BY_ID
            else words.text("recipient", address=person.identifier),
            offers=offers,
            channels=_channels(person, preferences, words),
            shown=" ".join(f"{group.id}:{state[group.id]:d}" for group in groups),
            after=after if groups else [],
        )

    def answer_error(self, error: ApiError, headers: Mapping[str, str]) -> None:
        """Answer with a page that does not tell which workspaces there are."""
        text = _TEXTS.get(error.code, "unavailable" if error.status >= 500 else "failed")
        if error.code == "rate_limited" and not self._verified:
            text = "invalid"  # In place of a 401: see :mod:`engage.keys.limits`.
        look = self.services.looks.neutral
        words = self._words(look)
        heading = f"{text}_title"
        self._answer(look, words, heading=heading, detail=text, code=error.status, headers=headers)

    def _answer(
        self,
        look: Look,
        words: Words,
        *,
        heading: str,
        detail: str = "",
        code: int = 200,
        headers: Mapping[str, str] | None = None,
        **values: object,
    ) -> None:
        """Send the page.

        :param heading: the name of a text, as is ``detail``.
        :param values: the other names that ``page.html`` lists, unless they are empty.
        """
        texts = {
            "heading": words.text(heading),
            "detail": words.text(detail, name=look.name) if detail else "",
        }
        body = look.page(words=words, **{**_EMPTY, **values, **texts})
        sent = {
            # The URL is a permission: it must not leak, and the page must not be kept or framed.
            "Content-Security-Policy": look.policy,
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "X-Robots-Tag": "noindex",
            "Content-Language": words.language,
        }
        self.answer(
            body,
            status=code,
            content_type="text/html; charset=utf-8",
            headers={**(headers or {}), **sent},
        )

    def _query(self, name: str) -> str:
        """Return an argument of the query that is not signed; ``""`` if it has none."""
        return self._arguments.get(name, [b""])[0].decode("utf-8", "replace")

    @functools.cached_property
    def _arguments(self) -> Mapping[str, list[bytes]]:
        return arguments_of(self.request)

    def _words(self, look: Look) -> Words:
        return look.words(self._query("lang"), self.request.fields.get("Accept-Language", ""))


def _offers(person: Person, named: SubscriptionGroup | None, words: Words) -> list[_Offer]:
    """Return the buttons with which a link unsubscribes, in the order of what one click does."""
    if named is None:
        return []
    offer = ("unsubscribe", named.id, words.text("unsubscribe", group=words.group(named)))
    channel = named.channel
    groups = [group for group in person.workspace.subscription_groups if group.channel == channel]
    if len(groups) == 1:
        return [offer]
    label = words.of_channel("unsubscribe_channel", channel)
    both = [offer, ("unsubscribe_channel", channel, label)]
    return both if person.workspace.preferences_page.one_click == "group" else both[::-1]


def _channels(
    person: Person, preferences: Preferences, words: Words
) -> list[tuple[str, str, list[tuple[str, str, bool]]]]:
    """Return the choices by channel, with a note where something is not sent anyway."""
    # Who objected is shown as unsubscribed, unless it was somebody else with the address.
    silent = {
        (suppression.channel, suppression.group_id)
        for suppression in preferences.suppressions
        if suppression.reason != OBJECTION or preferences.choices.get(suppression.group_id)
    }
    by_channel: dict[str, list[SubscriptionGroup]] = {}
    for group in person.workspace.subscription_groups:
        by_channel.setdefault(group.channel, []).append(group)
    return [
        (
            words.of_channel("channel", channel),
            _note(channel, groups, silent, words),
            [(group.id, words.group(group), preferences.choices[group.id]) for group in groups],
        )
        for channel, groups in by_channel.items()
    ]


def _note(
    channel: str,
    groups: Sequence[SubscriptionGroup],
    silent: Collection[tuple[str, str]],
    words: Words,
) -> str:
    """Return what is not sent to the person in a channel, whatever the choices are.

    :param silent: suppressed channels and groups; without a group, it is all of the channel.
    """
    if (channel, "") in silent:
        return words.text("suppressed")
    names = [words.group(group) for group in groups if (channel, group.id) in silent]
    if not names:
        return ""
    return words.text("suppressed_groups", groups=words.text("separator").join(names))


def _done(person: Person, changes: Mapping[str, bool], words: Words) -> str:
    """Return a sentence about changes that all go in one direction."""
    groups = [group for group in person.workspace.subscription_groups if group.id in changes]
    if not groups:
        return words.text("saved")
    subscribed = changes[groups[0].id]
    if len(groups) > 1 and len(groups) == len(person.workspace.subscription_groups):
        return words.text("unsubscribed_all")
    names = words.text("separator").join(words.group(group) for group in groups)
    return words.text("subscribed" if subscribed else "unsubscribed", groups=names)
