# SPDX-License-Identifier: Apache-2.0
"""Groups of dead letters on real stores, and on a storage that only scans forwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engage.api import DeadLetter
from engage.reading.letter_groups import LetterFilter, group_letters, pointer_of, rule_of
from engage.store.facade import Storage
from engage.testing.factories import TIME, letter
from support.each import each
from support.replay import make_bench

FIELD = {"pointer": "/event", "message": "is required"}
OTHER = {"pointer": "/userId", "message": "is too long"}


def letters(count: int = 450) -> list[DeadLetter]:
    """Return letters of four groups."""
    made = [
        letter(f"a{n}", received_at=TIME + n, errors=[FIELD, OTHER], write_key_id="website")
        for n in range(count)
    ]
    made += [letter("b", received_at=TIME + 5000, errors=[OTHER], write_key_id="website")]
    made += [letter("c", received_at=TIME + 6000, errors=[FIELD], write_key_id="ios")]
    made += [
        letter(
            "d",
            origin="stripe",
            reason="untranslated",
            write_key_id=None,
            errors=[],
            received_at=TIME + 7000,
        )
    ]
    return made


@pytest.mark.parametrize("backend", ["sqlite", pytest.param("mongo", marks=pytest.mark.mongo)])
@pytest.mark.parametrize("newest_first", [True, False])
async def test_letters_are_grouped_by_cause(
    tmp_path: Path, backend: str, newest_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_bench(tmp_path, backend=backend) as bench:
        store: Any = bench.store
        await store.put(letters())
        await store.put([letter("e", workspace_id="other")])
        if not newest_first:
            monkeypatch.setattr(type(store), "recent_dead_letters", Storage.recent_dead_letters)
        grouped = await group_letters(store, "acme")
        found = [(one.pointer, one.key, one.origin, one.count) for one in grouped.groups]
        assert found == [
            ("/event", "website", "api", 450),
            ("", None, "stripe", 1),
            ("/event", "ios", "api", 1),
            ("/userId", "website", "api", 1),
        ]
        large = grouped.groups[0]
        assert (large.first, large.last) == (TIME, TIME + 449)
        assert large.example.id == "a449"
        assert (grouped.letters, grouped.complete) == (453, True)
        matching = [one for one in letters() if large.filter.matches(one)]
        assert len(matching) == 450
        exact = await group_letters(store, "acme", limit=453)
        assert (exact.letters, exact.complete) == (453, True)
        some = await group_letters(store, "acme", limit=250)
        assert (some.letters, some.complete) == (250, False)
        monkeypatch.setattr("engage.reading.letter_groups.PAGE", 200)
        hurried = await group_letters(store, "acme", seconds=-1)
        assert (hurried.letters, hurried.complete) == (200, False)


async def test_two_rules_of_one_field_are_two_causes(tmp_path: Path) -> None:
    """Numbers and quoted values of a message differ within a cause."""
    messages = ["is required", "is required", "must not be empty"]
    messages += [f"is too long ({n} characters; the limit is 512)" for n in (513, 9000)]
    messages += ['must be one of "a"', 'must be one of "b"']
    async with make_bench(tmp_path) as bench:
        store: Any = bench.store
        await store.put(
            [
                letter(f"{n}", errors=[{"pointer": "/event", "message": message}])
                for n, message in enumerate(messages)
            ]
        )
        grouped = await group_letters(store, "acme")
        assert sorted(group.count for group in grouped.groups) == [1, 2, 2, 2]
        for group in grouped.groups:
            page = await store.scan_dead_letters("acme", after=None, limit=99)
            assert sum(group.filter.matches(one) for one in page.items) == group.count
    assert rule_of(letter("x", errors=[])) == ""


async def test_no_letters_make_no_groups(tmp_path: Path) -> None:
    async with make_bench(tmp_path) as bench:
        grouped = await group_letters(bench.store, None)
        assert (grouped.groups, grouped.letters, grouped.complete) == ([], 0, True)


@each(
    "wanted, matches",
    [
        ({}, True),
        ({"reason": "invalid_payload", "pointer": "/event", "key": "k", "origin": "api"}, True),
        *(({"until": TIME + 1}, True), ({"until": TIME}, False), ({"reason": "x"}, False)),
        *(({"pointer": ""}, False), ({"key": "x"}, False), ({"origin": "stripe"}, False)),
    ],
)
def test_a_filter_says_which_letters_are_wanted(wanted: dict[str, Any], matches: bool) -> None:
    one = letter("a", received_at=TIME, reason="invalid_payload", errors=[FIELD], write_key_id="k")
    assert LetterFilter(**wanted).matches(one) is matches
    assert pointer_of(letter("b", errors=[])) == ""
