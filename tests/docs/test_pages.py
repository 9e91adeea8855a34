# SPDX-License-Identifier: Apache-2.0
"""The pages agree with the code: tables, examples, links."""

from __future__ import annotations

import ast
import hmac
import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import click
import orjson
import pytest

from engage import hookspecs
from engage.api import Event, Kind, LogRecord, Subject, record_of, render_time, unpack
from engage.config import config_schema, load
from engage.config.removed import without_removed
from engage.errors import STATUS, ApiError, error_body, from_problems
from engage.keys.limits import Rules
from engage.pipeline.validate import Schemas
from engage.registry import load_plugins
from engage.subscriptions.links import subscription_hash
from engage.webhooks import options, requests, translation
from support import config_page, provider_page
from support.commands import run
from support.each import each

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = ROOT / "config.example.toml"
LOG_PAGE = (ROOT / "docs/write-a-log.md").read_text("utf-8")
PLUGIN_PAGE = (ROOT / "docs/write-a-plugin.md").read_text("utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


# ------------------------------------------------------------------------------- generated tables
def test_the_tables_of_helpers_are_those_of_the_package() -> None:
    text = provider_page.PAGE.read_text("utf-8")
    assert provider_page.page(text) == text, "run: python tests/support/provider_page.py"
    modules = (translation, options, requests)
    public = {name for module in modules for name in module.__all__}
    assert sorted(re.findall(r"^\| `(\w+)\(", text, re.M)) == sorted(public)


# --------------------------------------------------------------------------------- configuration
def test_the_tables_are_those_of_the_schema() -> None:
    text = config_page.PAGE.read_text("utf-8")
    assert config_page.page(text) == text, "run: python tests/support/config_page.py"


def test_the_example_config_loads_with_its_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGAGE_SUBSCRIPTION_SECRET", "s")
    monkeypatch.setenv("ENGAGE_ERASURES_KEY", "e" * 32)
    monkeypatch.setenv("SENDGRID_VERIFICATION_KEY", "MFkw")
    config = load(EXAMPLE)
    load_plugins().check(config)
    assert config.workspaces[0].subscription_secrets == ("s",)


def test_the_example_config_has_every_section_and_its_comments_are_the_defaults() -> None:
    text = EXAMPLE.read_text("utf-8")
    everything = tomllib.loads(re.sub(r"^# (?=[\[\]a-z_.]+( =|\]))", "", text, flags=re.MULTILINE))
    schema = config_schema()
    assert everything.keys() == schema["properties"].keys()
    assert without_removed(schema, everything)[1] == []
    section = ""
    for line in text.splitlines():
        if table := re.fullmatch(r"(?:# )?\[([a-z]+)\]", line):
            section = table[1]
        if match := re.fullmatch(r"# ([a-z_]+) = (.*)", line):
            key = schema["properties"][section]["properties"].get(match[1])
            if key is not None and "default" in key:
                assert tomllib.loads(f"x = {match[2]}")["x"] == key["default"], line


def test_the_security_page_names_keys_that_exist_and_every_limit() -> None:
    text = (ROOT / "docs/security.md").read_text("utf-8")
    properties = config_schema()["properties"]
    named = set(re.findall(r"`(server|limits|retention)\.([a-z_]+)`", text))
    for section, key in named:
        assert key in properties[section]["properties"], f"{section}.{key}"
    limits = {key for section, key in named if section == "limits"}
    assert properties["limits"]["properties"].keys() == limits


@each("path", DOCS)
def test_toml_in_the_documents_is_toml_and_its_tables_are_known(path: Path) -> None:
    sections = config_schema()["properties"].keys() | {"build-system", "project", "tool"}
    for block in blocks(path.read_text("utf-8"), "toml"):
        assert tomllib.loads(block).keys() <= sections


# ------------------------------------------------------------------------------------ how to write
def test_the_record_on_the_page_of_logs_has_its_format() -> None:
    body, meta = map(json.loads, blocks(LOG_PAGE, "json"))
    headers = {"engage": b"event/1", "meta": orjson.dumps(meta)}
    record = LogRecord(key=b"acme:ann", value=orjson.dumps(body), headers=headers)
    event = unpack(record)
    assert isinstance(event, Event)
    assert record_of(event) == record
    assert body["timestamp"] == render_time(event.timestamp)
    assert body["receivedAt"] == render_time(event.received_at)
    described = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.+?) \|", LOG_PAGE, re.M))))
    assert described == {*meta, "restated"}


