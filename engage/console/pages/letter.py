# SPDX-License-Identifier: Apache-2.0
"""``/letter``: one dead letter: why it was refused, its text to edit, a check, and its replay."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

from tornado.web import Finish, HTTPError

from engage.api import CONFLICT, DeadLetter
from engage.console.base import ConsoleHandler
from engage.console.display.formats import ROWS, visible
from engage.console.display.json_text import json_lines, places_of
from engage.errors import Problem
from engage.pipeline.explain import Explained, describe_change
from engage.pipeline.replay import audit_details, is_delivery, obstacle_of, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["CheckHandler", "LetterHandler", "ReplayHandler"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The fields that the operator fills in."""

    text: str
    new_id: bool

    @property
    def fingerprint(self) -> str:
        """A hash: a replay needs a check of the same text."""
        whole = f"{self.new_id}\0{self.text}"
        return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()

    def encoded(self, letter: DeadLetter) -> bytes | None:
        """Return the text for a replay; ``None`` if it is that of the letter."""
        if self.text == shown_text(letter):
            return None
        return self.text.encode("utf-8", "surrogatepass")


def shown_text(letter: DeadLetter) -> str:
    """Return the item of a letter for a person to edit.

    Characters that would change how the rest of it is shown are escaped as JSON does it.
    """
    return visible(text_of(letter), lines=True)


class _LetterPages(ConsoleHandler):
    """The code that the pages of a letter share."""

    async def letter(self) -> DeadLetter:
        """Return the letter that ``id`` names.

        :raises Finish: if it is gone; the answer says so.
        """
        store = self.console.store
        letter_id = self.get_argument("id", "")
        letter = await self.read(store.dead_letter(self.workspace.id, letter_id))
        if letter is None:
            if self.outage is None:
                self.set_status(404)
            self.page("letter.html", title="Rejected event", nav="rejected", letter=None)
            raise Finish
        return letter

    def form(self, letter: DeadLetter) -> Form:
        """Return the values that the operator entered, or those of the letter."""
        # Not get_body_argument, which replaces control characters.
        sent = self.request.body_arguments.get("text")
        text = shown_text(letter)
        if sent:
            # A browser sends line breaks as CR LF.
            text = self.decode_argument(sent[-1], "text").replace("\r\n", "\n")
        posted = self.request.method == "POST"
        return Form(
            text=text,
            new_id=self.get_body_argument("new_id", "") == "1"
            if posted
            else letter.reason == CONFLICT,
        )

    def show(
        self,
        letter: DeadLetter,
        form: Form,
        *,
        explained: Explained | None = None,
        failure: str = "",
        problems: Sequence[Problem] = (),
    ) -> None:
        """Show the letter with the result of a check or a replay."""
        if explained is not None:
            problems = explained.errors
            if explained.outcome == "refused" and not problems:
                problems = [Problem("", explained.message or "")]
        elif not problems and not failure:
            problems = [Problem(e.get("pointer", ""), e.get("message", "")) for e in letter.errors]
        places = places_of(form.text, [problem.pointer for problem in problems])
        event = None if explained is None else explained.event
        lines: Any = []
        if event is not None:
            lines = json_lines(event.body.decode("utf-8", "replace"))
        elif letter.truncated or is_delivery(letter):
            lines = json_lines(shown_text(letter))
        self.page(
            "letter.html",
            title="Rejected event",
            nav="rejected",
            letter=letter,
            form=form,
            obstacle=obstacle_of(letter),
            delivery=is_delivery(letter),
            conflict=letter.reason == CONFLICT,
            errors=[(*places[problem.pointer], problem) for problem in problems],
            # The list of problems says it already.
            reason="" if letter.message in map(str, problems) else letter.message,
            explained=explained,
            changes=[]
            if explained is None
            else [describe_change(change) for change in explained.changes[:ROWS]],
            failure=failure,
            lines=[[(kind, visible(text)) for kind, text in line.tokens] for line in lines],
            checked=form.fingerprint if explained is not None and explained.accepted else "",
        )


class LetterHandler(_LetterPages):
    """One letter."""

    async def get(self) -> None:
        """Show the letter."""
        letter = await self.letter()
        self.show(letter, self.form(letter))

    async def post(self) -> None:
        """Delete the letter."""
        store = self.console.store
        if self.get_body_argument("action", "") != "delete":
            raise HTTPError(400, reason="This page has no such action")
        letter_id = self.get_argument("id", "")
        count = await self.console.reader.read(store.remove(self.workspace.id, [letter_id]))
        if count:
            await self.record_audit("letter-deleted", workspace=self.workspace.id, letter=letter_id)
        self.go("rejected", done="deleted", count=count)


class CheckHandler(_LetterPages):
    """``letter/check``: the outcome that a replay would have."""

    async def post(self) -> None:
        """Show what would become of the text. Nothing is stored."""
        letter = await self.letter()
        form = self.form(letter)
        explained = await self.console.app.replays.check(
            letter, form.encoded(letter), new_id=form.new_id
        )
        self.show(letter, form, explained=explained)


class ReplayHandler(_LetterPages):
    """``letter/replay``."""

    async def post(self) -> None:
        """Replay the letter, if this text was checked before."""
        letter = await self.letter()
        form = self.form(letter)
        text = form.encoded(letter)
        replays = self.console.app.replays
        if not is_delivery(letter) and self.get_body_argument("checked", "") != form.fingerprint:
            explained = await replays.check(letter, text, new_id=form.new_id)
            self.show(letter, form, explained=explained)
            return
        replayed = await replays.replay(letter, text, new_id=form.new_id)
        if replayed.outcome == "failed":
            self.set_status(409)
            self.show(letter, form, failure=replayed.message or "", problems=replayed.errors)
            return
        await self.record_audit("letter-replayed", **audit_details(letter, text, replayed))
        if replayed.message_id is None:
            self.go("rejected", workspace=letter.workspace_id, done="replayed", count=1)
            return
        self.go(
            "event",
            workspace=letter.workspace_id,
            origin=letter.origin,
            id=replayed.message_id,
            replayed=replayed.outcome,
        )
