# SPDX-License-Identifier: Apache-2.0
"""Reads and changes the subscription choices of users and visitors, authorised by a signed link.

A choice belongs to the user or visitor in the signature, and crosses to no other one. An
unsubscription by a link that signs an address is also an objection of the address, whoever has it:
a suppression, which a subscription by such a link lifts again.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import uuid
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
)
from typing import TYPE_CHECKING, Any, Final

import orjson

from engage.api import (
    ADDRESS_TRAITS,
    DAY_MS,
    Kind,
    PayloadInvalid,
    Preferences,
    Subject,
    SubscriptionChange,
    Suppression,
    identifier_value,
    suppressed_address,
)
from engage.errors import (
    MAX_ERRORS,
    ApiError,
    Problem,
    from_problems,
    link_expired,
    pointer,
    quote,
)
from engage.ids import uuid7
from engage.reading.scans import all_pages
from engage.reading.time_limit import within
from engage.store.facade import Storage
from engage.store.suppressions import forms
from engage.subscriptions.links import BY_ID, STEP, Links, Person
from engage.times import parse_field
from engage.webhooks import form_fields

if TYPE_CHECKING:
    from engage.config import Workspace

__all__ = [
    "API",
    "CHANGE_EVENT",
    "CHOICES",
    "OBJECTION",
    "Source",
    "Subscriptions",
    "body_of_form",
]

#: The event with which clients of Dittofeed change a choice. Here it changes none, because anyone
#: can send it: a write key is public.
CHANGE_EVENT: Final = "DFSubscriptionChange"

#: The reason of a suppression: somebody unsubscribed by a link or a row that names the address.
OBJECTION: Final = "objection"

#: Characters of a ``User-Agent`` that are kept: those of browsers have at most about 200.
_USER_AGENT: Final = 256

#: The name of a field of a form that is a change, and its values.
_CHANGE: Final = re.compile(r"changes\[([^\[\]]+)\]")
_SECONDS: Final = re.compile(r"[1-9][0-9]{0,15}", re.ASCII)
CHOICES: Final[Mapping[str, bool]] = {"true": True, "1": True, "false": False, "0": False}

#: Namespace of the ids of changes.
_CHANGE_NAMESPACE: Final = uuid.UUID("2f7a1c55-94c1-5c6e-8f0a-6f4b4a1f9e02")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """How and from where a person makes a change, for its history."""

    #: See :attr:`engage.api.SubscriptionChange.how`.
    how: str
    user_agent: str = ""
    #: The IP address of the client; it is stored only if the workspace keeps addresses.
    address: str = ""


#: A request of which nothing else is known.
API: Final = Source(how="api")


def body_of_form(data: bytes) -> dict[str, Any]:
    """Return the JSON body that means the same as ``application/x-www-form-urlencoded``.

    ``changes[<group>]`` and ``v`` are ``true``, ``1``, ``false`` or ``0``; other fields are texts.

    :raises ApiError: 400 ``invalid_payload``; its pointers name fields of the form.
    """
    try:
        pairs = form_fields(data)
    except PayloadInvalid as error:
        raise ApiError("invalid_payload", str(error)) from None
    seen: set[str] = set()
    body: dict[str, Any] = {}
    for name, text in pairs:
        if name in seen:
            raise _wrong(name, "is in the form more than once")
        seen.add(name)
        change = _CHANGE.fullmatch(name)
        if change is not None:
            if text not in CHOICES:
                raise _wrong(name, f'must be true, false, 1 or 0, not "{quote(text)}"')
            body.setdefault("changes", {})[change[1]] = CHOICES[text]
        elif name == "v":
            body[name] = CHOICES.get(text, text)
        elif name.startswith("changes"):
            raise _wrong(name, "must be changes[<group>], with the id of one group")
        elif not name:
            raise _wrong(name, "a field of the form has no name")
        else:
            body[name] = int(text) if name == "expires" and _SECONDS.fullmatch(text) else text
    return body


def _wrong(field: str, message: str) -> ApiError:
    return from_problems([Problem(pointer(field), message)])


class Subscriptions:
    """Verifies and applies changes.

    :param clock: returns milliseconds since 1970 UTC.
    :param timeout: seconds that a call of the storage may take.
    :param resubscriptions: how often a day the links of one id can subscribe to groups from which
        it is unsubscribed.
    :param catch_up: with a log, waits until everything is stored that is in it now: see
        :class:`engage.log.catch_up.CatchUp`.
    :param erasures_key: of the hashes of erased people's addresses.
    """

    def __init__(
        self,
        workspaces: Iterable[Workspace],
        store: Storage,
        *,
        clock: Callable[[], int],
        timeout: float,
        resubscriptions: int,
        catch_up: Callable[[], Awaitable[None]] | None = None,
        erasures_key: str | None = None,
    ) -> None:
        by_id = {workspace.id: workspace for workspace in workspaces}
        #: Verifies the links.
        self.links = Links(by_id, store, clock=clock, timeout=timeout, catch_up=catch_up)
        self._store = store
        self._clock = clock
        self._timeout = timeout
        self._resubscriptions = resubscriptions
        self._erasures_key = erasures_key

    async def change(self, body: Mapping[str, Any], source: Source = API) -> Mapping[str, bool]:
        """Apply a change and return once it is durable.

        :param body: a body that is valid by the schema ``subscriptions``.
        :return: for every group of the workspace, whether the user is subscribed after the change.
        :raises ApiError: as :meth:`Links.person`; 403 ``link_expired`` if the change does more than
            to unsubscribe; 400 ``unknown_subscription_group``; 429 ``rate_limited``: see
            :meth:`apply`.
        :raises StorageUnavailable: if the change may not be durable.
        """
        person = await self.links.person(body)
        changes: Mapping[str, bool] = body["changes"]
        if person.expired and (not changes or any(changes.values())):
            raise link_expired()
        places = {group: "/changes" + pointer(group) for group in changes}
        _check_groups(person.workspace, places)
        if changes:
            state = await self.apply(person, changes, source, message_id=body.get("messageId"))
        else:
            state = (await self.preferences(person)).choices
        return {group: state[group] for group in changes} if person.expired else state

    async def apply(
        self,
        person: Person,
        changes: Mapping[str, bool],
        source: Source,
        *,
        message_id: str | None = None,
    ) -> Mapping[str, bool]:
        """Apply a change of a person whose link was verified.

        :param changes: group id → subscribed; the groups exist.
        :param message_id: with one, the same change again has no effect.
        :return: as :meth:`change`.
        :raises ApiError: 429 ``rate_limited`` if the id has been subscribed again too often today.
            Unsubscribing is never limited. Requests at the same moment may exceed the limit by
            their number.
        :raises StorageUnavailable: if the change may not be durable.
        """
        store, now = self._store, self._clock()
        workspace, subject = person.workspace, person.subject
        async with within(self._timeout):
            if any(changes.values()):
                await self._check_rate(store, workspace.id, subject, changes, now)
            # A link from before may be a visitor's: see :mod:`engage.subscriptions.links`.
            stopped = {group: False for group, on in changes.items() if not on}
            visitor = Subject(Kind.VISITOR, subject.id)
            parts = {visitor: stopped, subject: changes}
            choices, *_ = await store.apply_all(
                [
                    SubscriptionChange(
                        id=_change_id(message_id, whose, some, now),
                        workspace_id=workspace.id,
                        subject=whose,
                        choices=dict(some),
                        at=now,
                        how=source.how,
                        secret=person.secret,
                        user_agent=source.user_agent[:_USER_AGENT],
                        address=source.address if workspace.keep_addresses else "",
                    )
                    for whose, some in reversed(parts.items())
                    if some
                ]
            )
            # Not of a change that was made before, and undone since.
            held = {group: on for group, on in changes.items() if choices.get(group) is on}
            await self._object(person, held, now, source.how)
        return _of_all(workspace, choices)

    async def _object(
        self, person: Person, changes: Mapping[str, bool], now: int, how: str
    ) -> None:
        """Suppress the address in a link, or lift this, for the groups of a change."""
        store, workspace = self._store, person.workspace
        named = person.identifier_key, person.identifier
        objections = _objections(workspace, *named, changes, now, how)
        if not objections:
            return
        named_addresses = {(row.channel, row.address) for row in objections}
        addresses = forms(self._erasures_key, workspace.id, named_addresses)
        lifted = [
            dataclasses.replace(row, at=max(now, row.at + 1), lifted=True, how=how)
            for row in await store.suppressions(workspace.id, addresses)
            if row.reason == OBJECTION and changes.get(row.group_id)
        ]
        await store.suppress([*(row for row in objections if not row.lifted), *lifted])

    async def preferences(self, person: Person) -> Preferences:
        """Return the choice of a person for every group, and what is suppressed of the addresses:
        the one in the link, or else those that surely are this user's.

        :raises StorageUnavailable: if they could not be read.
        """
        store, named = self._store, (person.identifier_key, person.identifier)
        async with within(self._timeout):
            stored = await store.preferences(
                person.workspace.id,
                person.subject,
                None if person.identifier_key in BY_ID else named,
                self._erasures_key,
            )
        return dataclasses.replace(stored, choices=_of_all(person.workspace, stored.choices))

    async def _check_rate(
        self,
        store: Storage,
        workspace_id: str,
        subject: Subject,
        changes: Mapping[str, bool],
        now: int,
    ) -> None:
        """:raises ApiError: see :meth:`apply`."""
        state = await store.state(workspace_id, subject)
        if not any(chosen and state.get(group) is False for group, chosen in changes.items()):
            return
        read = functools.partial(store.history, workspace_id, subject, since=now - DAY_MS)
        records = [row async for row in all_pages(read, attempts=1)]
        times = {row.change_id: row.at for row in records if row.after and row.before is False}
        if len(times) >= self._resubscriptions:
            oldest = sorted(times.values())[-self._resubscriptions]
            raise ApiError(
                "rate_limited",
                f"the user was subscribed again {len(times)} times within a day;"
                " unsubscribing is always possible",
                retry_after=(oldest + DAY_MS - now) // 1000 + 1,
            )

    async def changes_of(
        self, workspace: Workspace, row: Mapping[str, Any], *, everyone: bool = False
    ) -> AsyncGenerator[SubscriptionChange, None]:
        """Yield the changes that a row of an import means: one for each user and visitor that the
        row names.

        :param row: valid by the schema ``choice``.
        :param everyone: whether an address names all users and visitors who have it, and not only
            the one user whose address it surely is.
        :raises ApiError: 400, if the row is wrong.
        """
        group, now = str(row["groupId"]), self._clock()
        _check_groups(workspace, {group: "/groupId"})
        if row.get("workspaceId", workspace.id) != workspace.id:
            raise from_problems([Problem("/workspaceId", f"is not {workspace.id}")])
        at = parse_field({**row}, "updatedAt") if "updatedAt" in row else None
        if not 0 <= (at or 0) <= now:
            raise from_problems([Problem("/updatedAt", "must be between 1970 and now")])
        changes, how = {group: bool(row["subscribed"])}, row.get("how", "import")
        # The content is the message id: the same row again is the same change.
        content = orjson.dumps(["import", row.get("updatedAt"), how]).decode()
        async for subject in self._subjects(workspace, row, everyone):
            yield SubscriptionChange(
                id=_change_id(content, subject, changes, now),
                workspace_id=workspace.id,
                subject=subject,
                choices=changes,
                at=now if at is None else at,
                how=how,
                dated=at is not None,
            )

    def objections_of(self, workspace: Workspace, row: Mapping[str, Any]) -> list[Suppression]:
        """Return what a row of an import that :meth:`changes_of` has read says about an address."""
        if row["subscribed"] or "userId" in row or "anonymousId" in row:
            return []
        at = parse_field({**row}, "updatedAt") if "updatedAt" in row else self._clock()
        named, changes = (row["identifierKey"], row["identifier"]), {str(row["groupId"]): False}
        return _objections(workspace, *named, changes, at, row.get("how", "import"))

    async def _subjects(
        self, workspace: Workspace, row: Mapping[str, Any], everyone: bool
    ) -> AsyncGenerator[Subject, None]:
        """Yield the user and visitor that a row of an import names, or else those that have its
        identifier: see :meth:`changes_of`."""
        kinds = {"userId": Kind.USER, "anonymousId": Kind.VISITOR}
        named = [name for name in kinds if name in row]
        for name in named:
            if type(row[name]) is float:  # JSON Schema accepts 1.0 as an integer
                raise from_problems([Problem(pointer(name), "must be a string or an integer")])
        for name in named:
            yield Subject(kinds[name], str(row[name]))
        if named:
            return
        key, value = row["identifierKey"], identifier_value(row["identifierKey"], row["identifier"])
        if key not in workspace.subscription_identifiers:
            raise from_problems([Problem("/identifierKey", "is not in subscription_identifiers")])
        store, after = self._store, None
        subjects, certain = list[Subject](), list[Subject]()
        while value is not None:
            async with within(self._timeout):
                page = await store.holders(workspace.id, key, value, after=after, limit=STEP)
                for who in page.items if not everyone else ():
                    own = await store.certain(workspace.id, who.id) if who.kind is Kind.USER else {}
                    certain += [who] if own.get(key) == value else []
            subjects += page.items
            if (after := page.cursor) is None:
                break
        chosen = subjects if everyone else certain
        if chosen and (everyone or chosen == chosen[:1]):
            for subject in chosen:
                yield subject
        elif not self.objections_of(workspace, row):
            raise from_problems([Problem("/identifier", _unclear(len(subjects), len(certain)))])


def _of_all(workspace: Workspace, choices: Mapping[str, bool]) -> dict[str, bool]:
    """Return the choice for every group of a workspace."""
    return {
        group.id: choices.get(group.id, group.type == "opt_out")
        for group in workspace.subscription_groups
    }


def _unclear(holders: int, certain: int) -> str:
    """Return why it is not clear which user an address names."""
    if not holders:
        return "belongs to no user and no visitor"
    whose = f"surely belongs to {certain} users" if certain else "surely belongs to no user"
    return f"{whose}, and {holders} users and visitors have it: name the user, or import with --all"


def _objections(
    workspace: Workspace,
    key: str,
    identifier: str,
    changes: Mapping[str, bool],
    at: int,
    how: str,
) -> list[Suppression]:
    """Return what changes by an address say about it, for those groups of which the channel sends
    to such an address: nothing must be sent, or (``lifted``) this is over."""
    return [
        Suppression(
            workspace_id=workspace.id,
            channel=group.channel,
            address=address,
            group_id=group.id,
            reason=OBJECTION,
            at=at,
            lifted=changes[group.id],
            how=how,
        )
        for group in workspace.subscription_groups
        if group.id in changes
        and ADDRESS_TRAITS.get(group.channel) == key
        and (address := suppressed_address(group.channel, identifier)) is not None
    ]


def _check_groups(workspace: Workspace, places: Mapping[str, str]) -> None:
    """Check that groups exist.

    :param places: group id → JSON pointer to it.
    :raises ApiError: 400 ``unknown_subscription_group``.
    """
    groups = {group.id for group in workspace.subscription_groups}
    listed = ", ".join(sorted(groups)[:MAX_ERRORS]) or "it has none"
    unknown = [
        Problem(place, f"is not a subscription group of the workspace ({listed})")
        for group, place in places.items()
        if group not in groups
    ]
    if unknown:
        raise from_problems(unknown, "unknown_subscription_group")


def _change_id(
    message_id: str | None, subject: Subject, changes: Mapping[str, bool], now: int
) -> str:
    """Return the id that makes a change idempotent.

    It depends on the whole change and not only on the message id, because that is not signed: a
    user could block the changes of another by sending their message ids first.
    """
    if not message_id:
        return uuid7(now)
    # Earlier versions made the ids of users' changes like this.
    kind = [subject.kind] if subject.kind is Kind.VISITOR else []
    name = orjson.dumps([message_id, subject.id, changes, *kind], option=orjson.OPT_SORT_KEYS)
    return str(uuid.uuid5(_CHANGE_NAMESPACE, name.decode()))
