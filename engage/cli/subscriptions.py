# SPDX-License-Identifier: Apache-2.0
"""``engage subscriptions`` and ``engage subscription-link``."""

from __future__ import annotations

import asyncio
import csv
import itertools
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Final
from urllib.parse import urlencode

import click
import orjson

from engage.api import (
    DAY_MS,
    ConfigError,
    EngageError,
    Kind,
    StorageError,
    StorageUnavailable,
    Subject,
    SubscriptionChange,
    Suppression,
    identifier_value,
)
from engage.cli.export import export
from engage.cli.instance import Instance, example, now, on_instance
from engage.cli.output import Progress, one_line, plural, warn
from engage.config import Config, Workspace
from engage.errors import ApiError, quote
from engage.handlers.operations import PREFERENCES_PAGE
from engage.people.addresses import named_addresses
from engage.reading.scans import PAGE
from engage.store.facade import Storage
from engage.subscriptions.choices import CHOICES, Subscriptions
from engage.subscriptions.links import subscription_hash

__all__ = ["subscription_link", "subscriptions"]

#: What bytes that are not UTF-8 are read as.
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
#: What an export puts an apostrophe in front of, and that apostrophe.
_GUARDED: Final = re.compile(r"'[=@\t\r'+-]")
#: What is counted before an import of all who have an address, and its name.
_ASKED: Final = (("rows", "row"), ("imported", "choice"))
#: What an export of choices cannot be told.
_FIXED: Final[Mapping[str, Any]] = {
    "kind": "subscriptions",
    "type_": None,
    "addresses": (),
    "visitors": (),
    "cursor_file": None,
}


@click.group(epilog=example("subscriptions import --dry-run choices.csv"))
def subscriptions() -> None:
    """Import or export what people chose."""


@subscriptions.command(
    "export",
    params=[param for param in export.params if param.name not in _FIXED],
    epilog=example("subscriptions export --format csv > choices.csv"),
)
@click.pass_context
def export_(ctx: click.Context, /, **options: Any) -> None:
    """Export subscription choices, as `engage export subscriptions` does.

    In CSV, the first line names the columns. `engage subscriptions import` reads both formats.
    """
    ctx.invoke(export, **_FIXED, **options)


@subscriptions.command(
    "import", epilog=example("subscriptions import --workspace acme choices.csv")
)
@on_instance("The workspace of the choices, if there are several.")
@click.option(
    "--all",
    "everyone",
    is_flag=True,
    help="Import a row with an address for all users and visitors who have it, not only for the one"
    " user whose address it surely is.",
)
@click.option("--yes", is_flag=True, help="Do not ask; with --all, needed without a terminal.")
@click.option("--dry-run", is_flag=True, help="Only check the rows.")
@click.argument("file", metavar="FILE|-", type=click.File("rb"))
def import_(
    instance: Instance, file: IO[bytes], *, everyone: bool, yes: bool, dry_run: bool
) -> None:
    """Import subscription choices from CSV or NDJSON.

    The columns of CSV, or the members of each JSON object, are groupId, subscribed (true or false),
    and userId or anonymousId, or identifierKey with identifier; updatedAt and how are optional. A
    row with an updatedAt never undoes a later choice. The same row again has no effect. A row with
    an identifier is the choice of the user whose address it surely is: one that a server key or a
    trusted provider set.

    A wrong row is named with its line on standard error, and all others are imported. The exit
    status is 1 then.
    """
    config, workspace = instance.config, instance.workspace

    async def run(store: Storage, *, only_check: bool) -> Counter[str]:
        imported = _Import(store, config, workspace, everyone=everyone, dry_run=only_check)
        return await imported.run(file)

    if everyone and not yes and not dry_run:
        if not sys.stdin.isatty() or not file.seekable():
            raise click.UsageError("--all needs --yes when there is no terminal")
        checked = instance.run(run, only_check=True)
        rows, choices = (plural(checked[what], noun) for what, noun in _ASKED)
        click.confirm(f"Import {rows} as {choices}?", abort=True, err=True)
    counts = instance.run(run, only_check=dry_run)
    verb = "would be imported" if dry_run else "imported"
    same = f", {n} as before" if (n := counts["same"]) else ""
    later = f", {plural(n, 'later choice')} kept" if (n := counts["later"]) else ""
    objections = f", {plural(n, 'objection')} of addresses" if (n := counts["objections"]) else ""
    click.echo(f"{plural(counts['imported'], 'choice')} {verb}{same}{later}{objections}")
    if counts["wrong"]:
        raise EngageError(f"{counts['wrong']} of {plural(counts['rows'], 'row')} refused")


