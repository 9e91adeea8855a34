# SPDX-License-Identifier: Apache-2.0
"""``/``: numbers, plots and warnings; ``/overview.json``: the numbers of the plots."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from engage.api import StorageUnavailable
from engage.console.base import ConsoleHandler
from engage.console.data.history import OUTCOMES, RANGES, Overview
from engage.console.display.formats import number, percent, plural, size, span
from engage.console.display.snippets import server_url, snippets
from engage.console.pages.rejected import cause_link
from engage.console.pages.sending import send_test_event
from engage.keys.limits import read_used, used_up
from engage.monitoring.history import DAY, HOUR, MINUTE
from engage.reading.letter_groups import group_letters
from engage.reading.live import RowFilter
from engage.subscriptions.choices import CHANGE_EVENT

if TYPE_CHECKING:
    from engage.log.lag import Lag

__all__ = ["OverviewHandler", "OverviewJsonHandler"]

#: Rows of Live, and groups of rejected events in the strip.
NEWEST: Final = 5
#: Points of a sparkline.
POINTS: Final = 60
#: Seconds that the loaders are behind the log from which on that is in the strip.
LATE: Final = 60
#: Below this, the disk is in the strip.
LOW_DISK: Final = 2 * 1024**3

#: A key of :data:`RANGES` → seconds of a row in the table of the numbers.
ROWS: Final = {"1h": MINUTE, "24h": HOUR, "14d": DAY}

#: A key of :data:`RANGES` → words.
PERIODS: Final = {"1h": "in the last hour", "24h": "in 24 hours", "14d": "in 14 days"}

Value = TypeVar("Value")


class Figure(NamedTuple):
    """One of the large numbers."""

    label: str
    value: str
    sub: str
    status: str
    #: Of its curve; ``None`` is a gap.
    values: Sequence[float | None]
    href: str | None


class Notice(NamedTuple):
    """One line of "needs attention"."""

    status: str
    text: str
    href: str | None
    link: str = "Show"


def shrink(
    values: Sequence[Value], parts: int, merge: Callable[[Sequence[Value]], Value]
) -> list[Value]:
    """Merge neighbours, so that at most ``parts`` values are left."""
    each = max(1, -(-len(values) // parts))
    return [merge(values[start : start + each]) for start in range(0, len(values), each)]


def _greatest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def milliseconds(value: float) -> str:
    """Return a duration in milliseconds with its unit."""
    if value >= 1000:
        return f"{value / 1000:.3g} s"
    return f"{value:.2g} ms" if value < 10 else f"{value:.0f} ms"


def figures(
    handler: ConsoleHandler, data: Overview, workspace: str
) -> tuple[list[Figure], list[dict[str, Any]]]:
    """Return the large numbers, and a sparkline for each write key."""
    totals = {name: sum(data.outcomes[name]) for name in OUTCOMES}
    seen = sum(totals[name] for name in ("stored", "duplicate", "rejected"))

    def curve(name: str) -> list[float | None]:
        masked = [
            v if up else None for v, up in zip(data.outcomes[name], data.running, strict=True)
        ]
        return shrink(masked, POINTS, _sum)

    period = PERIODS[data.range]
    duplicates = f"and {plural(totals['duplicate'], 'duplicate')}" if totals["duplicate"] else ""
    shares = [percent(totals["rejected"], seen)] if seen else []
    if handler.rejected:
        shares.append(f"{plural(handler.rejected, 'event', 'different events')} kept")
    p95_curve = shrink(list(data.latency["p95"]), POINTS, _greatest)
    half = "of requests that carry events" if data.p50 is None else f"p50 {_at_most(data.p50)}"
    rejected = handler.link("rejected")
    boxes = [
        Figure(
            "Stored",
            number(totals["stored"]),
            duplicates or period,
            "stored",
            curve("stored"),
            handler.link("events"),
        ),
        Figure(
            "Rejected",
            number(totals["rejected"]),
            " · ".join(shares) or "no events yet",
            "rejected",
            curve("rejected"),
            rejected,
        ),
        Figure(
            "Refused",
            number(totals["refused"]),
            "wrong key, bad JSON …",
            "refused",
            curve("refused"),
            "#refused" if handler.console.live.refused(workspace) else None,
        ),
        Figure("Latency p95", _at_most(data.p95), half, "", p95_curve, None),
    ]
    keys = [
        {
            "name": "unknown key" if key == "?" else key,
            "count": sum(values),
            "unknown": key == "?",
            "values": shrink(list[float | None](values), POINTS, _sum),
        }
        for key, values in sorted(data.keys.items(), key=lambda item: -sum(item[1]))
    ]
    return boxes, keys


def _at_most(bucket: tuple[float, float] | None) -> str:
    if bucket is None:
        return "–"
    low, high = bucket
    return f"> {milliseconds(low)}" if high == float("inf") else f"≤ {milliseconds(high)}"


def _not_loaded(lag: Lag, href: str) -> Figure:
    """Return the number of records that are not loaded yet."""
    value = "–" if lag.backlog is None else number(lag.records)
    sub = f"the oldest {span(lag.seconds)} ago" if lag.records else "in the log"
    return Figure("Not loaded", value, sub, "", (), href)


def _sum(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


def table_of(data: Overview) -> list[dict[str, Any]]:
    """Return the numbers of the plots, newest first: of each minute, hour, or day of UTC."""
    length = ROWS[data.range] * 1000
    rows = []
    for _, steps in itertools.groupby(range(len(data.at)), lambda step: data.at[step] // length):
        numbers = list(steps)
        start, part = numbers[0], slice(numbers[0], numbers[-1] + 1)
        if data.at[numbers[-1]] < data.started:
            continue
        rows.append(
            {
                "at": data.at[start],
                "running": any(data.running[part]),
                **{name: sum(data.outcomes[name][part]) for name in OUTCOMES},
                **{name: _greatest(list(values[part])) for name, values in data.latency.items()},
                "queue": _greatest(list(data.queue[part])),
            }
        )
    return rows[::-1]


def title_of(data: Overview) -> str:
    """Return the title of the plot of events: what a bar is."""
    for unit, seconds in (("day", DAY), ("hour", HOUR), ("minute", MINUTE)):
        if count := data.step // seconds:
            return f"Events per {unit}" if count == 1 else f"Events in {plural(count, unit)}"
    raise AssertionError("a step has at least a minute")


class _Reads(ConsoleHandler):
    """Reads the history."""

    async def history(self, bars: int | None = None) -> Overview | None:
        """Return the numbers; ``None`` if there are none and the store does not answer.

        :param bars: see :func:`engage.console.data.history.overview`.

        Without a range in the query, a server that began less than an hour ago shows an hour.
        """
        chosen = self.get_query_argument("range", "")
        chosen = chosen if chosen in RANGES else ""
        if self.outage is not None:
            return self._last(chosen)
        try:
            data = await self.console.overview(self.workspace.id, chosen or "24h", bars)
            if not chosen and not any(data.running[: -HOUR // data.step]):
                data = await self.console.overview(self.workspace.id, "1h")
        except StorageUnavailable as error:
            self.show_outage(str(error))
            return self._last(chosen)
        self.console.overviews[self.workspace.id, chosen] = data
        self.console.overviews[self.workspace.id, data.range] = data
        return data

    def _last(self, chosen: str) -> Overview | None:
        """Return the numbers that were read last: better than none."""
        return self.console.overviews.get((self.workspace.id, chosen))


class OverviewHandler(_Reads):
    """The first page."""

    #: Why a test event was not accepted.
    problem = ""

    async def post(self) -> None:
        """Send a test event, then show the overview."""
        sent, self.problem = await send_test_event(self)
        if sent:
            self.go("", sent=sent)
        else:
            await self.get()

    async def get(self) -> None:
        """Show the overview, or how to send a first event."""
        workspace = self.workspace.id
        live = self.console.live
        await live.look(workspace)
        if live.error is not None:
            self.show_outage(live.error)
        data = await self.history()
        arrived = [] if self.unverified else live.rows(RowFilter(workspace_id=workspace))
        rows = arrived[:NEWEST]
        lag = self.console.lag
        # Someone whose events were all rejected still needs the lines that send a valid one.
        has_any = (
            any(row.status != "rejected" for row in arrived)
            or (data is not None and any(data.outcomes["stored"]))
            or (lag is not None and bool(lag.records or lag.alarms))
        )
        boxes: list[Figure] = []
        keys: list[dict[str, Any]] = []
        if data is not None:
            boxes, keys = figures(self, data, workspace)
            if lag is not None:
                boxes.append(_not_loaded(lag, self.link("system")))
        # A server key is a secret: it is not known here.
        keys_here = self.console.keys.of(self.workspace.id)
        enabled = [key.key for key in keys_here if key.key and not key.disabled]
        url = server_url(self.console.config)
        self.page(
            "overview.html",
            title="Overview",
            nav="overview",
            span="24h" if data is None else data.range,
            ranges=list(RANGES),
            waiting=not has_any and self.outage is None,
            write_key=enabled[0] if enabled else None,
            sent=self.get_query_argument("sent", ""),
            problem=self.problem,
            snippets=snippets(url, enabled[0]) if enabled else [],
            public_url=self.console.config.server.public_url,
            url=url,
            data=data,
            figures=boxes,
            keys=keys,
            counted=await self.console.names.newest(workspace) if has_any else None,
            rows=rows,
            last=live.last,
            refused=live.refused(workspace)[:NEWEST],
            notices=await self._notices(data, lag) if has_any else [],
            numbers=[] if data is None else table_of(data),
            title_of=title_of,
            milliseconds=milliseconds,
        )

    async def _notices(self, data: Overview | None, lag: Lag | None) -> list[Notice]:
        store, workspace = self.console.store, self.workspace.id
        notices: list[Notice] = []
        grouped = await self.read(group_letters(store, workspace, seconds=1))
        since = data.at[0] if data is not None else 0
        recent = [group for group in (grouped.groups if grouped else ()) if group.last >= since]
        for group in recent[:NEWEST]:
            count = plural(group.count, "event", "different events")
            source = group.origin if group.key is None else f"key {group.key}"
            text = f"{group.example.message} ({count}, {source})"
            notices.append(Notice("rejected", text, cause_link(self, group.filter)))
        if more := recent[NEWEST:]:
            text = plural(len(more), "more cause")
            notices.append(Notice("rejected", text, self.link("rejected"), "Show all"))
        if self.console.config.has_quotas:
            used = await self.read(read_used(store, self.console.now()))
            over, _ = used_up(self.console.config, self.console.keys.of(workspace), used or {})
            for reason in dict.fromkeys(over.values()):
                text = f"{reason[0].upper()}{reason[1:]}; it is refused until 00:00 UTC"
                notices.append(Notice("bad", text, self.link("keys")))
        if data is not None and "?" in data.keys:
            count = plural(sum(data.keys["?"]), "request")
            text = f"{count} had an unknown or disabled write key"
            shown = "#refused" if self.console.live.refused(workspace) else None
            notices.append(Notice("refused", text, shown))
        if data is not None:
            for line, events in data.noticed.items():
                text = line.format(number(events), PERIODS[data.range])
                name = f'"{CHANGE_EVENT}"' if CHANGE_EVENT in line else None
                notices.append(Notice("warn", text, self.link("events", name=name)))
        system = self.link("system")
        if lag is not None:
            from engage.log.gaps import past_gaps

            gaps = await self.read(past_gaps(store, now=self.console.now())) or ()
            notices += [Notice("bad", alarm, system) for alarm in (*lag.alarms, *gaps)]
            if lag.seconds >= LATE:
                text = f"The loaders are {span(lag.seconds)} behind: is engage load running?"
                notices.append(Notice("warn", text, system))
        free = store.gauges().get("free_bytes")
        if free is not None and free < LOW_DISK:
            notices.append(Notice("bad", f"The disk has only {size(int(free))} left", system))
        return notices


class OverviewJsonHandler(_Reads):
    """The numbers of the plots."""

    async def get(self) -> None:
        """Answer with all series."""
        data = await self.history(self.whole("bars"))
        if data is None:
            self.set_status(503)
            self.json({"error": "no history"})
            return
        shown = dataclasses.asdict(data)
        shown["title"] = title_of(data)
        shown["limit"] = self.console.config.limits.queue_events
        # JSON has no infinity; the page shows the buckets themselves.
        del shown["p50"], shown["p95"]
        self.json(shown)
