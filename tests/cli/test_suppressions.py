# SPDX-License-Identifier: Apache-2.0
"""``engage suppressions list``, ``remove`` and ``check``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from engage.store.suppressions import hashed_address
from engage.testing.factories import event, identify, suppression, user, visitor
from support.commands import run
from support.exports import audit_of, on_store
from support.people import KEY
from support.rules.erasures import change
from support.sqlite import config_file

HEAD = "2025-01-01T00:00:00.00"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Make a config and a store with suppressed addresses."""
    suppressed = [
        suppression("ann@b.c", how="webhook:sendgrid", source_id="evt 1"),
        suppression("ann@b.c", reason="unsubscribe", group_id="news", at=1),
        suppression("+491", channel="sms", reason="stop", at=2),
        suppression("x@y.z", reason="bounce", at=3, lifted=True),
        suppression("Bell", channel="push", at=4),
        suppression("ann@b.c", workspace="other", at=5),
    ]
    path = config_file(tmp_path)
    on_store(path, lambda store: store.suppress(suppressed))
    return path


def of_acme(config: Path, command: str, *arguments: str) -> Result:
    return run("suppressions", command, "--config", config, "--workspace", "acme", *arguments)


def listed(config: Path, *arguments: str) -> list[list[str]]:
    """Return the cells that ``list`` prints."""
    result = of_acme(config, "list", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return [line.split("\t") for line in result.stdout.splitlines()]


def test_list_prints_what_is_suppressed(config: Path) -> None:
    everything = listed(config)
    assert everything[0] == [
        *(HEAD + "0Z", "email", "ann@b.c", "-", "complaint", "webhook:sendgrid", "evt 1")
    ]
    assert everything[1] == [HEAD + "1Z", "email", "ann@b.c", "news", "unsubscribe", "-", "-"]
    assert [row[2] for row in everything[2:]] == ["+491", "Bell"]
    assert listed(config, "--channel", "sms") == [everything[2]]
    # In the form of the channel; the config names no channel push.
    assert listed(config, " ANN@b.c ", " +49 (1)", "Bell") == everything[:3]
    assert listed(config, "--channel", "push", "Bell", "bell") == [everything[3]]
    assert listed(config, "x@y.z") == []
    result = of_acme(config, "list", "--limit", "3")
    assert len(result.stdout.splitlines()) == 3
    assert result.stderr == "engage: there are more than 3; see --limit\n"
    assert len(listed(config, "--limit", "4")) == 4


def test_remove_lifts_until_a_later_report(config: Path) -> None:
    result = of_acme(config, "remove", "--reason", "complaint", "Ann@b.c")
    assert (result.exit_code, result.stdout) == (0, "removed\temail\tann@b.c\t-\tcomplaint\n")
    assert [row[4] for row in listed(config, "ann@b.c")] == ["unsubscribe"]
    result = of_acme(config, "remove", "ann@b.c", "+491")
    assert len(result.stdout.splitlines()) == 2
    assert listed(config, "ann@b.c", "+491") == []
    for arguments in (["ann@b.c"], ["--channel", "email", "Bell"], ["nobody@b.c", ""]):
        result = of_acme(config, "remove", *arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == "engage: none of these addresses is suppressed\n"

    on_store(config, lambda store: store.suppress([suppression("ann@b.c", at=9)]))
    assert listed(config, "ann@b.c") == []
    on_store(config, lambda store: store.suppress([suppression("ann@b.c", at=10**12)]))
    entries = audit_of(config)
    assert [entry.action for entry in entries] == ["suppression-removed"] * 3
    assert entries[0].details["reason"] == "complaint"
    assert len(listed(config, "ann@b.c")) == 1
    # The last report is from the future.
    assert of_acme(config, "remove", "ann@b.c").exit_code == 0
    assert listed(config, "ann@b.c") == []


def test_the_address_of_an_erased_person_is_listed_and_removed(config: Path) -> None:
    with config.open("a") as file:
        file.write(f'[erasures]\nkey = "{KEY}"\n')
    sms = {"channel": "sms", "reason": "stop"}
    erased = {
        "email": hashed_address(KEY, "acme", "email", "erased@b.c"),
        "sms": hashed_address(KEY, "acme", "sms", "+492"),
    }
    gone = [
        suppression(erased["email"], reason="objection", group_id="news", at=6),
        suppression(erased["sms"], at=7, **sms),
    ]
    on_store(config, lambda store: store.suppress(gone))
    rows = listed(config, "Erased@b.c", "+49 2")
    assert [row[1:5] for row in rows] == [
        ["email", erased["email"], "news", "objection"],
        ["sms", erased["sms"], "-", "stop"],
    ]
    assert listed(config, "other@b.c") == []
    result = of_acme(config, "remove", "Erased@b.c")
    assert (result.exit_code, result.stderr) == (0, "")
    assert listed(config, "Erased@b.c", "+492") == rows[1:]


def test_check_prints_who_must_not_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERASURES", KEY)
    path = config_file(tmp_path)
    with path.open("a") as file:
        file.write('[erasures]\nkey = "${ERASURES}"\n')
    erased = hashed_address(KEY, "acme", "email", "erased@b.c")

    async def fill(store: Any) -> None:
        emails = {"on": "on@b.c", "off": "off@b.c", "two": "both@b.c", "none": "none@b.c"}
        people = [identify(name, name, traits={"email": email}) for name, email in emails.items()]
        visits = [
            event(one, type="identify", anonymous_id=one, traits={"email": f"{one}@b.c"})
            for one in ("both", "visitor")
        ]
        merged = [
            event("m1", type="identify", anonymous_id="phone", traits={"email": "merged@b.c"}),
            identify("m2", "merged", anonymous_id="phone"),
        ]
        await store.write([*people, *visits, *merged])
        choices = [(user("on"), True), (user("off"), False), (user("two"), True)]
        choices.append((user("merged"), False))
        for subject, on in [*choices, (visitor("both"), False), (visitor("visitor"), True)]:
            await store.apply(
                change(f"{subject}", "", subject=subject, choices={"news": on, "ads": False})
            )
        await store.suppress(
            [
                suppression("spam@b.c"),
                suppression("on@b.c", group_id="ads", reason="objection"),
                suppression("object@b.c", group_id="news", reason="objection"),
                suppression(erased, reason="stop"),
            ]
        )

    on_store(path, fill)
    names = ("ON", "off", "both", "visitor", "none", "nobody", "spam", "Object", "erased", "merged")
    # In several pages.
    monkeypatch.setattr(importlib.import_module("engage.cli.suppressions"), "PAGE", 3)
    (tmp_path / "list").write_text("\ufeff" + "\n".join([*(f" {name}@b.c" for name in names), ""]))
    result = of_acme(path, "check", "--group", "news", str(tmp_path / "list"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split("\t") for line in result.stdout.splitlines()] == [
        ["off@b.c", "unsubscribed"],
        ["both@b.c", "unsubscribed"],
        ["none@b.c", "not subscribed"],
        ["nobody@b.c", "not subscribed"],
        ["spam@b.c", "complaint"],
        ["Object@b.c", "objection"],
        ["erased@b.c", "stop"],
        ["merged@b.c", "unsubscribed"],
    ]
    text = path.read_text()
    path.write_text(text.replace('type = "opt_in"', 'type = "opt_out"'))
    result = of_acme(path, "check", "--group", "news", str(tmp_path / "list"))
    assert "not subscribed" not in result.stdout
    path.write_text(text.replace('channel = "email"', 'channel = "push"'))
    for group in ("nope", "news"):
        result = of_acme(path, "check", "--group", group, str(tmp_path / "list"))
        assert f"{group!r} is no subscription group of acme with addresses" in result.stderr


def test_check_names_lines_that_are_no_address(tmp_path: Path) -> None:
    """Nothing is suppressed under what they are, whatever is suppressed of the address in them."""
    path = config_file(tmp_path)
    on_store(path, lambda store: store.suppress([suppression("a@b.c")]))
    lines = ["email", "", "Ann <a@b.c>", "a@b.c,yes", "+49 123", "@", "a@b.c"]
    (tmp_path / "list").write_text("\n".join(lines))
    result = of_acme(path, "check", "--group", "news", str(tmp_path / "list"))
    assert (result.exit_code, result.stdout) == (1, "a@b.c\tcomplaint\n")
    assert result.stderr.splitlines() == [
        *(
            f"engage: line {number}: {lines[number - 1]!r} is no address of email"
            for number in (1, 3, 4, 5, 6)
        ),
        "engage: lines without an address: 5",
    ]