class _Import:
    """Imports rows, a page at a time.

    :param everyone: see :meth:`engage.subscriptions.choices.Subscriptions.changes_of`.
    :param dry_run: only check them.
    """

    def __init__(
        self,
        store: Storage,
        config: Config,
        workspace: Workspace,
        *,
        everyone: bool,
        dry_run: bool,
    ) -> None:
        # Imported here, because most commands do not need them.
        from engage.pipeline.validate import Schemas

        self._store: Storage = store
        self._schemas = Schemas.load()
        self._subscriptions = Subscriptions(
            config.workspaces,
            store,
            clock=now,
            timeout=config.storage.write_timeout,
            resubscriptions=config.limits.resubscriptions_per_day,
        )
        self._workspace = workspace
        self._everyone = everyone
        self._dry_run = dry_run
        self._waiting: list[SubscriptionChange] = []
        #: The ids of the changes of a row → what the row says about an address.
        self._objections: dict[tuple[str, ...], list[Suppression]] = {}
        self._counts: Counter[str] = Counter()

    async def run(self, file: IO[bytes]) -> Counter[str]:
        """Import all rows, and return how many ``rows`` there are and how many are ``wrong``, and
        how many choices were ``imported``, are the ``same`` as before, and are older than a
        ``later`` one, and how many ``objections`` of addresses there are."""
        size = read_to = 0
        if file.seekable():
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
        try:
            with Progress("rows") as progress:
                for line, row in _read(file, self._schemas.documents["choice"]["properties"]):
                    self._counts["rows"] += 1
                    try:
                        await self._add(row)
                    except ApiError as error:
                        self._counts["wrong"] += 1
                        warn(f"line {line}: {one_line(error.message)}")
                    read_to = read_to if self._waiting else line
                    progress.show(self._counts["rows"], file.tell() / size if size else None)
                await self._flush()
        except StorageUnavailable as error:
            done = f"imported up to line {read_to}, run the command again"
            raise StorageUnavailable(f"{error}; {done}") from error
        return self._counts

    async def _add(self, row: Mapping[str, Any] | str) -> None:
        if isinstance(row, str):
            raise ApiError("invalid_payload", row)
        choice = self._schemas.read("choice", row)
        read, everyone = self._subscriptions.changes_of, self._everyone
        changes = [change async for change in read(self._workspace, choice, everyone=everyone)]
        self._waiting += changes
        if objections := self._subscriptions.objections_of(self._workspace, choice):
            self._objections[tuple(change.id for change in changes) or (str(row),)] = objections
        if len(self._waiting) + len(self._objections) >= PAGE:
            await self._flush()

    async def _flush(self) -> None:
        changes, self._waiting = self._waiting, []
        if self._dry_run:
            self._counts["imported"] += len(changes)
            self._objections = {}
            return
        subjects = list(dict.fromkeys(change.subject for change in changes))
        reads = [self._store.state(self._workspace.id, subject) for subject in subjects]
        undone = set[str]()
        states = dict(zip(subjects, await asyncio.gather(*reads), strict=True))
        for change, choices in zip(changes, await self._store.apply_all(changes), strict=True):
            same = change.choices.items() <= states[change.subject].items()
            holds = change.choices.items() <= choices.items()
            self._counts[("same" if same else "imported") if holds else "later"] += 1
            states[change.subject] = choices
            if not holds:  # A later choice, or a row that was imported before.
                undone.add(change.id)
        objections, self._objections = self._objections, {}
        some = [row for ids, rows in objections.items() if not undone & {*ids} for row in rows]
        await self._store.suppress(some)
        self._counts["objections"] += len(some)


