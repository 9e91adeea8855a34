# SPDX-License-Identifier: Apache-2.0
"""Entries of the audit."""

from __future__ import annotations

import uuid

from engage import audit


def test_ids_are_uuids_of_version_7_that_ascend_with_time() -> None:
    ids = [audit.new_id(now) for now in (0, 1, 1_795_253_400_000, 1_795_253_400_001, 2**48 - 1)]
    assert ids == sorted(ids)
    for text in ids:
        made = uuid.UUID(text)
        assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert uuid.UUID(ids[2]).int >> 80 == 1_795_253_400_000
