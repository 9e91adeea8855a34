# SPDX-License-Identifier: Apache-2.0
"""The pages that change something, and those that list: keys, rejected events, users."""

from __future__ import annotations

import html
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from engage.api import Backup, DeadLetter
from engage.audit import Actor
from engage.copy.backups import record_backup
from engage.store.facade import Storage
from support.commands import run
from support.console import CONSOLE
from support.each import each
from support.exports import on_store
from support.server_process import KEY, Server, start_server
from support.waiting import wait_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    extra = f"""{CONSOLE}
[[workspaces]]
id = "pages"
name = "Pages"
protected_traits = ["tier"]
[[workspaces.write_keys]]
id = "site"
key = "key-of-pages"
[[workspaces.subscription_groups]]
id = "news"
name = "News"
channel = "email"
type = "opt_in"
"""
    with start_server(tmp_path_factory.mktemp("pages"), config_extra=extra) as server:
        yield server


def send(server: Server, path: str, body: Any, key: str = "key-of-pages") -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, auth=(key, ""))


def letters_of(server: Server, workspace: str = "pages") -> list[DeadLetter]:
    async def read(store: Storage) -> list[DeadLetter]:
        page = await store.scan_dead_letters(workspace, after=None, limit=1000)
        return list(page.items)

    return on_store(server.config, read)


def form_of(page: str, marker: str) -> dict[str, str]:
    """Return the hidden fields of the form whose text has a marker."""
    for form in re.findall(r"<form.*?</form>", page, re.DOTALL):
        if marker in form:
            matches = re.findall(r'<input type="hidden"\s+name="(\w+)"\s+value="([^"]*)"', form)
            return {name: html.unescape(value) for name, value in matches}
    raise AssertionError(f"no form with {marker!r}")


# -------------------------------------------------------------------------------------------- keys
def keys_page(client: httpx.Client) -> str:
    answer = client.get("keys", params={"workspace": "pages"})
    assert answer.status_code == 200, answer.text
    return answer.text


def change(client: httpx.Client, action: str, key_id: str, **fields: str) -> httpx.Response:
    return client.post(
        "keys",
        params={"workspace": "pages"},
        data={"action": action, "id": key_id, "sure": "1", **fields},
        follow_redirects=True,
    )


def test_a_key_is_created_used_disabled_and_enabled(server: Server, client: httpx.Client) -> None:
    page = change(client, "create", "app", name="The app").text
    assert "The key <code>app</code> was created" in " ".join(page.split())
    assert "The app" in page
    # Its lines are ready to be copied.
    assert "<option selected>app</option>" in page
    key = re.search(r"<code>([0-9a-f]{32})</code>", page)
    assert key is not None
    assert send(server, "track", {"userId": "u", "event": "E"}, key[1]).status_code == 200
    assert "disabled" in change(client, "disable", "app").text
    wait_for(
        lambda: send(server, "track", {"userId": "u", "event": "E"}, key[1]).status_code == 403,
        what="the key to be refused",
    )
    assert change(client, "enable", "app").status_code == 200
    wait_for(
        lambda: send(server, "track", {"userId": "u", "event": "E"}, key[1]).status_code == 200,
        what="the key to be accepted",
    )


def test_a_rotation_makes_a_second_key_and_says_when_the_old_one_is_idle(
    server: Server, client: httpx.Client
) -> None:
    change(client, "create", "rot")
    page = change(client, "rotate", "rot").text
    assert "The key <code>rot-2</code> was created" in " ".join(page.split())
    assert "Rotation: rot → rot-2" in page
    assert "you can disable it" in page
    page = change(client, "disable", "rot").text
    assert "Rotation: rot " not in page
    assert "rot-3" in change(client, "rotate", "rot-2").text


@each(
    "action, key_id, words",
    [
        *(("create", "site", "site"), ("create", "a b", "letters"), ("create", "", "id")),
        *(("disable", "missing", "missing"), ("rotate", "missing", "missing")),
        ("archive", "site", "config file"),
    ],
)
def test_an_impossible_change_is_explained(
    client: httpx.Client, action: str, key_id: str, words: str
) -> None:
    answer = change(client, action, key_id)
    assert answer.status_code == 400
    notice = re.search(r'<p class="notice bad" role="alert">(.*?)</p>', answer.text)
    assert notice is not None
    assert words in notice[1]


def test_two_operators_do_not_overwrite_each_other(client: httpx.Client) -> None:
    change(client, "create", "both")
    form = form_of(keys_page(client), 'value="both"')
    assert change(client, "disable", "both", version=form["version"]).status_code == 200
    answer = change(client, "archive", "both", version=form["version"])
    assert answer.status_code == 400
    assert "changed" in answer.text


def test_an_unknown_action_is_refused(client: httpx.Client) -> None:
    for page in ("keys", "rejected", "letter", "replays"):
        answer = client.post(page, params={"workspace": "pages"}, data={"action": "explode"})
        assert answer.status_code == 400, page


