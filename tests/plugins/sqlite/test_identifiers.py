# SPDX-License-Identifier: Apache-2.0
"""The claims of identifier traits, compared with a plain model, and what they cost."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engage.api import Event
from engage.store import changes, identifiers
from engage.testing import WORKSPACE, identify
from engage.testing.factories import TIME
from engage_plugins.sqlite.engine import Engine
from engage_plugins.sqlite.steps import execute
from support.sqlite import settings, write

BOUND = 3


def opened(tmp_path: Path, traits: Sequence[str] = ("email",)) -> Engine:
    engine = Engine(settings(tmp_path / "engage.db", identifiers={WORKSPACE: traits}))
    engine.open(create=True, serving=True)
    return engine


def found(engine: Engine, value: str) -> list[str]:
    steps = identifiers.find_users(WORKSPACE, "email", [value])
    users: dict[str, list[str]]
    users = execute(engine.connection(), steps, engine.settings.context)
    return users.get(value, [])


# --------------------------------------------------------------------------------------- the model
@dataclasses.dataclass
class User:
    """What a user's claims are, by the rule of ``Storage.find_users``."""

    #: The first values, with the least time of receipt of each.
    kept: dict[str, int] = dataclasses.field(default_factory=dict)
    version: tuple[int, str] = (0, "")
    value: str | None = None
    #: The claim of the current value, if it is not one of the first.
    later: int = 0

    def write(self, events: Sequence[tuple[Event, str | None]]) -> None:
        later: dict[str, int] = {}
        before = self.value
        for event, value in events:
            if value is not None:
                at = event.received_at
                if value in self.kept or len(self.kept) < BOUND:
                    self.kept[value] = min(at, self.kept.get(value, at))
                else:
                    later[value] = min(at, later.get(value, at))
            if (event.timestamp, event.message_id) > self.version:
                self.version, self.value = (event.timestamp, event.message_id), value
        if self.value is not None and self.value not in self.kept:
            if self.value != before:
                self.later = later[self.value]
            else:
                self.later = min(self.later, later.get(self.value, self.later))

    @property
    def claimed_at(self) -> int:
        return self.kept.get(self.value or "", self.later)


def check(engine: Engine, users: Mapping[str, User]) -> None:
    """Compare what is stored with the model."""
    rows = engine.connection().execute(
        "SELECT p.name, i.value, i.claimed_at "
        "FROM identifiers i JOIN profiles p ON p.id = i.profile"
    )
    assert {name: (value, at) for name, value, at in rows} == {
        name: (user.value, user.claimed_at)
        for name, user in users.items()
        if user.value is not None
    }
    claims: dict[str, dict[str, int]] = {}
    for name, value, at in engine.connection().execute(
        "SELECT p.name, c.value, c.received_at FROM claims c JOIN profiles p ON p.id = c.profile"
    ):
        claims.setdefault(name, {})[value] = at
    for name, user in users.items():
        stored = claims.get(name, {})
        assert stored.keys() <= user.kept.keys()
        earlier = user.kept.keys() - {user.value}
        assert {value: stored[value] for value in earlier} == {
            value: user.kept[value] for value in earlier
        }


@pytest.mark.parametrize("seed", range(40))
def test_claims_are_those_of_the_model(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "MAX_CLAIMS", BOUND)
    rng = random.Random(seed)
    engine = opened(tmp_path)
    users = {"u": User(), "v": User()}
    clock = 1000
    for number in range(25):
        events: list[Event] = []
        made: dict[str, list[tuple[Event, str | None]]] = {"u": [], "v": []}
        for index in range(rng.choice((1, 1, 2, 6))):
            clock += 1
            name, value = rng.choice("uv"), rng.choice((None, *"abcdef"))
            one = identify(
                f"{number:02}-{index}",
                name,
                clock if rng.random() < 0.7 else rng.randrange(1000, clock),
                received=clock if rng.random() < 0.8 else rng.randrange(500, clock),
                traits={"email": value},
            )
            events.append(one)
            made[name].append((one, value))
        for name, user in users.items():
            user.write(made[name])
        write(engine, *events)
        check(engine, users)
    engine.drop()


# ----------------------------------------------------------------------------------------- costs
def test_an_unchanged_value_writes_no_claim(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    email = {"email": "ann@example.com", "plan": "free"}
    write(engine, identify("1", "ann", 1, traits=email))
    statements: list[str] = []
    engine.connection().set_trace_callback(statements.append)
    write(engine, identify("2", "ann", 2, traits={**email, "plan": "pro"}))
    engine.connection().set_trace_callback(None)
    concerned = [one for one in statements if "claims" in one or "identifiers" in one]
    assert len(concerned) == 1, concerned
    assert concerned[0].startswith("SELECT")
    engine.drop()


def test_a_user_with_one_value_has_no_row_of_claims(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    for number in range(3):
        write(engine, identify(str(number), "ann", number, traits={"email": "ann@example.com"}))

    def claims() -> Any:
        return engine.connection().execute("SELECT value, received_at FROM claims").fetchall()

    assert claims() == []
    # Another value, or none: then the claim of the earlier one is stored.
    write(engine, identify("3", "ann", 3, traits={"email": None}))
    assert claims() == [("ann@example.com", TIME)]
    engine.drop()


def test_claims_are_kept_while_a_trait_is_not_declared(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    write(engine, identify("1", "ann", 1, traits={"email": "ann@example.com"}))
    write(engine, identify("2", "bob", 2, traits={"email": "ann@example.com"}))
    write(engine, identify("3", "bob", 3, traits={"email": "bob@example.com"}))
    engine.drop()
    engine = opened(tmp_path, ())
    assert found(engine, "ann@example.com") == []
    # Nothing of this is claimed.
    write(engine, identify("4", "eve", 0, traits={"email": "eve@example.com"}))
    engine.drop()
    engine = opened(tmp_path)
    write(engine, identify("5", "eve", 5, traits={"email": "ann@example.com"}))
    write(engine, identify("6", "bob", 6, traits={"email": "ann@example.com"}))
    assert found(engine, "ann@example.com") == ["ann", "bob", "eve"]
    engine.drop()