def test_the_tests_with_a_storage_in_memory_pass() -> None:
    (block,) = [one for one in blocks(PLUGIN_PAGE, "python") if "MemoryStore" in one]
    names: dict[str, Any] = {}
    exec(compile(block, "write-a-plugin.md", "exec"), names)
    tests = [test for name, test in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_every_hook_has_a_heading_that_is_its_signature() -> None:
    headings = re.findall(r"^### `(.+)`$", PLUGIN_PAGE, re.MULTILINE)
    hooks = [
        f"{name}({', '.join(inspect.signature(function).parameters)})"
        for name, function in inspect.getmembers(hookspecs, inspect.isfunction)
        if name.startswith("engage_")
    ]
    assert sorted(headings) == sorted(hooks)


def example(hook: str) -> Any:
    """Return the implementation of a hook that the page shows."""
    (block,) = [block for block in blocks(PLUGIN_PAGE, "python") if f"def {hook}(" in block]
    names: dict[str, Any] = {}
    exec(compile(block, hook, "exec"), names)
    return names[hook]


def registered(hook: str) -> tuple[str, Any, Any]:
    """Return what the implementation of a hook on the page registers."""
    calls: list[Any] = []
    example(hook)(register=lambda *arguments: calls.append(arguments))
    (call,) = calls
    name, factory, schema = call
    return name, factory, schema


def test_the_example_of_engage_register_transform_works() -> None:
    from engage.api import DROP

    name, factory, _ = registered("engage_register_transform")
    transform = factory({"drop": ["Heartbeat"]})
    assert name == "drop"
    assert transform({"event": "Heartbeat"}) is DROP
    assert transform({"event": "Other"}) == {"event": "Other"}


async def test_the_example_of_engage_register_observer_works(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, factory, _ = registered("engage_register_observer")
    await factory({"greeting": "hi"})([1, 2])
    assert capsys.readouterr().out == "hi 2\n"


def test_the_example_of_engage_register_commands_works() -> None:
    group = click.Group("engage")
    example("engage_register_commands")(cli=group)
    assert list(group.commands) == ["hello"]


# ------------------------------------------------------------------------------------ what it means
@each("user_id, identifier", [("user-1", "a@b.co"), ('ü"1', "é\n@b.co"), ("\0\x7f", "\u2028</")])
def test_the_hash_of_the_page_is_that_of_the_server(user_id: str, identifier: str) -> None:
    _, block = blocks((ROOT / "docs/events.md").read_text("utf-8"), "python")
    names: dict[str, Any] = {}
    exec(compile(block, "events.md", "exec"), names)
    assert names["subscription_hash"]("s", user_id, "acme", identifier, "email") == (
        subscription_hash(
            "s",
            subject=Subject(Kind.USER, user_id),
            workspace_id="acme",
            identifier=identifier,
            identifier_key="email",
        )
    )


@each("user_id", ["user-1", 'ü"1', "\0\u2028"])
def test_the_hash_of_a_user_id_on_the_page_is_that_of_the_server(user_id: str) -> None:
    block, _ = blocks((ROOT / "docs/events.md").read_text("utf-8"), "python")
    names: dict[str, Any] = {"secret": "ü", "user_id": user_id}
    exec(compile(block, "events.md", "exec"), names)
    item = {"userId": user_id, "context": {"userHash": names["user_hash"]}}
    right, wrong = (hmac.new(secret.encode(), digestmod="sha256") for secret in "üu")
    Rules(identity=(right,)).check_user(item, None)
    with pytest.raises(ApiError):
        Rules(identity=(wrong,)).check_user(item, None)


@each("page", ["README.md", "docs/http.md"])
def test_the_error_that_the_page_shows_is_the_one_that_the_server_sends(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    (shown,) = [json.loads(block) for block in blocks(text, "json") if '"success": false' in block]
    problems = Schemas.load().problems("track", {"userId": "u" * 513, "event": "Signed Up"})
    sent = json.loads(error_body(from_problems(problems), shown["requestId"]))
    assert shown == sent


def test_the_page_lists_every_error_code_with_its_status() -> None:
    text = (ROOT / "docs/http.md").read_text("utf-8")
    rows = re.findall(r"^\| ([0-9]{3}) \| (.+?) \|", text, re.MULTILINE)
    listed = {code: int(status) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert listed == STATUS


# ---------------------------------------------------------------------------------------- README
def test_the_readme_has_the_snippet() -> None:
    (snippet,) = blocks((ROOT / "docs/snippet.md").read_text("utf-8"), "html")
    assert snippet in blocks((ROOT / "README.md").read_text("utf-8"), "html")


def test_the_readme_has_the_curl_line_that_init_prints(tmp_path: Path) -> None:
    printed = run("init", tmp_path).stdout
    readme = (ROOT / "README.md").read_text("utf-8")
    [made] = re.findall(r"curl -u [0-9a-f]{32}: .*/api/public/apps/track$", printed, re.MULTILINE)
    assert re.sub(r"[0-9a-f]{32}", "YOUR_WRITE_KEY", made) in readme


# ---------------------------------------------------------------------------------- architecture
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text("utf-8")


def test_the_import_rule_of_the_page_is_the_one_that_is_tested() -> None:
    tree = ast.parse((ROOT / "tests/test_architecture.py").read_text("utf-8"))
    (layers,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "LAYERS"
    ]
    shown = [
        [line.split() for line in block.splitlines()]
        for block in re.findall(r"^```\n(.*?)^```$", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    ]
    assert [line.split() for line in layers] in shown


def test_every_path_on_the_architecture_page_exists() -> None:
    paths = re.findall(r"`((?:engage|plugins|schemas|tests)/[\w/.]*)`", ARCHITECTURE)
    assert len(paths) > 20
    for path in paths:
        assert (ROOT / path).exists(), path


def test_the_architecture_page_shows_every_part_of_the_server() -> None:
    for path in (ROOT / "engage").iterdir():
        if not path.name.startswith(("_", ".")) and path.suffix in ("", ".py"):
            name = f"engage/{path.name}/" if path.is_dir() else f"engage/{path.name}"
            assert f"`{name}`" in ARCHITECTURE, name


# ----------------------------------------------------------------------------------------- links
def prose(path: Path) -> str:
    """Return the text of a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@each("path", DOCS)
def test_pages_have_no_lines_of_a_merge(path: Path) -> None:
    assert not re.findall(r"^(?:<{7}|={7}|>{7})(?: .*)?$", path.read_text("utf-8"), re.MULTILINE)


@each("path", DOCS)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), target


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text("utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert "](docs/README.md)" in (ROOT / "README.md").read_text("utf-8")
