# SPDX-License-Identifier: Apache-2.0
"""Dead letters with odd texts."""

from __future__ import annotations

from pathlib import Path

from engage.testing.factories import letter
from support.sqlite import make


async def test_a_dead_letter_may_be_invalid_unicode(tmp_path: Path) -> None:
    """This may be the reason why the event was refused."""
    store = make(tmp_path)
    await store.open(create=True)
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
    await store.close()
