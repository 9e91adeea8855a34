# SPDX-License-Identifier: Apache-2.0
"""The code of docs/subscriptions.md makes links that the page accepts."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from engage.api import Kind, Subject
from engage.config import load
from engage.handlers.preferences.looks import Looks
from engage.subscriptions.links import BY_ID, subscription_hash
from support.go import go
from support.node import node
from support.preferences import GROUPS, ledger
from support.server_process import SECRET, Server, start_server

pytestmark = [pytest.mark.checkout, pytest.mark.timeout(300)]

PAGE = Path(__file__).resolve().parents[2] / "docs/subscriptions.md"
TEXT = PAGE.read_text("utf-8")
ROWS = re.findall(
    r"^\| `(id|anonymousId)` \| `(.+)` \| ?(\d*) \| `([0-9a-f]{64})` \|$", TEXT, re.MULTILINE
)
SIGNED = re.findall(r"^\| `(\{.+\})` \| `([0-9a-f]{64})` \|$", TEXT, re.MULTILINE)
VECTOR_SECRET = "subscription-secret"
VECTOR = "https://x.test", VECTOR_SECRET, "acme"

#: Base, secret, workspace, kind, id, group, expiry, address.
Arguments = tuple[str, str, str, str, str, str | None, int | None, str | None]
Make = Callable[[Path, Sequence[Arguments]], list[str]]

#: A program that reads arguments as JSON and prints the links.
GO = """package main

import (
	"encoding/json"
	"fmt"
	"os"

	"example.test/preferences"
)

