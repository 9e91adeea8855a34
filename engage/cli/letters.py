# SPDX-License-Identifier: Apache-2.0
"""The code that the commands of ``engage dead-letters`` share."""

from __future__ import annotations

from typing import Any, Final

import click

from engage.api import (
    EVENT_TYPES,
    DeadLetter,
    EngageError,
)
from engage.api.times import EVENT_TIMES
from engage.cli.common import operator, workspace_option
from engage.store.facade import Storage
from engage.upkeep.audit import record_audit

__all__ = [
    "key_option",
    "letter_of",
    "letters_option",
    "new_id_option",
    "pointer_option",
    "reason_option",
    "record",
    "set_option",
    "type_option",
    "unverified_option",
]

letters_option = workspace_option("The workspace of the letters, if there are several.")
type_option = click.option(
    "--type",
    "operation",
    type=click.Choice((*EVENT_TYPES, "batch")),
    help="The type of the call; batch: the event has its type, as in a batch.",
)
new_id_option = click.option(
    "--new-id", is_flag=True, help="Give the event a new message id, which a conflict needs."
)
unverified_option = click.option(
    "--unverified",
    is_flag=True,
    help="Replay also an event whose user was not verified, from before verify_identity.",
)
reason_option = click.option("--reason", metavar="CODE", help="Only letters with this reason.")
pointer_option = click.option(
    "--pointer", metavar="POINTER", help="Only letters whose first error is at this JSON pointer."
)
_TIMES: Final = {f"/{name}=receivedAt": name for name in EVENT_TIMES}
set_option = click.option(
    "--set",
    "times",
    type=click.Choice(list(_TIMES)),
    multiple=True,
    callback=lambda _context, _option, chosen: [_TIMES[one] for one in chosen],
    help="Leave out a time that cannot be read, so that the event happened when it arrived.",
)
key_option = click.option("--key", metavar="ID", help="Only letters of this write key.")


async def letter_of(store: Storage, workspace_id: str, letter_id: str) -> DeadLetter:
    """Return a dead letter.

    :raises EngageError: if there is none with this id.
    """
    letter = await store.dead_letter(workspace_id, letter_id)
    if letter is None:
        raise EngageError(
            f"the workspace {workspace_id!r} has no dead letter {letter_id!r}; it was replayed,"
            " deleted or has expired"
        )
    return letter


async def record(store: Storage, action: str, details: Any) -> None:
    """Record an action in the audit."""
    from engage.pipeline.clock import Clock

    await record_audit(store, operator(), action, details, now=Clock()())