def test_every_change_of_a_key_is_in_the_audit(client: httpx.Client) -> None:
    change(client, "create", "audited")
    page = client.get("audit").text
    assert "key-created" in page
    row, _, _ = page.partition("audited")[2].partition("</tr>")
    assert "</td>" in row
    assert "name" not in row, "the key has none"


# ---------------------------------------------------------------------------------------- rejected
def test_a_group_is_deleted_and_no_other(server: Server, client: httpx.Client) -> None:
    for number in range(3):
        send(server, "track", {"userId": f"u{number}"})
        send(server, "track", {"userId": f"u{number}", "event": "E", "timestamp": "soon"})
    page = client.get("rejected", params={"workspace": "pages"}).text
    group = re.search(r'href="(rejected\?[^"]*pointer=%2Ftimestamp[^"]*ask=delete)#cause"', page)
    assert group is not None
    shown = client.get(html.unescape(group[1]))
    assert "<strong>3 events will be deleted.</strong>" in shown.text
    form = form_of(shown.text, "Delete 3 events")
    action = re.search(r'<form method="post" action="(rejected[^"]*)"', shown.text)
    assert action is not None
    answer = client.post(html.unescape(action[1]), data={**form, "action": "delete"})
    assert answer.status_code == 303
    assert "count=3" in answer.headers["Location"]
    assert {letter.errors[0]["pointer"] for letter in letters_of(server)} == {"/event"}
    assert "letters-deleted" in client.get("audit").text


def test_a_letter_is_checked_edited_and_replayed_once(server: Server, client: httpx.Client) -> None:
    body = {
        "batch": [{"type": "track", "userId": "big", "properties": {"n": 9007199254740993}}],
        "context": {"locale": "nb"},
        "sentAt": "2026-11-22T10:00:00Z",
    }
    send(server, "batch", body)
    (letter,) = [one for one in letters_of(server) if one.user_id == "big"]
    where = {"workspace": "pages", "id": letter.id}
    page = client.get("letter", params=where).text
    assert "9007199254740993" in page
    text = '{\r\n"type": "track", "userId": "big", "event": "Big",\r\n "properties":' + (
        ' {"n": 9007199254740993}}'
    )
    fields = {"id": letter.id, "text": text}
    wrong = client.post("letter/check", params=where, data={**fields, "text": "{"})
    assert wrong.text.count("not valid JSON") == 1
    assert "Not valid: 1 problem" in wrong.text
    assert "checked" not in form_of(wrong.text, "letter/check")
    checked = client.post("letter/check", params=where, data=fields)
    assert "This text is valid" in checked.text
    assert len([one for one in letters_of(server) if one.user_id == "big"]) == 1
    form = form_of(checked.text, "letter/check")
    # Another text than the one that was checked is only checked.
    other = {**form, "text": text.replace("Big", "Bigger")}
    assert "This text is valid" in client.post("letter/replay", params=where, data=other).text
    answer = client.post("letter/replay", params=where, data={**form, "text": text})
    assert answer.status_code == 303
    location = answer.headers["Location"]
    event = client.get(f"letter/{location}").text
    assert "It is not here" not in event
    for part in ("9007199254740993", "nb", "replayOf", letter.id):
        assert part in event
    again = client.post("letter/replay", params=where, data={**form, "text": text})
    assert again.status_code == 404
    assert "It is no longer here" in again.text


def test_all_of_a_group_are_replayed(server: Server, client: httpx.Client) -> None:
    for number in range(5):
        send(server, "track", {"userId": f"j{number}", "event": "E", "context": 5})
    query = {"workspace": "pages", "pointer": "/context", "reason": "invalid_payload"}
    answer = client.post("rejected", params=query, data={"action": "replay"})
    assert answer.status_code == 303
    assert urlsplit(answer.headers["Location"]).path == "replays"

    def ended() -> str | None:
        page = client.get("replays", params={"workspace": "pages"}).text
        return page if "5 failed, of 5" in page and ">running<" not in page else None

    page = wait_for(ended, what="the replay to end")
    assert "must be an object" in page
    assert '<span class="status bad">5 failed</span>' in page
    assert "<progress" not in page
    client.post("rejected", params={**query, "pointer": "/gone"}, data={"action": "replay"})
    wait_for(lambda: "nothing matched" in client.get("replays").text, what="the replay to end")
    assert '<span class="status ok">' not in client.get("replays").text


def test_a_letter_that_is_gone_and_a_letter_of_another_workspace(
    server: Server, client: httpx.Client
) -> None:
    send(server, "track", {"userId": "elsewhere"}, KEY)
    (letter,) = letters_of(server, "acme")
    for params in ({"workspace": "pages", "id": letter.id}, {"workspace": "pages", "id": "x"}):
        assert client.get("letter", params=params).status_code == 404
        assert client.post("letter/check", params=params, data={}).status_code == 404
    client.post("letter", params={"workspace": "pages", "id": letter.id}, data={"action": "delete"})
    assert letters_of(server, "acme")
    assert client.get("letter", params={"workspace": "acme", "id": letter.id}).status_code == 200