func main() {
	var all [][]any
	decoder := json.NewDecoder(os.Stdin)
	decoder.UseNumber()
	if err := decoder.Decode(&all); err != nil {
		panic(err)
	}
	for _, one := range all {
		group, _ := one[5].(string)
		var expires int64
		if number, ok := one[6].(json.Number); ok {
			expires, _ = number.Int64()
		}
		address, _ := one[7].(string)
		link, err := preferences.Link(
			one[0].(string), one[1].(string), one[2].(string), one[3].(string), one[4].(string),
			group, expires, address)
		if err != nil {
			panic(err)
		}
		fmt.Println(link)
	}
}
"""
NODE = """
const all = JSON.parse(require("fs").readFileSync(0, "utf-8"));
for (const one of all) console.log(preferencesLink(...one.map((x) => x ?? undefined)));
"""


def block(language: str) -> str:
    matches = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return str(matches[0])


def run(command: Sequence[object], calls: Sequence[Arguments], **options: Any) -> list[str]:
    done = subprocess.run(
        [*map(str, command)],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=280,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout).splitlines()


def by_python(folder: Path, calls: Sequence[Arguments]) -> list[str]:
    names: dict[str, Any] = {}
    exec(compile(block("python"), str(PAGE), "exec"), names)
    return [str(names["preferences_link"](*call)) for call in calls]


def by_node(folder: Path, calls: Sequence[Arguments]) -> list[str]:
    (folder / "link.js").write_text(block("js") + NODE, "utf-8")
    return run([node(), folder / "link.js"], calls)


def by_go(folder: Path, calls: Sequence[Arguments]) -> list[str]:
    (folder / "preferences").mkdir()
    (folder / "preferences/link.go").write_text(block("go"), "utf-8")
    (folder / "main.go").write_text(GO)
    (folder / "go.mod").write_text("module example.test\n\ngo 1.21\n")
    return run([go(), "run", "."], calls, cwd=folder)


LANGUAGES: dict[str, Make] = {"python": by_python, "node": by_node, "go": by_go}
PARAMETERS = ["python", *(pytest.param(name, marks=pytest.mark.sdk) for name in ("node", "go"))]


@pytest.fixture(scope="module")
def engage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(tmp_path_factory.mktemp("links"), config_extra=GROUPS) as server:
        yield server


@pytest.mark.parametrize("language", PARAMETERS)
def test_a_link_of_the_code_opens_the_page(engage: Server, tmp_path: Path, language: str) -> None:
    """And one click on it unsubscribes."""
    users = ["u-1", 'Zoë "z" <z&co>/\\ +%', "\t😀\x7f"]
    calls: list[Arguments] = []
    for user in users:
        name = f"{language} {user}"
        address = "Zoë+a&b@example.com"
        calls.append((engage.url, SECRET, "acme", "id", name, "news", None, None))
        calls.append((engage.url, SECRET, "acme", "anonymousId", f"{name} v", "news", None, None))
        calls.append((engage.url, SECRET, "acme", "id", name, None, 4_000_000_000, None))
        calls.append((engage.url, SECRET, "acme", "id", f"{name} a", "news", None, address))
        by_address = ("anonymousId", f"{name} av", "news", 4_000_000_000, address)
        calls.append((engage.url, SECRET, "acme", *by_address))
    links = LANGUAGES[language](tmp_path, calls)
    assert len(links) == len(calls)
    for (*_, name, group, _, _), link in zip(calls, links, strict=True):
        page = engage.client.get(link)
        assert page.status_code == 200, (name, link)
        assert ("Unsubscribe from Newsletter" in page.text) == (group is not None)
        answer = engage.client.post(link, data={"List-Unsubscribe": "One-Click"})
        assert answer.status_code == 200
    for user in users:
        records = ledger(engage, f"{language} {user}")
        assert {record["how"] for record in records} == {"one-click"}
        assert {record["groupId"] for record in records} >= {"news", "delivery"}


@pytest.mark.parametrize("language", PARAMETERS)
def test_the_code_makes_the_signatures_of_the_table(tmp_path: Path, language: str) -> None:
    assert len(ROWS) == 5
    calls: list[Arguments] = [
        (*VECTOR, kind, name, None, int(expires) if expires else None, None)
        for kind, name, expires, _ in ROWS
    ]
    for message, _ in SIGNED:
        one = json.loads(message)
        kind = "anonymousId" if one.get("v") else "id"
        calls.append((*VECTOR, kind, one["u"], None, one.get("e"), one["i"]))
    links = LANGUAGES[language](tmp_path, calls)
    found = [parse_qs(urlsplit(link).query) for link in links]
    shown = [(one["ik"][0], one["i"][0], one.get("e", [""])[0], one["h"][0]) for one in found]
    assert shown[: len(ROWS)] == ROWS
    assert [one[-1] for one in shown[len(ROWS) :]] == [signature for _, signature in SIGNED]


def test_the_table_has_the_signatures_of_the_server() -> None:
    assert len(SIGNED) == 3
    rows = [
        (BY_ID[kind], name, kind, name, int(expires) if expires else None, signature)
        for kind, name, expires, signature in ROWS
    ]
    for message, signature in SIGNED:
        one = json.loads(message)
        kind = Kind.VISITOR if one.get("v") else Kind.USER
        rows.append((kind, one["u"], one["k"], one["i"], one.get("e"), signature))
    for kind, name, key, identifier, expires, signature in rows:
        assert signature == subscription_hash(
            VECTOR_SECRET,
            subject=Subject(kind, name),
            workspace_id="acme",
            identifier=identifier,
            identifier_key=key,
            expires=expires,
        )


def test_the_signed_json_of_the_page_is_that_of_the_server() -> None:
    message, *_ = re.findall(r"`(\{\"u\":.*?\})`", TEXT)
    assert hmac.new(b"s", message.encode(), hashlib.sha256).hexdigest() == subscription_hash(
        "s",
        subject=Subject(Kind.USER, "u-1"),
        workspace_id="acme",
        identifier="u-1",
        identifier_key="id",
        expires=1893456000,
    )


def test_the_looks_of_the_page_are_those_of_a_config(tmp_path: Path) -> None:
    (tmp_path / "logo.svg").write_text("<svg/>")
    (tmp_path / "preferences").mkdir()
    texts, answer = re.findall(r"^```json\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "preferences/nl.json").write_text(texts)
    path = tmp_path / "engage.toml"
    path.write_text(block("toml"))
    words = Looks(load(path)).of("acme").words("nl", "")
    assert words.of_channel("channel", "whatsapp") == "WhatsApp"
    assert json.loads(answer)["success"] is True
