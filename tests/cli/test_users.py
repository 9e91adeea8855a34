# SPDX-License-Identifier: Apache-2.0
"""``engage users``: ``show``, ``remove-trait``, ``unlink`` and ``link``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from engage.api import Event, Kind, Subject, SubscriptionChange
from engage.testing.factories import TIME, event, identify
from support.commands import run
from support.exports import exported, on_store
from support.sqlite import config_file, new_store


def remove(path: Path, *arguments: str) -> Result:
    return run("users", "remove-trait", "--config", path, "--workspace", "acme", *arguments)


def write(path: Path, *events: Event) -> None:
    on_store(path, lambda store: store.write(events))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Make a config whose store has the user ``ann``."""
    traits = {"plan": "pro", "email": "a@b.c", "n": None}
    return new_store(tmp_path, identify("1", "ann", 1, traits=traits))


def test_traits_are_removed(stored: Path) -> None:
    result = remove(stored, "ann", "email", "n", "email")
    assert (result.exit_code, result.stdout) == (0, "removed\temail\nremoved\tn\n")
    (user,) = exported(stored, "users")
    assert user["traits"] == {"plan": "pro"}
    # The removal is an event like any other.
    event = exported(stored, "events")[-1]
    assert event["type"] == "identify"
    assert event["source"] == "operator"
    assert event["removedTraits"] == ["email", "n"]
    assert event["timestamp"] == event["receivedAt"]
    assert (event["workspaceId"], event["userId"]) == ("acme", "ann")
    # An event from before that arrives late does not bring the trait back, a later one does.
    write(stored, identify("2", "ann", 5, traits={"email": "late@b.c"}))
    assert exported(stored, "users")[0]["traits"] == {"plan": "pro"}
    later = int(time.time() * 1000) - TIME + 1000
    write(stored, identify("3", "ann", later, traits={"email": "new@b.c"}))
    assert exported(stored, "users")[0]["traits"] == {"email": "new@b.c", "plan": "pro"}


def test_a_trait_that_was_set_in_the_future_is_removed(stored: Path) -> None:
    """A server had a wrong clock. Only that trait is removed as late as that."""
    later = int(time.time() * 1000) - TIME + 10**10
    write(stored, identify("2", "ann", later, traits={"plan": "future"}))
    assert remove(stored, "ann", "email", "plan").exit_code == 0
    assert exported(stored, "users")[0]["traits"] == {"n": None}
    first, second = exported(stored, "events")[-2:]
    assert first["removedTraits"] == ["email", "plan"]
    assert second["removedTraits"] == ["plan"]
    assert first["timestamp"] < second["timestamp"]


def test_copies_have_the_removals(stored: Path, tmp_path: Path) -> None:
    remove(stored, "ann", "email")
    target = config_file(tmp_path, "target")
    result = run("copy", "--from", stored, "--to", target)
    assert result.exit_code == 0, result.output
    assert exported(target, "users") == exported(stored, "users")


def test_what_cannot_be_removed_is_reported(stored: Path) -> None:
    result = remove(stored, "ann", "email", "unknown\x1b")
    assert (result.exit_code, result.stdout) == (0, "removed\temail\n")
    assert result.stderr == "engage: the user does not have the trait 'unknown\\u001b'\n"
    assert remove(stored, "ann", "email").exit_code == 1
    count = len(exported(stored, "events"))
    result = remove(stored, "bob", "email")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "engage: the workspace 'acme' has no user 'bob'\n"
    result = run(
        *("users", "remove-trait", "--config", stored, "--workspace", "nope", "ann", "email")
    )
    assert result.exit_code == 1
    assert "does not contain a workspace 'nope'" in result.stderr
    assert len(exported(stored, "events")) == count


def visit(message_id: str, anonymous_id: str, **traits: Any) -> Event:
    return event(message_id, type="identify", anonymous_id=anonymous_id, at=2, traits=traits)


def test_a_trait_of_a_visitor_is_removed(stored: Path) -> None:
    write(stored, visit("v1", "v", phone="+1", plan="free"), visit("w1", "w", phone="+2"))
    # Of the user that the visitor belongs to, and of one that belongs to nobody.
    write(stored, event("link", user_id="ann", anonymous_id="v"))
    assert exported(stored, "users")[0]["traits"]["phone"] == "+1"
    assert remove(stored, "ann", "phone").stdout == "removed\tphone\n"
    assert exported(stored, "users")[0]["traits"] == {"plan": "free", "email": "a@b.c", "n": None}
    result = remove(stored, "--anonymous-id", "w", "phone", "none")
    assert (result.exit_code, result.stdout) == (0, "removed\tphone\n")
    assert result.stderr == "engage: the visitor does not have the trait 'none'\n"
    visitors = {visitor["anonymousId"]: visitor for visitor in exported(stored, "visitors")}
    assert visitors["w"]["traits"] == {}
    assert (visitors["v"]["userId"], visitors["w"]["userId"]) == ("ann", None)
    result = remove(stored, "--anonymous-id", "nobody", "phone")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the workspace 'acme' has no visitor 'nobody'" in result.stderr


def decide(path: Path, command: str, user: str, anonymous_id: str) -> Result:
    options = ("--workspace", "acme", "--user", user, "--anonymous-id", anonymous_id)
    return run("users", command, "--config", path, *options)