def _read(
    file: IO[bytes], columns: Collection[str]
) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Yield the rows of a file with their lines. A text instead of a row says what is wrong.

    :raises EngageError: if CSV does not begin with the names of columns.
    """
    lines = (line.decode("utf-8", "surrogateescape") for line in file)
    first, start = next(lines, "").removeprefix("\ufeff"), 1
    while first and not first.strip():
        first, start = next(lines, ""), start + 1
    if _SURROGATES.search(first) or "\0" in first:
        raise EngageError(f"line {start}: is not UTF-8; save the file as UTF-8")
    if first.startswith("["):
        raise EngageError(f"line {start}: begins a JSON array; write each object on its own line")
    everything = itertools.chain([first], lines)
    if first.startswith("{"):
        for number, line in enumerate(everything, start):
            if line.strip():
                yield number, _row_of_json(line, columns)
        return
    reader, names = csv.reader(everything, strict=True), list[str]()
    while True:
        number = start + reader.line_num
        try:
            values = next(reader, None)
        except csv.Error as error:
            problem = f"{str(error).partition(' - ')[0]}; the rest of the file was not read"
            if not names:
                raise EngageError(f"line {number}: {problem}") from None
            yield number, problem
            return
        if not names:
            names = _names(values or (), columns, number)
        elif values is None:
            return
        elif values:
            yield number, _row_of_csv(names, values)


def _names(values: Sequence[str], columns: Collection[str], number: int) -> list[str]:
    """Return the names of columns.

    :raises EngageError: if they are not.
    """
    names = [name.strip() for name in values]
    problem = _unknown(names, columns)
    if absent := [name for name in ("groupId", "subscribed") if name not in names]:
        given = quote(", ".join(names)) or "nothing"
        problem = f"there is no column {absent[0]}, only {given}; commas separate the columns"
    if problem:
        raise EngageError(f"line {number}: {problem}")
    return names


def _unknown(names: Iterable[str], columns: Collection[str]) -> str | None:
    """Return a message about the first name that is unknown: ignored, it might be a time."""
    unknown = next((name for name in names if name not in columns), None)
    listed = ", ".join(columns)
    return None if unknown is None else f'"{quote(unknown)}" is unknown; there are {listed}'


def _row_of_json(line: str, columns: Collection[str]) -> Mapping[str, Any] | str:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return f"is not JSON: {error}"
    if not isinstance(row, dict):
        return "must be a JSON object"
    given = {name: value for name, value in row.items() if value is not None}
    return _unknown(given, columns) or given


def _row_of_csv(names: Sequence[str], values: Sequence[str]) -> Mapping[str, Any] | str:
    if len(values) != len(names):
        return f"has {plural(len(values), 'field')}, and the first line has {len(names)}"
    if any(map(_SURROGATES.search, values)):
        return "is not UTF-8"
    texts = [text[1:] if _GUARDED.match(text) else text for text in values]
    row: dict[str, Any] = {name: text for name, text in zip(names, texts, strict=True) if text}
    if (choice := row.get("subscribed", "").lower()) in CHOICES:
        row["subscribed"] = CHOICES[choice]
    if (at := row.get("updatedAt", "")).isascii() and at.isdigit():
        row["updatedAt"] = int(at)
    return row


@click.command(
    "subscription-link",
    epilog=example("subscription-link --user u-1 --group newsletter --headers"),
)
@on_instance("The workspace of the user or visitor.")
@click.option("--user", metavar="ID", help="Id of the user.")
@click.option("--anonymous-id", metavar="ID", help="Anonymous id of the visitor, instead.")
@click.option(
    "--address", metavar="ADDRESS", help="The e-mail address or phone number to which it is sent."
)
@click.option("--group", metavar="ID", help="The subscription group that the message is sent to.")
@click.option(
    "--expires",
    type=click.IntRange(1, 36500),
    metavar="DAYS",
    help="Days after which the link only unsubscribes; by default, it does not expire.",
)
@click.option("--lang", metavar="CODE", help="Language of the page; by default, the browser's.")
@click.option("--headers", is_flag=True, help="Print the headers of an e-mail.")
def subscription_link(
    instance: Instance,
    user: str | None,
    anonymous_id: str | None,
    address: str | None,
    group: str | None,
    expires: int | None,
    lang: str | None,
    *,
    headers: bool,
) -> None:
    """Print a link to the preferences page.

    Anyone who has the link can change what its user or visitor receives, so send it to them only.
    User ids and anonymous ids are apart: the link of one shows no choice of the other. With
    --headers, print the two headers with which mail programs offer to unsubscribe. With --address,
    an unsubscription also holds for the address, whoever has it: send the link only to it.
    docs/subscriptions.md shows how a program makes such a link.
    """
    if (user is None) is (anonymous_id is None):
        raise click.UsageError("give either --user or --anonymous-id")
    config, workspace = instance.config, instance.workspace
    name = workspace.id
    if not workspace.subscription_secrets:
        raise ConfigError(f"{config.path}: the workspace {name} has no subscription_secret")
    groups = [x.id for x in workspace.subscription_groups]
    if group is not None and group not in groups:
        listed = ", ".join(groups) or "it has none"
        raise ConfigError(f"{group!r} is not a subscription group of {name} ({listed})")
    if user is None:
        subject, key = Subject(Kind.VISITOR, str(anonymous_id)), "anonymousId"
    else:
        subject, key = Subject(Kind.USER, user), "id"
    if identifier_value("id", subject.id) is None:
        raise EngageError("an id has 1 to 512 characters")
    if user is not None and _names_visitor(instance, user):
        raise EngageError(
            f"{subject.id!r} is the anonymous id of a visitor, and no user has this id: use"
            f" --anonymous-id {shlex.quote(subject.id)}"
        )
    identifier, more = subject.id, dict[str, Any]()
    if address is not None:
        [form] = named_addresses([address])
        key, _, identifier = form.partition(":")
        if key not in workspace.subscription_identifiers:
            raise ConfigError(f"{config.path}: {key} is not in subscription_identifiers of {name}")
        more = {"u": subject.id, "v": None if user is not None else 1}
    if headers and not (config.server.public_url or "").startswith("https://"):
        raise ConfigError(
            f"{config.path}: server.public_url must begin with https://; mail programs use no"
            " other links"
        )
    base = instance.public_url("only this machine can open the link")
    until = None if expires is None else (now() + expires * DAY_MS) // 1000
    signed = subscription_hash(
        workspace.subscription_secrets[0],
        subject=subject,
        workspace_id=name,
        identifier=identifier,
        identifier_key=key,
        expires=until,
    )
    members: dict[str, Any] = {"w": name, "i": identifier, "ik": key, "h": signed}
    members |= {**more, "e": until, "s": group, "lang": lang}
    if group is not None:
        members["sub"] = "0"
    query = urlencode({key: value for key, value in members.items() if value is not None})
    url = f"{base}{PREFERENCES_PAGE}?{query}"
    if headers:
        click.echo(f"List-Unsubscribe: <{url}>")
        click.echo("List-Unsubscribe-Post: List-Unsubscribe=One-Click")
    else:
        click.echo(url)


def _names_visitor(instance: Instance, name: str) -> bool:
    """Return whether a visitor has an id, and no user; false if the store cannot be read."""

    async def look(store: Storage, workspace_id: str) -> bool:
        if await store.profile(workspace_id, name):
            return False
        return await store.visitor(workspace_id, name) is not None

    try:
        return instance.run(look, instance.workspace.id)
    except StorageError:
        return False
