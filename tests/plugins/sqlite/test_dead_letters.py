# SPDX-License-Identifier: Apache-2.0
"""Dead letters with odd texts."""

from __future__ import annotations

from engage.testing.factories import letter
from engage_plugins.sqlite.store import SqliteStorage


async def test_a_dead_letter_may_be_invalid_unicode(store: SqliteStorage) -> None:
    """This may be the reason why the event was refused."""
    odd = letter(
        "l",
        user_id="u\ud800",
        message="\udfff",
        errors=[{"pointer": "/\ud800", "message": "x"}],
        headers=[("a", "\ud800")],
    )
    assert await store.put([odd, letter("m")]) == 0
    (first, second) = (await store.scan_dead_letters(None, after=None, limit=9)).items
    assert (first.user_id, first.message, first.headers) == ("u?", "?", [("a", "?")])
    assert second.id == "m"