# ------------------------------------------------------------------------------------------- users
def test_a_user_who_does_not_exist(client: httpx.Client) -> None:
    answer = client.get("user", params={"workspace": "pages", "id": "nobody"})
    assert answer.status_code == 404
    assert "There is no such user" in answer.text


# ------------------------------------------------------------------------------------------ system
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_storage_shows_its_numbers(server: Server, client: httpx.Client) -> None:
    """For SQLite, also those of the process that writes, which is not one of the server's."""
    page = client.get("system").text.replace("\u202f", " ")
    facts = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", page))
    for name in ("Free disk space", "Database file", "Write-ahead log", "Writer memory"):
        assert re.fullmatch(r"[\d.]+ ([KMGT]?B|bytes)", facts[name].replace("iB", "B")), facts[name]
    assert re.fullmatch(r"\d+\.\d s", facts["Writer CPU"])
    assert int(facts["Writer process"]) == server.helper


def test_the_last_backup_is_shown(server: Server, client: httpx.Client, tmp_path: Path) -> None:
    """One that is older than two days is a warning."""

    def shown() -> tuple[dict[str, str], str]:
        page = client.get("system").text.replace("\u202f", " ")
        return dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", page)), page

    assert shown()[0]["Last backup"] == "none"
    result = run("backup", "--config", server.config, tmp_path / "backup.db")
    assert (result.exit_code, result.stderr) == (0, "")
    facts, page = shown()
    assert re.fullmatch(r"\d+ s ago: \d+ events?, \d+ KiB", facts["Last backup"])
    assert facts["Its file"].startswith(f"{tmp_path}/backup.db (")
    assert "The last backup of the store was made" not in page

    async def age(store: Storage) -> None:
        made_at = time.time_ns() // 1_000_000 - 50 * 3_600_000
        made = Backup(made_at=made_at, events=5, size=1 << 20)
        actor = Actor(who="ann", origin="command line on host")
        await record_backup(store, made, "/backup/old.db", actor)

    on_store(server.config, age)
    facts, page = shown()
    assert facts["Last backup"] == "2 days ago: 5 events, 1 MiB"
    assert facts["Its file"] == "/backup/old.db (ann, command line on host)"
    assert "The last backup of the store was made 2 days ago." in page


# ----------------------------------------------------------------------------------- subscriptions
def test_users_and_visitors_are_counted_by_their_choices(
    server: Server, client: httpx.Client
) -> None:
    """Choices are imported while the server runs. That a user unsubscribed the visitor with the
    same id too is no other choice."""
    for event in (
        {"userId": "sub-1", "anonymousId": "sub-v"},
        {"anonymousId": "sub-v", "traits": {"a": 1}},
        {"anonymousId": "sub-w", "traits": {"a": 1}},
    ):
        assert send(server, "identify", event).status_code == 200
    rows = (
        *("sub-1,,true,2025-01-01", ",sub-v,false,2025-01-02", ",sub-w,true,2025-01-01"),
        *("sub-x,,false,2025-01-01", ",sub-x,false,2025-01-01", "sub-y,,false,2025-01-01"),
    )
    text = "userId,anonymousId,subscribed,updatedAt,groupId\n" + ",news\n".join((*rows, ""))
    arguments = ("--config", server.config, "--workspace", "pages", "-")
    result = run("subscriptions", "import", *arguments, text=text)
    assert (result.exit_code, result.output) == (0, "6 choices imported\n")
    page = client.get("subscriptions", params={"workspace": "pages"}).text
    for label, count in (("subscribed", 2), ("unsubscribed", 3)):
        assert f'data-label="{label}">{count}</td>' in page


# ---------------------------------------------------------------------------------------- warnings
def test_events_that_did_not_change_all_they_should_are_a_warning(
    server: Server, client: httpx.Client
) -> None:
    """On the overview, and in ``engage check``."""
    send(server, "identify", {"userId": "warned", "traits": {"tier": "gold", "a": 1}})
    send(server, "track", {"userId": "warned", "event": "DFSubscriptionChange"})
    dropped = "Events with a public key, or of a provider that is not trusted, had protected_traits"
    ignored = "Events DFSubscriptionChange change no subscription (1 in"

    def shown() -> bool:
        text = html.unescape(client.get("?workspace=pages").text)
        return dropped in text and ignored in text

    wait_for(shown, what="the warnings on the overview")
    result = run("check", "--config", server.config)
    assert f"pages: {dropped}, which were removed (1 in 24 hours)" in result.stdout
    assert f"pages: {ignored} 24 hours)" in result.stdout
