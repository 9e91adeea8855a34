# SPDX-License-Identifier: Apache-2.0
"""``/event`` and ``/event.json``: one event or dead letter with all that is stored."""

from __future__ import annotations

from typing import Any

from tornado.web import HTTPError

from engage.api import API_ORIGIN, DeadLetter, Event
from engage.console.base import ConsoleHandler
from engage.console.display.formats import iso, number, size, visible
from engage.console.display.json_text import Line, json_lines
from engage.console.display.snippets import event_as_curl, server_url
from engage.errors import Problem, quote
from engage.pipeline.replay import MAX_SHOWN

__all__ = ["EventHandler", "EventJsonHandler"]


def time_story(event: Event, document: dict[str, Any]) -> str:
    """Return how the timestamp of an event came about, in one or two sentences."""
    if event.origin != API_ORIGIN:
        return "The provider's time of the event, or that of the delivery."
    original, sent = document.get("originalTimestamp"), document.get("sentAt")
    if original is None:
        return "The client sent no time, so it is the time of arrival."
    if sent is None:
        return f"The client's time, {visible(original)}. It sent no sentAt, so it is not corrected."
    return (
        f"The client's time {visible(original)}, corrected by the difference between its clock when"
        f" it sent the request (sentAt {visible(sent)}) and this server's when it arrived."
    )


def _shown(text: str) -> str:
    return quote(visible(text, lines=True), MAX_SHOWN + 1)


def _lines(lines: list[Line]) -> list[dict[str, Any]]:
    return [
        {
            "tokens": [[kind, visible(text)] for kind, text in line.tokens],
            "marked": line.marked,
        }
        for line in lines
    ]


class _Loads(ConsoleHandler):
    """Reads the event or letter that the query names."""

    async def load_event(self) -> Event | None:
        """Return the event with this origin and message id."""
        return await self.read(
            self.console.store.find(
                self.workspace.id,
                self.exact("origin") or API_ORIGIN,
                self.exact("id"),
            )
        )

    async def load_letter(self, letter_id: str) -> DeadLetter | None:
        """Return the dead letter with this id."""
        store = self.console.store
        return await self.read(store.dead_letter(self.workspace.id, letter_id))

    def curl_of(self, event: Event, text: str) -> str:
        """Return the command that sends an event again."""
        key_id = event.document().get("writeKeyId")
        all_keys = self.console.keys.of(self.workspace.id)
        keys = {key.id: key.key or "YOUR_SERVER_KEY" for key in all_keys}
        key = keys.get(str(key_id)) or next(iter(keys.values()), "YOUR_WRITE_KEY")
        return event_as_curl(server_url(self.console.config), key, text)

    def event_view(self, event: Event) -> dict[str, Any]:
        """Return an event as the pages show it."""
        document = event.document()
        text = _shown(event.body.decode("utf-8", "replace"))
        rows = [
            ("Message id", event.message_id, ""),
            ("User", event.user_id, "user"),
            ("Anonymous id", event.anonymous_id, ""),
            ("Write key", document.get("writeKeyId"), ""),
            ("Source", document.get("source"), ""),
        ]
        return {
            "title": f"{event.type} {visible(event.name or '')}".strip(),
            "status": "stored",
            "facts": [[name, visible(value), kind] for name, value, kind in rows if value],
            "received": iso(event.received_at),
            "timestamp": iso(event.timestamp),
            "story": time_story(event, document),
            "size": size(len(event.body)),
            "lines": _lines(json_lines(text)),
            "raw": text,
            "curl": _shown(self.curl_of(event, text)),
            "reasons": [],
            "links": self._links(event.user_id, event.anonymous_id)
            | {"event": self.link("event", **_ids(event))},
        }

    def letter_view(self, letter: DeadLetter) -> dict[str, Any]:
        """Return a dead letter as the pages show it."""
        text = _shown(letter.item.decode("utf-8", "replace"))
        problems = [Problem(e.get("pointer", ""), e.get("message", "")) for e in letter.errors]
        rows = [
            ("Reason", letter.reason),
            ("Message id", letter.message_id),
            ("User", letter.user_id),
            ("Write key", letter.write_key_id),
            ("Source", letter.origin),
        ]
        marked = {problem.pointer for problem in problems}
        return {
            "title": visible(letter.message),
            "status": "rejected",
            "facts": [[name, visible(value), ""] for name, value in rows if value],
            "received": iso(letter.received_at),
            "timestamp": "",
            "story": "",
            "size": f"{number(len(letter.item))} bytes"
            + (", cut: the rest was not kept" if letter.truncated else ""),
            "lines": _lines(json_lines(text, marked)),
            "raw": text,
            "curl": "",
            "reasons": [visible(str(problem)) for problem in problems] or [visible(letter.message)],
            "links": {
                "letter": self.link("letter", id=letter.id),
                **self._links(letter.user_id, None),
            },
        }

    def _links(self, user_id: str | None, anonymous_id: str | None) -> dict[str, str]:
        if user_id:
            return {"user": self.link("user", id=user_id)}
        if anonymous_id:
            return {"visitor": self.link("user", visitor=anonymous_id)}
        return {}


def _ids(event: Event) -> dict[str, str]:
    return {"origin": event.origin, "id": event.message_id}


class EventHandler(_Loads):
    """One stored event."""

    async def get(self) -> None:
        """Show the event, or where else it may be."""
        event = await self.load_event()
        if event is None:
            if self.outage is None:
                self.set_status(404)
            days = self.console.config.retention.events_days
            self.page("event.html", title="Event", nav="events", view=None, days=days)
            return
        if self.get_query_argument("download", ""):
            self.set_header("Content-Type", "application/x-ndjson")
            self.set_header("Content-Disposition", 'attachment; filename="event.ndjson"')
            self.finish(event.body + b"\n")
            return
        self.page(
            "event.html",
            title=f"{event.type} {event.name or ''}".strip(),
            nav="events",
            view=self.event_view(event),
            event=event,
        )


class EventJsonHandler(_Loads):
    """The content of a row when it is expanded."""

    async def get(self) -> None:
        """Answer with the event, or with the dead letter that ``letter`` names."""
        letter_id = self.get_query_argument("letter", "")
        if letter_id:
            letter = await self.load_letter(letter_id)
            view = None if letter is None else self.letter_view(letter)
        else:
            event = await self.load_event()
            view = None if event is None else self.event_view(event)
        if view is None:
            if self.outage is not None:
                raise HTTPError(503, reason=self.outage.reason)
            raise HTTPError(404, reason="It is no longer stored")
        self.json(view)
