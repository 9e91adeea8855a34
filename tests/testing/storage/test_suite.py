# SPDX-License-Identifier: Apache-2.0
"""The conformance suite finds flaws: each storage here breaks one promise and fails its test."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
import sqlite3
import sys
from collections import ChainMap
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import hypothesis
import jsonschema
import orjson
import pytest
from _pytest.outcomes import Skipped

from engage.api import (
    MAX_RECORD_BYTES,
    OPERATOR_ORIGIN,
    Count,
    CountSum,
    DeadLetter,
    Event,
    Kind,
    Outcome,
    Page,
    Record,
    Status,
    StorageUnavailable,
    StoredLink,
    StoreProblem,
    Subject,
    SubscriptionChange,
    Suppression,
)
from engage.store.erasures import ERASURE
from engage.store.facade import Storage
from engage.testing import StorageConformance, harness, identify
from engage.testing.factories import user, visitor
from engage_plugins.sqlite.store import SqliteStorage
from support import flaws
from support.memory_store import MemoryEvents
from support.rules import RuleTests

given = functools.partial(flaws.given, SqliteStorage)
returned = functools.partial(flaws.returned, SqliteStorage)
#: Ascend, and are later than the times of the suite.
_NUMBERS = itertools.count(1_800_000_000_000)


def _mirrored(name: str) -> str:
    """Return a name that sorts the other way."""
    return "".join(chr(0x10000 + 0x7F - ord(one)) for one in name)


def _times(event: Event) -> tuple[int, int]:
    return event.received_at, event.timestamp


class Acknowledges(SqliteStorage):
    """Reports every event as stored."""

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        try:
            return await super().write(events)
        except StorageUnavailable:
            return [Outcome(Status.STORED)] * len(events)


class LastWins(SqliteStorage):
    """Returns the new event in place of the stored one."""

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        outcomes = await super().write(events)
        return [
            dataclasses.replace(outcome, stored=event.body) if outcome.stored else outcome
            for event, outcome in zip(events, outcomes, strict=True)
        ]


class AllOrNothing(SqliteStorage):
    """One event that cannot be stored fails its neighbours."""

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        try:
            for event in events:
                event.message_id.encode()
        except UnicodeEncodeError:
            return [Outcome(Status.REFUSED, "no text")] * len(events)
        return await super().write(events)


#: Ends a key at the first NUL, like a string in C.
StopsAtNul = given("write", message_id=lambda one: one.message_id.split("\0")[0])


class ForgetsTheCursor(SqliteStorage):
    """Skips the event right after the cursor."""

    async def scan(self, wanted: Any, *, after: str | None, limit: int) -> Page[Event]:
        after = after if after is None else str(int(after) + 1)
        return await super().scan(wanted, after=after, limit=limit)


#: The last write that arrives wins, whatever its time.
ByArrival = given("write", timestamp=lambda one: next(_NUMBERS))
#: At the same millisecond, the least id wins.
TiesTheOtherWay = given("write", message_id=lambda one: _mirrored(one.message_id))


class AppliesTwice(SqliteStorage):
    """Applies the changes of a duplicate, too."""

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        outcomes = await super().write(events)
        again = [
            dataclasses.replace(event, message_id=f"{event.message_id}~", origin="again")
            for event, outcome in zip(events, outcomes, strict=True)
            if outcome.status is Status.DUPLICATE
        ]
        await super().write(again)
        return outcomes


class OneAtATime(SqliteStorage):
    """Takes fewer writes at the same time than it declares."""

    concurrent_writes = 2
    _writing = False

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        if self._writing:
            raise RuntimeError("another write runs")
        self._writing = True
        try:
            return await super().write(events)
        finally:
            self._writing = False


class LooksTooEarly(SqliteStorage):
    """Looks for erasures before the transaction that stores an event."""

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        erasures = await self.records_version(ERASURE)
        await asyncio.sleep(0.05)
        if erasures == await self.records_version(ERASURE):
            return await super().write(events)
        # It knows of none.
        later = [dataclasses.replace(event, received_at=event.received_at + 9) for event in events]
        return await super().write(later)


#: Keeps a letter of an erased person.
KeepsErasedLetters = given("keep", received_at=lambda one: one.received_at + 9)
#: Takes the choice of an erased person for one that was made long ago.
KeepsErasedChoices = given("apply", dated=True)
#: Treats every change of a subscription as new.
ForgetsIds = given("apply", id=lambda one: f"{one.id}{next(_NUMBERS)}")
#: Dead letters of the API and of deliveries displace each other.
OneBudget = given("keep", origin="api")
#: Conflicts and refused items displace each other.
OneReserve = given("keep", reason="x")
#: Reports each letter as kept.
KeepsAll = returned("keep", lambda kept: [True] * len(kept))
#: Returns users in the wrong order.
YoungestFirst = returned("find_users", lambda found: {name: found[name][::-1] for name in found})
#: Stores removals of traits as events of a client.
IgnoresRemovals = given(
    "write", origin=lambda one: "api" if one.origin == OPERATOR_ORIGIN else one.origin
)
#: Applies removals of traits that a client sends.
AnyoneRemoves = given(
    "write", origin=lambda one: OPERATOR_ORIGIN if b"removed" in one.body else one.origin
)
#: Takes the client's time for the time of receipt.
ClaimsByTimestamp = given("write", received_at=lambda one: one.timestamp)


class KeepsEveryClaim(SqliteStorage):
    """Lets anyone make the claims of a user grow without bound."""

    bound = sys.maxsize

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._claims: dict[str, dict[str, int]] = {}

    async def write(self, events: Sequence[Event]) -> Sequence[Outcome]:
        for event in events:
            claims = self._claims.setdefault(str(event.user_id), {})
            value = orjson.loads(event.body)["traits"]["email"]
            if len(claims) < self.bound:
                claims[value] = min(event.received_at, claims.get(value, event.received_at))
        return await super().write(events)

    async def find_users(
        self, workspace_id: str, trait: str, values: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        found = await super().find_users(workspace_id, trait, values)
        return {
            value: sorted(users, key=lambda user: self._claims[user].get(value, sys.maxsize))
            for value, users in found.items()
        }


class KeepsNoLaterClaim(KeepsEveryClaim):
    """Treats a value as unclaimed when the user has had a hundred others."""

    bound = 100


#: Loses the claim of the hundredth value.
LosesTheHundredthClaim = returned(
    "find_users",
    lambda found: {name: users[:: -1 if name[:3] == "99@" else 1] for name, users in found.items()},
)
#: Returns the first users with an address only.
OnePageOfHolders = returned("holders", cursor=None)
#: Loses a trait that is null.
LosesNull = returned(
    "profile", traits=lambda one: {name: x for name, x in one.traits.items() if x is not None}
)


class SaysSomethingElse(SqliteStorage):
    """Raises an error of a library."""

    async def check(self) -> None:
        try:
            await super().check()
        except StorageUnavailable as error:
            raise RuntimeError("driver") from error


#: Sorts a page of the newest events by their own time.
RecentByTime = returned("recent", items=lambda page: sorted(page.items, key=_times, reverse=True))


class RecentByOffset(SqliteStorage):
    """Counts the newest events from the end, which moves."""

    async def recent(self, wanted: Any, *, before: str | None = None, limit: int) -> Page[Event]:
        skipped = int(before or 0)
        page = await super().recent(wanted, limit=skipped + limit)
        more = str(skipped + limit) if page.cursor is not None else None
        return Page(page.items[skipped:], more)


class RecentByReceipt(SqliteStorage):
    """Continues before the millisecond of the last event."""

    async def recent(self, wanted: Any, *, before: str | None = None, limit: int) -> Page[Event]:
        until = wanted.until if before is None else int(before)
        page = await super().recent(dataclasses.replace(wanted, until=until), limit=limit)
        return Page(page.items, str(page.items[-1].received_at) if page.items else None)


#: Returns recent events whatever their name, and origin, and end.
IgnoresNewFilters = given("recent", name=None, origin=None, until=None)
#: Finds no event if only the beginning of its name is wanted. It ends a name at a NUL.
TakesTheNameForAPrefix = given("scan", name=lambda one: one.name and one.name.split("\0")[0])
#: Does not know the newer fields of a letter.
OldLetters = given("keep", operation=None, envelope=None)


class FindsLettersOfAll(SqliteStorage):
    """Looks for a letter in every workspace."""

    async def dead_letter(self, workspace_id: str, letter_id: str) -> DeadLetter | None:
        page = await self.scan_dead_letters(None, after=None, limit=1000)
        return next((item for item in page.items if item.id == letter_id), None)


#: Returns each page of the newest letters in order of arrival.
OldestLettersFirst = returned("recent_dead_letters", items=lambda page: page.items[::-1])


#: Keeps no more of a change than an earlier version.
ForgetsTheSource = given("apply", secret="", user_agent="", address="")
#: Returns the whole history.
IgnoresSince = flaws.called(SqliteStorage, "history", since=0)


class OneNamespace(SqliteStorage):
    """Takes an anonymous id for a user id."""

    async def apply_all(
        self, changes: Sequence[SubscriptionChange]
    ) -> Sequence[Mapping[str, bool]]:
        found = [dataclasses.replace(change, subject=user(change.subject.id)) for change in changes]
        return await super().apply_all(found)


class CrossesLinks(SqliteStorage):
    """Gives a user the choices of its visitors."""

    async def state(self, workspace_id: str, subject: Subject) -> Mapping[str, bool]:
        profile = await self.profile(workspace_id, subject.id)
        names = () if profile is None else profile.anonymous_ids
        subjects = [*map(visitor, names), subject]
        states = [await SqliteStorage.state(self, workspace_id, one) for one in subjects]
        return ChainMap(*map(dict, states))


#: Loses some records.
LosesRecords = returned("history", items=lambda page: page.items[::2])
#: Takes the address of a lifted suppression for suppressed.
FindsLifted = given("suppress", lifted=False)
#: Ignores the case of addresses.
FoldsAddresses = given("suppress", address=lambda one: one.address.lower())
#: Has one suppression of an address.
OneReason = given("suppress", reason="any")


class LastSuppressionWins(SqliteStorage):
    """Keeps what arrived last."""

    async def suppress(self, suppressions: Sequence[Suppression]) -> None:
        for one in suppressions:
            later = dataclasses.replace(one, at=next(_NUMBERS), source_id=str(one.at))
            await super().suppress([later])

    async def suppressions(self, *arguments: Any) -> Sequence[Suppression]:
        suppressions = await super().suppressions(*arguments)
        return [dataclasses.replace(one, at=int(one.source_id)) for one in suppressions]

    async def scan_suppressions(self, *arguments: Any, **options: Any) -> Page[Suppression]:
        page = await super().scan_suppressions(*arguments, **options)
        return Page(
            [dataclasses.replace(item, at=int(item.source_id)) for item in page.items], page.cursor
        )


class DeletesLifted(SqliteStorage):
    """Forgets that a suppression was lifted."""

    async def suppress(self, suppressions: Sequence[Suppression]) -> None:
        for one in suppressions:
            at = next(_NUMBERS) if one.lifted else one.at
            known = await self.suppressions(one.workspace_id, [(one.channel, one.address)])
            if not one.lifted or known:
                await super().suppress([dataclasses.replace(one, at=at)])


class ScansByOffset(SqliteStorage):
    """Continues a scan after so many addresses."""

    async def scan_suppressions(
        self, workspace_id: str | None, *, after: str | None, limit: int
    ) -> Page[Suppression]:
        page = await super().scan_suppressions(workspace_id, after=None, limit=1000)
        items = sorted(page.items, key=lambda item: item.address)
        first = int(after or 0)
        more = str(first + limit) if len(items) > first + limit else None
        return Page(items[first : first + limit], more)


class ComparesBefore(SqliteStorage):
    """Compares the version in one step, and writes in another."""

    async def put_record(
        self, record: Record, *, expected_version: int | None = None
    ) -> int | None:
        if expected_version is not None:
            record.check()
            found = await self.get_record(record.kind, record.workspace_id, record.id)
            if (0 if found is None else found.version) != expected_version:
                return None
        return await super().put_record(record)


class ZeroMeansAny(SqliteStorage):
    """Takes the expected version 0 for none."""

    async def put_record(
        self, record: Record, *, expected_version: int | None = None
    ) -> int | None:
        return await super().put_record(record, expected_version=expected_version or None)


#: Cuts what is too long.
ChecksNoLimits = given(
    "put_record", body=lambda one: one.body[:MAX_RECORD_BYTES], id=lambda one: one.id[:256]
)
#: Ignores the case of the ids of records.
FoldsIds = given("put_record", id=lambda one: one.id.lower())


class SortsByUtf16(SqliteStorage):
    """Orders records as Java and JavaScript compare strings."""

    async def list_records(self, *arguments: Any, limit: int, **options: Any) -> Page[Record]:
        page = await super().list_records(*arguments, limit=limit, **options)
        items = sorted(
            page.items,
            key=lambda item: (item.kind, item.workspace_id, item.id.encode("utf-16-be")),
            reverse=options.get("reverse", False),
        )
        return Page(items, page.cursor)


class CountsRecords(SqliteStorage):
    """Takes the number of records for the version of a kind."""

    async def records_version(self, kind: str) -> int:
        return len((await self.list_records(kind, limit=1000)).items)


class ExpiresEveryKind(SqliteStorage):
    """Expires records of all kinds."""

    async def expire_records(self, kind: str, before: int, *, limit: int) -> int:
        await super().expire_records("audit", before, limit=limit)
        return await super().expire_records(kind, before, limit=limit)


class AddsUp(SqliteStorage):
    """Adds what is written to what is there."""

    async def put_counts(self, counts: Sequence[Count]) -> None:
        found = (await self.scan_counts(after=None, limit=1000)).items
        there = {dataclasses.replace(one, value=0): one.value for one in found}
        await super().put_counts(
            [
                dataclasses.replace(
                    count, value=count.value + there.get(dataclasses.replace(count, value=0), 0)
                )
                for count in counts
            ]
        )


class LastCountWins(SqliteStorage):
    """Replaces a register by what is written last."""

    async def put_counts(self, counts: Sequence[Count]) -> None:
        await self.expire_counts(60, 2**60, limit=1000)
        await super().put_counts(counts)


#: Makes one text of the labels.
JoinsLabels = given("put_counts", labels=lambda one: (",".join(one.labels),))
#: Keeps one register for all processes.
ForgetsProcesses = given("put_counts", process="")


class IncludesTheEnd(SqliteStorage):
    """Returns the sums of the step that begins at the end, too."""

    async def counts(self, step: int, *, since: int, until: int, **options: Any) -> Page[CountSum]:
        return await super().counts(step, since=since, until=until + 1, **options)


class ExpiresAllSteps(SqliteStorage):
    """Expires hours with the minutes."""

    async def expire_counts(self, step: int, before: int, *, limit: int) -> int:
        await super().expire_counts(3600, before, limit=limit)
        return await super().expire_counts(step, before, limit=limit)


#: Leaves the hours out of a copy.
ScansOneStep = returned(
    "scan_counts", items=lambda page: [item for item in page.items if item.step == 60]
)


#: Reports each link as one that counts.
HidesDecisions = returned(
    "scan_links", items=lambda page: [dataclasses.replace(item, counts=True) for item in page.items]
)


class LinksByName(SqliteStorage):
    """Takes the name of a link for its place."""

    async def scan_links(self, *, after: str | None, limit: int) -> Page[StoredLink]:
        page = await super().scan_links(after=None, limit=10_000)
        ordered = sorted(page.items, key=lambda item: item.anonymous_id)
        found = [one for one in ordered if after is None or one.anonymous_id > after][:limit]
        return Page(found, found[-1].anonymous_id if len(found) == limit else None)


class Alarms(SqliteStorage):
    """Finds a problem in a healthy store."""

    async def problems(self) -> AsyncIterator[StoreProblem | int]:
        async for problem in super().problems():
            yield problem
        yield StoreProblem(what="rows", message="none is in the store")


class LosesWhatItCannotWrite(SqliteStorage):
    """Reports records and counters as written while it cannot write."""

    async def put_record(
        self, record: Record, *, expected_version: int | None = None
    ) -> int | None:
        try:
            return await super().put_record(record, expected_version=expected_version)
        except StorageUnavailable:
            return 1


class WritesCountsLater(SqliteStorage):
    """Reports counters as written before they are."""

    async def put_counts(self, counts: Sequence[Count]) -> None:
        self._later = asyncio.ensure_future(super().put_counts(counts))


def suite(storage: type[SqliteStorage], monkeypatch: pytest.MonkeyPatch) -> StorageConformance:
    """Return the suite for this storage."""

    def register(register: Callable[..., None]) -> None:
        def make(options: Mapping[str, Any], context: Any) -> Storage:
            return storage.from_options(options, context)

        register("flawed", make, {})

    module = ModuleType("flawed")
    module.engage_register_storage = register  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flawed", module)

    class Suite(RuleTests, StorageConformance):
        plugin = "flawed"
        syncs_with_os = False

        def options(self, tmp_path: Path) -> Mapping[str, Any]:
            return {"path": str(tmp_path / "engage.db")}

        def break_store(self, options: Mapping[str, Any]) -> None:
            path = Path(options["path"])
            path.rename(path.with_suffix(".away"))
            path.mkdir()

        def mend_store(self, options: Mapping[str, Any]) -> None:
            path = Path(options["path"])
            path.rmdir()
            path.with_suffix(".away").rename(path)

    return Suite()


class DeletesEvents(SqliteStorage):
    """Forgets the identity of an erased event."""

    async def erase_events(self, events: Sequence[Event], marks: Sequence[bytes]) -> int:
        await super().erase_events(events, marks)
        with contextlib.closing(sqlite3.connect(self._settings.path)) as db, db:
            return db.execute("DELETE FROM events WHERE type = 'erased'").rowcount


class LeavesNoMarks(SqliteStorage):
    """Forgets whose an erased event was."""

    async def erase_events(self, events: Sequence[Event], marks: Sequence[bytes]) -> int:
        return await super().erase_events(events, [b""] * len(marks))


class KeepsLinks(SqliteStorage):
    """Remembers the links of an erased user."""

    async def erase_profile(self, workspace_id: str, kind: Kind, name: str) -> bool:
        links = await self.links_to(workspace_id, "a")
        done = await super().erase_profile(workspace_id, kind, name)
        for owner, at in links:
            again = identify("again", owner, anonymous_id="a")
            await self.reapply([dataclasses.replace(again, received_at=at)])
        return done


#: Returns no empty mark.
HasNoErasedBody = returned(
    "write",
    lambda found: [dataclasses.replace(one, stored=one.stored or None) for one in found],
)
#: Deletes the records of erased choices.
DeletesRecords = returned("erase_choices", lambda found: (found[0], 0))
#: Does not apply anything again.
AppliesOnce = given("reapply", type="track")
#: Returns the links in the order of the users.
OrdersUsers = returned("links_to", sorted)
#: Does not know the field.
IgnoresIds = flaws.returned(SqliteStorage, "scan", items=lambda page: page.items[:1])


FLAWS = [
    (LooksTooEarly, "test_nothing_of_before_comes_after_an_erasure"),
    (KeepsErasedLetters, "test_nothing_of_before_comes_after_an_erasure"),
    (KeepsErasedChoices, "test_nothing_of_before_comes_after_an_erasure"),
    (DeletesEvents, "test_an_erased_event_is_a_duplicate_of_nothing"),
    (DeletesEvents, "test_an_erased_identity_is_kept_by_other_processes_and_expires"),
    (LeavesNoMarks, "test_an_erased_event_is_a_duplicate_of_nothing"),
    (HasNoErasedBody, "test_an_erased_identity_is_kept_by_other_processes_and_expires"),
    (KeepsLinks, "test_what_happens_later_makes_a_new_user"),
    (DeletesRecords, "test_choices_are_erased_and_records_get_a_pseudonym"),
    (AppliesOnce, "test_changes_are_applied_again"),
    (OrdersUsers, "test_links_to_an_anonymous_id_are_in_the_order_of_receipt"),
    (IgnoresIds, "test_a_filter_has_ids"),
    (Acknowledges, "test_nothing_is_acknowledged_while_the_store_is_broken"),
    (Acknowledges, "test_acknowledged_events_survive_a_failure_while_writing"),
    (SaysSomethingElse, "test_every_method_raises_unavailable"),
    (LastWins, "test_the_first_event_of_an_identity_is_kept"),
    (LastWins, "test_repeats_within_one_write_are_duplicates"),
    (AllOrNothing, "test_an_unstorable_event_is_refused_alone"),
    (StopsAtNul, "test_similar_ids_of_events_are_different"),
    (ForgetsTheCursor, "test_a_scan_returns_events_in_order_of_arrival"),
    (ForgetsTheCursor, "test_a_scan_misses_nothing_during_concurrent_writes"),
    (ByArrival, "test_the_latest_value_of_each_trait_wins"),
    (ByArrival, "test_last_write_wins_in_every_order"),
    (TiesTheOtherWay, "test_last_write_wins_in_every_order"),
    (AppliesTwice, "test_a_retry_changes_nothing"),
    (OneAtATime, "test_writes_at_the_same_time_change_one_user"),
    (ForgetsIds, "test_a_change_is_applied_once_for_each_id"),
    (OneBudget, "test_a_budget_limits_the_number_of_dead_letters"),
    (OneReserve, "test_refused_items_leave_room_for_conflicts"),
    (KeepsAll, "test_each_letter_is_reported"),
    (YoungestFirst, "test_users_are_found_by_an_identifier"),
    (IgnoresRemovals, "test_an_operator_removes_traits"),
    (IgnoresRemovals, "test_last_write_wins_in_every_order"),
    (AnyoneRemoves, "test_only_an_operator_removes_traits"),
    (ClaimsByTimestamp, "test_the_user_with_the_oldest_claim_is_found_first"),
    (YoungestFirst, "test_a_claim_is_kept_while_the_user_has_another_value"),
    (KeepsEveryClaim, "test_the_first_hundred_claims_of_a_user_are_kept"),
    (KeepsNoLaterClaim, "test_the_first_hundred_claims_of_a_user_are_kept"),
    (LosesTheHundredthClaim, "test_the_first_hundred_claims_of_a_user_are_kept"),
    (OnePageOfHolders, "test_all_holders_of_a_value_are_read"),
    (LosesNull, "test_the_latest_value_of_each_trait_wins"),
    (RecentByTime, "test_recent_events_are_the_scan_in_reverse"),
    (RecentByOffset, "test_a_cursor_of_recent_events_survives"),
    (RecentByReceipt, "test_recent_events_are_the_scan_in_reverse"),
    (RecentByReceipt, "test_recent_events_are_read_while_others_write"),
    (IgnoresNewFilters, "test_filters_select_recent_events"),
    (TakesTheNameForAPrefix, "test_newer_filters_lose_no_event"),
    (OldLetters, "test_what_is_needed_to_replay_a_letter_is_kept"),
    (OldLetters, "test_an_envelope_counts_towards_the_budget"),
    (FindsLettersOfAll, "test_a_dead_letter_is_found_by_its_id"),
    (OldestLettersFirst, "test_recent_dead_letters_are_the_scan_in_reverse"),
    (ComparesBefore, "test_one_of_many_callers_writes_a_version"),
    (ZeroMeansAny, "test_a_record_is_written_if_it_has_the_expected_version"),
    (ZeroMeansAny, "test_one_of_many_callers_writes_a_version"),
    (ChecksNoLimits, "test_a_record_has_limits"),
    (FoldsIds, "test_similar_ids_of_records_are_different"),
    (SortsByUtf16, "test_records_are_listed_in_the_order_of_code_points"),
    (CountsRecords, "test_the_version_of_a_kind_grows_with_each_change"),
    (ExpiresEveryKind, "test_old_records_expire"),
    (AddsUp, "test_the_greatest_value_of_a_register_stays"),
    (LastCountWins, "test_the_greatest_value_of_a_register_stays"),
    (JoinsLabels, "test_similar_counters_are_different"),
    (ForgetsProcesses, "test_the_counters_of_all_processes_are_added"),
    (IncludesTheEnd, "test_sums_are_filtered_and_read_in_pages"),
    (ForgetsTheSource, "test_a_record_says_from_where_the_change_came"),
    (IgnoresSince, "test_the_history_begins_at_a_time"),
    (LosesRecords, "test_each_choice_is_that_of_its_last_record"),
    (OneNamespace, "test_a_user_and_a_visitor_with_one_id_are_two"),
    (OneNamespace, "test_a_choice_of_a_visitor_makes_no_profile"),
    (OneNamespace, "test_a_visitor_who_chose_does_not_expire"),
    (CrossesLinks, "test_a_choice_crosses_to_no_other_id"),
    (LosesRecords, "test_concurrent_changes_leave_a_consistent_history"),
    (FindsLifted, "test_lifting_one_reason_leaves_the_others"),
    (LastSuppressionWins, "test_the_latest_holds_in_whatever_order_they_arrive"),
    (LastSuppressionWins, "test_concurrent_suppressions_leave_the_latest"),
    (DeletesLifted, "test_the_latest_holds_in_whatever_order_they_arrive"),
    (DeletesLifted, "test_lifting_one_reason_leaves_the_others"),
    (FoldsAddresses, "test_similar_suppressions_are_separate"),
    (OneReason, "test_lifting_one_reason_leaves_the_others"),
    (ScansByOffset, "test_a_scan_of_suppressions_is_complete_while_others_are_written"),
    (ExpiresAllSteps, "test_old_counters_expire"),
    (ScansOneStep, "test_all_registers_are_read_for_a_copy"),
    (LosesWhatItCannotWrite, "test_every_method_raises_unavailable"),
    (WritesCountsLater, "test_every_method_raises_unavailable"),
    (HidesDecisions, "test_a_link_has_an_operators_decision"),
    (LinksByName, "test_all_links_are_scanned_once"),
    (Alarms, "test_a_healthy_store_has_no_problems"),
]


@pytest.fixture
def _no_shrinking() -> Iterator[None]:
    """Let hypothesis stop at the first failure: to simplify it takes most of a minute."""
    before = hypothesis.settings.get_current_profile_name()
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("no shrinking", phases=phases)
    hypothesis.settings.load_profile("no shrinking")
    yield
    hypothesis.settings.load_profile(before)


@pytest.mark.usefixtures("_no_shrinking")
@pytest.mark.parametrize(("storage", "name"), FLAWS)
def test_the_suite_finds_a_flaw(
    storage: type[SqliteStorage], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = getattr(suite(storage, monkeypatch), name)
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception, ExceptionGroup)):
        test(tmp_path)


@pytest.mark.parametrize("name", sorted({name for _, name in FLAWS}))
def test_the_suite_passes_without_a_flaw(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    getattr(suite(SqliteStorage, monkeypatch), name)(tmp_path)


def test_the_suite_skips_features_that_a_server_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = suite(SqliteStorage, monkeypatch)
    monkeypatch.setattr(type(one), "can", lambda self, feature: False)
    for name in (
        "test_a_killed_process_loses_no_acknowledged_event",
        "test_the_oldest_events_expire_first",
    ):
        with pytest.raises(Skipped):
            getattr(one, name)(tmp_path)


def test_eventually_repeats_until_success() -> None:
    attempts = []

    async def third_time() -> str:
        attempts.append(1)
        if len(attempts) < 3:
            raise StorageUnavailable("not yet")
        return "now"

    assert asyncio.run(harness.eventually(third_time, StorageUnavailable)) == "now"

    async def never() -> None:
        raise StorageUnavailable("never")

    with pytest.raises(StorageUnavailable):
        asyncio.run(harness.eventually(never, StorageUnavailable, seconds=0.1))


class Lines(MemoryEvents):
    """Appends a line to a file for each plan, and syncs it."""

    def __init__(self, options: Mapping[str, Any], context: Any) -> None:
        super().__init__()
        self.path = Path(options["path"])

    async def run(self, plan: Any, *args: Any, **kwargs: Any) -> Any:
        with self.path.open("ab") as file:
            file.write(plan.name.encode() + b"\n")
            self.sync(file)
        return await super().run(plan, *args, **kwargs)

    def sync(self, file: IO[bytes]) -> None:
        file.flush()
        os.fsync(file)


class SyncsTwice(Lines):
    """Syncs before the first byte, and again after the last one."""

    def sync(self, file: IO[bytes]) -> None:
        os.fsync(file.fileno())
        file.flush()
        os.fdatasync(file.fileno())


class NeverSyncs(Lines):
    """Leaves the events to the kernel."""

    def sync(self, file: IO[bytes]) -> None:
        file.flush()


class SyncsTooEarly(Lines):
    """Syncs while the events are in the buffer of Python."""

    def sync(self, file: IO[bytes]) -> None:
        os.fsync(file)


def sync_test(
    monkeypatch: pytest.MonkeyPatch, storage: type[Lines], required: str
) -> Callable[[Path], None]:
    """Return the suite's test of syncs for a storage whose schema requires an option; the suite
    gives it the option ``path``."""
    module = ModuleType("lines")
    module.engage_register_storage = (  # type: ignore[attr-defined]
        lambda register: register("lines", storage, {"required": [required]})
    )
    monkeypatch.setitem(sys.modules, "lines", module)

    class Suite(RuleTests, StorageConformance):
        plugin = "lines"

        def options(self, tmp_path: Path) -> Mapping[str, Any]:
            return {"path": str(tmp_path / "events")}

    test: Any = Suite().test_writes_are_synced_before_they_return
    return test


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        (Lines, None),
        (SyncsTwice, None),
        (NeverSyncs, "it returned without os.fsync or os.fdatasync"),
        (SyncsTooEarly, "a file was written after it was synced"),
    ],
)
def test_the_suite_finds_a_storage_that_does_not_sync(
    storage: type[Lines], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finds: Any = contextlib.nullcontext()
    if said is not None:
        finds = pytest.raises(AssertionError, match=said)
    test = sync_test(monkeypatch, storage, "path")
    with finds:
        test(tmp_path)


def test_the_suite_checks_the_options_with_the_schema_of_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = sync_test(monkeypatch, Lines, "folder")
    with pytest.raises(jsonschema.ValidationError, match="'folder' is a required property"):
        test(tmp_path)