def test_an_operator_undoes_a_link_and_restores_it(stored: Path) -> None:
    write(stored, visit("v1", "v", plan="free"), event("link", user_id="ann", anonymous_id="v"))

    def ann() -> Any:
        (user,) = exported(stored, "users")
        return user["traits"]["plan"], user["anonymousIds"]

    assert ann() == ("free", ["v"])
    assert decide(stored, "unlink", "ann", "v").stdout == "unlinked\n"
    assert ann() == ("pro", [])
    write(stored, event("again", user_id="ann", anonymous_id="v", at=3))
    assert ann() == ("pro", [])
    result = decide(stored, "unlink", "ann", "v")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "engage: 'v' is not an anonymous id of the user 'ann'\n"
    assert decide(stored, "link", "ann", "v").stdout == "linked\n"
    assert ann() == ("free", ["v"])
    result = decide(stored, "link", "nobody", "v")
    assert "the workspace 'acme' has no user 'nobody'" in result.stderr


@pytest.mark.parametrize("anonymous_id", ["bob", "email:a@b.c", "null", "ann", " ", "third"])
def test_a_link_without_effect_is_an_error(stored: Path, anonymous_id: str) -> None:
    links = (event(f"x{n}", user_id="ann", anonymous_id=f"x{n}") for n in range(998))
    write(stored, identify("2", "bob"), *links)
    for name in ("first", "second"):
        assert decide(stored, "link", "ann", name).stdout == "linked\n"
    result = decide(stored, "link", "ann", anonymous_id)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"engage: {anonymous_id!r} cannot be linked to the user 'ann'")
    linked = exported(stored, "users")[0]["anonymousIds"]
    assert (len(linked), linked[:2]) == (1000, ["first", "second"])


def shown(path: Path, *arguments: str) -> Result:
    return run("users", "show", "--config", path, "--workspace", "acme", *arguments)


def test_a_user_is_shown_with_all_that_is_known(stored: Path) -> None:
    write(
        stored,
        event("2", type="group", user_id="ann", groupId="g", at=2, anonymous_id="x"),
        *(event(f"e{n}", user_id="ann", at=3, received=n) for n in range(12)),
        event("other", user_id="bob", at=4),
        event("away", workspace="other", user_id="ann", at=4),
    )
    fields: dict[str, Any] = {"id": "c", "choices": {"news": True}, "at": 5, "how": "api"}
    change = SubscriptionChange(workspace_id="acme", subject=Subject(Kind.USER, "ann"), **fields)
    on_store(stored, lambda store: store.apply(change))
    result = shown(stored, "ann")
    assert (result.exit_code, result.stderr) == (0, "")
    about, _, table = result.stdout.partition("\n\n")
    lines = about.splitlines()
    for line in ("id: ann", "groups: g", 'trait plan: "pro"', "subscription news: yes"):
        assert line in lines
    rows = [line.split("\t") for line in table.splitlines()]
    assert len(rows) == 10
    assert all(row[1:2] == ["track"] for row in rows)
    result = shown(stored, "ann", "--json")
    (line,) = result.stdout.splitlines()
    document = json.loads(line)
    (profile,) = (user for user in exported(stored, "users") if user["workspaceId"] == "acme")
    assert document["user"] == profile
    assert document["subscriptions"] == {"news": True}
    assert [one["messageId"] for one in document["events"]] == [row[3] for row in rows]


def test_a_visitor_is_shown_with_its_user(stored: Path) -> None:
    write(
        stored,
        visit("v1", "v", phone="+1"),
        visit("w1", "w", plan="free"),
        event("page", anonymous_id="w", type="page", at=3),
        event("longer", anonymous_id="w2", at=4),
        *(event(f"link{one}", user_id="ann", anonymous_id=one) for one in ("v", "x")),
    )
    lines = shown(stored, "w").stdout.splitlines()
    for line in ("id: w", "visitor: belongs to no user", 'trait plan: "free"', "groups: -"):
        assert line in lines
    assert not any(line.startswith(("profile", "anonymous ids")) for line in lines)
    document = json.loads(shown(stored, "w", "--json").stdout)
    exports = {visitor["anonymousId"]: visitor for visitor in exported(stored, "visitors")}
    assert (document["user"], document["visitor"]) == (None, exports["w"])
    assert [one["messageId"] for one in document["events"]] == ["page", "w1"]
    assert "visitor: belongs to the user ann" in shown(stored, "v").stdout.splitlines()
    lines = shown(stored, "ann").stdout.splitlines()
    for line in ("anonymous ids: v, x", "visitors: v", 'trait phone: "+1"'):
        assert line in lines
    assert json.loads(shown(stored, "ann", "--json").stdout)["visitors"] == ["v"]
    # An anonymous id that becomes the id of a user.
    write(stored, identify("late", "w", 5))
    lines = shown(stored, "w").stdout.splitlines()
    assert {"visitor: there is one with this id, too", "anonymous ids: -"} <= set(lines)


def test_an_id_that_is_not_utf_8_is_an_error(stored: Path) -> None:
    for command in (["users", "show"], ["export", "events", "--user"]):
        result = run(*command, os.fsdecode(b"a\xff"), "--config", stored, "--workspace", "acme")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == "engage: 'a\\udcff' cannot be encoded as UTF-8\n"


@pytest.mark.parametrize("id_of", ["user_id", "anonymous_id"])
def test_events_without_a_profile_are_shown(stored: Path, id_of: str) -> None:
    ids: dict[str, Any] = {"user_id": None, "anonymous_id": None, id_of: "carl"}
    write(stored, event("m", event="\x1b[31mred", **ids))
    result = shown(stored, "carl")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "profile: none" in result.stdout
    assert "\ttrack\t\\u001b[31mred\tm\n" in result.stdout
    document = json.loads(shown(stored, "carl", "--json").stdout)
    assert (document["user"], len(document["events"])) == (None, 1)


def test_an_unknown_user_is_status_1(stored: Path) -> None:
    result = shown(stored, "nobody")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has no user, visitor or event with the id 'nobody'" in result.stderr
