# SPDX-License-Identifier: Apache-2.0
"""CHANGELOG.md has the version of the code, and a new version for each change of the stores."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

import engage
from engage_plugins.mongo import schema as mongo
from engage_plugins.postgres import schema as postgres
from engage_plugins.sqlite import schema as sqlite
from support.each import each

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CHANGELOG.md").read_text("utf-8")
STORES = (
    f"SQLite {sqlite.VERSION} (readable from {sqlite.MIN_READER}), "
    f"MongoDB {mongo.VERSION} (readable from {mongo.MIN_READER}), "
    f"PostgreSQL {postgres.VERSION} (readable from {postgres.MIN_READER})"
)
SECTIONS = ["Breaking", "Do this", "New", "Fixed"]


def check(text: str, version: str, stores: str) -> None:
    """Check a changelog.

    :param version: that of the code; after a release it is that of the next one with ``.dev0``.
    :param stores: the store versions of the code, as an entry has them.
    """
    entries = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    heading = r"(\d+)\.(\d+)\.(\d+) \((not released|\d{4}-\d\d-\d\d(?:, commit [0-9a-f]{40})?)\)\n"
    matches = [re.match(heading, entry) for entry in entries]
    heads = [match.groups() for match in matches if match]
    assert len(heads) == len(entries) > 0, "a heading is not one of a version"
    assert version.removesuffix(".dev0") == ".".join(heads[0][:3]), "the code has another version"
    # After a release, the version rises before anything else changes, also the stores.
    assert ["commit" in head[3] for head in heads] == [False] + [True] * (len(heads) - 1)
    assert not version.endswith(".dev0") or heads[0][3] == "not released"

    seen = []
    for entry, head in zip(entries, heads, strict=True):
        found = re.findall(r"^Store versions: (.*)\.$", entry, re.MULTILINE)
        assert len(found) == 1, "an entry has the store versions once"
        seen.append((tuple(map(int, head[:3])), found[0]))
        sections = re.split(r"^### (.*)\n", entry, flags=re.MULTILINE)[1:]
        names, contents = sections[::2], sections[1::2]
        assert names == [name for name in SECTIONS if name in names], "other sections"
        assert all(content.strip().startswith("- ") for content in contents), "an empty section"
    assert seen[0][1] == stores, "the code has other store versions"
    for (newer, with_stores), (older, of_older) in itertools.pairwise(seen):
        assert newer > older
        # A version such as 0.2.1 opens the stores of 0.2.0, and the other way around.
        assert with_stores == of_older or newer[:2] > older[:2], "the stores need a greater version"


def test_the_changelog_is_that_of_the_code() -> None:
    check(TEXT, engage.__version__, STORES)


def test_the_changelog_names_every_removed_key() -> None:
    properties = json.loads((ROOT / "schemas/config.json").read_text("utf-8"))["properties"]
    for section, schema in properties.items():
        for key in schema.get("x-removed", ()):
            assert f"`{section}.{key}`" in TEXT


GOOD = f"""# Changelog

## 0.3.0 (not released)

Store versions: B.

### New

- Something.

## 0.2.1 (2027-01-02, commit {"a" * 40})

Store versions: A.

### Fixed

- Something.

## 0.2.0 (2027-01-01, commit {"b" * 40})

Store versions: A.
"""


def test_a_good_changelog_is_accepted() -> None:
    check(GOOD, "0.3.0.dev0", "B")
    check(GOOD.replace("not released", "2027-01-03"), "0.3.0", "B")


@each(
    "before, after",
    [
        *(("0.3.0 (", "0.4.0 ("), ("0.3.0 (", "0.2.0 ("), ("0.3.0 (not released)", "Next")),
        *(("not released", f"2027-01-03, commit {'c' * 40}"), ("not released", "2027-01-03")),
        *((f", commit {'a' * 40}", ""), ("versions: B", "versions: C"), ("0.2.1", "0.3.1")),
        *(("0.2.0 (", "0.2.2 ("), ("versions: A.\n\n### Fixed", "versions: B.\n\n### Fixed")),
        *(("Store versions: A.\n\n### Fixed", "### Fixed"), ("### New", "### Added")),
        *(("- Something.", ""), ("### Fixed", "### Fixed\n\n- Something.\n\n### New")),
    ],
)
def test_a_flaw_is_noticed(before: str, after: str) -> None:
    assert before in GOOD
    with pytest.raises(AssertionError):
        check(GOOD.replace(before, after, 1), "0.3.0.dev0", "B")
