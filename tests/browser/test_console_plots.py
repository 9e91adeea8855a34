# SPDX-License-Identifier: Apache-2.0
"""The plots of the overview: true after a kill, readable by keyboard, fast, right in every zone."""

from __future__ import annotations

import datetime
import random
import re
import time
import zoneinfo
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from engage.api import Count
from engage.store.facade import Storage
from support import console_data
from support.browser import Browser
from support.console import console_url
from support.exports import on_store
from support.operator import Operator, operator
from support.server_process import Server
from support.system_clock import SystemClock

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

MINUTE = 60_000
#: Returns the line of numbers below the plot.
READ = "return document.querySelector('#events-plot + .read').textContent"


def put(server: Server, minutes: dict[int, int], step: int = 60) -> None:
    """Write the history of another process.

    :param minutes: the start of a minute → events that were stored in it.
    :param step: 3600 for hours in place of minutes.
    """
    rows = []
    for at, stored in minutes.items():
        for name, labels, value in (
            ("events", ("website", "track", "stored"), stored),
            ("events", ("website", "track", "duplicate"), stored // 10),
            ("requests", ("0.005",), stored),
            ("up", ("1.0",), 1),
        ):
            if value:
                workspace = "acme" if name == "events" else ""
                rows.append(
                    Count(
                        step=step,
                        at=at,
                        process="another",
                        name=name,
                        workspace_id=workspace,
                        labels=labels,
                        value=value,
                    )
                )

    async def write(store: Storage) -> None:
        for start in range(0, len(rows), 1000):
            await store.put_counts(rows[start : start + 1000])

    on_store(server.config, write)


def drawn(one: Operator) -> None:
    """Wait until the plot is drawn."""
    one.until(lambda: one.browser.run("return !!document.querySelector('#events-plot canvas')"))


def table(watcher: Operator) -> dict[str, list[str]]:
    """Return the table under the first plot: time → numbers."""
    rows: list[list[str]] = watcher.browser.run("""
      return [...document.querySelectorAll("#plots table")[0].tBodies[0].rows].map((row) =>
        [row.querySelector("time").dateTime, ...[...row.cells].slice(1).map((c) => c.textContent)]);
    """)
    return {row[0]: [text.replace("\u202f", "") for text in row[1:]] for row in rows}


def totals(watcher: Operator) -> dict[str, int]:
    """Return the large numbers."""
    texts = watcher.browser.run("""
      return [...document.querySelectorAll(".figure")].map((one) =>
        [one.querySelector(".label").innerText.trim(), one.querySelector(".value").innerText]);
    """)
    return {
        label: int(re.sub(r"\D", "", value)) for label, value in texts if label != "Latency p95"
    }


def iso(at: int) -> str:
    when = datetime.datetime.fromtimestamp(at / 1000, datetime.UTC)
    return when.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def test_the_history_survives_a_kill_of_everything(browser: Browser, tmp_path: Path) -> None:
    with console_data.start(tmp_path) as server:
        for number in range(120):
            assert server.track(f"m-{number}").status_code == 200
        # At most five seconds of counting are lost; these are not.
        time.sleep(15)
        for number in range(30):
            server.track(f"late-{number}")
        this = int(time.time() * 1000) // MINUTE * MINUTE
        server.kill()
        # Earlier, another process ran; between, there was none.
        put(server, {this - n * MINUTE: 10 * n for n in range(20, 30)})
        server.start()
        with operator(browser, server) as watcher:
            watcher.open("?range=1h")
            drawn(watcher)
            numbers = table(watcher)
            earlier = sum(10 * n for n in range(20, 30))
            assert earlier + 120 <= totals(watcher)["Stored"] <= earlier + 150
            assert numbers[iso(this - 25 * MINUTE)][:2] == ["250", "25"]
            gap = this - 10 * MINUTE
            assert numbers[iso(gap)] == ["not running"]
            # In the plot, too: hatched, and a word.
            watcher.tab_to("events-plot")
            for _ in range(120):
                watcher.keys(Keys.ARROW_LEFT)
                if "not running" in browser.run(READ):
                    break
            assert "not running" in browser.run(READ)
            share = """
              const canvas = document.querySelector("#events-plot canvas"), box = canvas.width;
              const at = Math.round(44 + (box - 64) * arguments[0]);
              const draw = canvas.getContext("2d");
              const pixels = draw.getImageData(at, 20, 40, canvas.height - 90).data;
              let count = 0;
              for (let i = 3; i < pixels.length; i += 4) count += pixels[i] > 0;
              return count / (pixels.length / 4);
            """
            painted = browser.run(share, 0.8)
            assert 0.02 < painted < 0.6, "the gap is not hatched"
            # Before the first start there was nothing that could run.
            for _ in range(60):
                watcher.keys(Keys.ARROW_LEFT)
            assert "before the first start" in browser.run(READ)
            assert browser.run(share, 0.2) < painted / 2
            assert min(numbers) == iso(this - 29 * MINUTE)
            # After some time, nothing was counted twice.
            before = totals(watcher)["Stored"]
            time.sleep(6)
            watcher.open("?range=1h")
            assert totals(watcher)["Stored"] == before


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[int, int]]]:
    """Return a server with a full history of 24 hours, and the events of each minute."""
    with console_data.start(tmp_path_factory.mktemp("busy")) as server:
        server.track("m-first")
        this = int(time.time() * 1000) // MINUTE * MINUTE
        minutes = {this - n * MINUTE: 1000 + n for n in range(2, 24 * 60 + 10)}
        put(server, minutes)
        yield server, minutes


def test_the_numbers_of_a_plot_are_those_of_the_store(
    browser: Browser, busy: tuple[Server, dict[int, int]]
) -> None:
    server, minutes = busy
    with operator(browser, server) as watcher:
        watcher.open("?range=1h")
        drawn(watcher)
        for when, numbers in table(watcher).items():
            at = round(datetime.datetime.fromisoformat(when).timestamp() * 1000)
            if at in minutes:
                assert numbers == [str(minutes[at]), str(minutes[at] // 10), "0", "0"]
        assert len(table(watcher)) == 60
        watcher.tab_to("events-plot")
        seen = []
        for _ in range(6):
            watcher.keys(Keys.ARROW_LEFT)
            seen.append(browser.run(READ))
        assert len(set(seen)) == 6
        stored = [int(match[1]) for match in map(re.compile(r"stored (\d+)").search, seen) if match]
        assert stored[-1] in minutes.values()
        assert stored[-1] == stored[-2] + 1
        watcher.keys(Keys.ARROW_RIGHT)
        assert browser.run(READ) == seen[-2]


def test_24_hours_are_drawn_and_lead_to_their_events(
    browser: Browser, busy: tuple[Server, dict[int, int]]
) -> None:
    server, minutes = busy
    with operator(browser, server) as watcher:
        watcher.open("?range=24h")
        drawn(watcher)
        day = sum(list(minutes.values())[: 24 * 60 - 2])
        assert abs(totals(watcher)["Stored"] - day) <= 3 * (1000 + 24 * 60)
        # Dragging zooms; a click on a bar shows the events of that minute.
        watcher.open("?range=1h")
        drawn(watcher)
        watcher.one("#events-plot .u-over").click()
        watcher.until(lambda: watcher.path.startswith("events?"))
        assert "since=" in watcher.path


#: Measures the bars of the first plot: (value in the answer, height in pixels) of each, and the
#: height of the plot and the greatest value of its axis.
MEASURE = """
  const done = arguments[0];
  const url = performance.getEntriesByType("resource").map((one) => one.name)
    .filter((one) => one.includes("overview.json")).at(-1);
  fetch(url).then((answer) => answer.json()).then((data) => {
    const canvas = document.querySelector("#events-plot canvas");
    const over = document.querySelector("#events-plot .u-over").getBoundingClientRect();
    const frame = canvas.getBoundingClientRect(), scale = canvas.width / frame.width;
    const left = (over.left - frame.left) * scale, top = (over.top - frame.top) * scale;
    const wide = over.width * scale, high = over.height * scale;
    const probe = document.createElement("i");
    probe.style.color = "var(--stored)";
    document.body.append(probe);
    const color = getComputedStyle(probe).color.match(/\\d+/g).map(Number).slice(0, 3);
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const stored = data.outcomes.stored, count = stored.length;
    const bars = stored.map((value, i) => {
      // The tallest column of the bar: its edges may be mixed with its neighbours.
      const from = left + wide * i / count, to = left + wide * (i + 1) / count;
      let best = 0;
      for (let x = Math.round(from); x < Math.max(Math.round(from) + 1, Math.round(to)); x++) {
        let y = Math.floor(top);
        while (y < top + high) {
          const at = (y * canvas.width + x) * 4;
          if (color.every((part, k) => Math.abs(pixels[at + k] - part) < 12)) break;
          y++;
        }
        best = Math.max(best, top + high - y);
      }
      return [value, best];
    });
    const most = Math.max(...stored.map((one, i) =>
      one + data.outcomes.duplicate[i] + data.outcomes.rejected[i] + data.outcomes.refused[i]));
    done({ bars, high, most: most * 1.08, wide, step: data.step });
  });
"""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(("span", "scheme"), [("24h", "light"), ("14d", "dark")])
def test_every_bar_is_drawn_with_its_height(
    browser: Browser, tmp_path: Path, width: int, span: str, scheme: str
) -> None:
    """Also where a minute of the day has less than a pixel."""
    chance = random.Random(width)
    step = 60 if span == "24h" else 3600
    with console_data.start(tmp_path) as server:
        server.track("m-first")
        this = int(time.time()) // step * step * 1000
        count = 24 * 60 if span == "24h" else 14 * 24
        spiky = {
            this - n * step * 1000: chance.choice([3, 5, 9, chance.randrange(100, 1000)])
            for n in range(2, count)
        }
        put(server, spiky, step)
        with operator(browser, server) as watcher:
            browser.cdp(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=900,
                deviceScaleFactor=1,
                mobile=False,
            )
            media = {"name": "prefers-color-scheme", "value": scheme}
            browser.cdp("Emulation.setEmulatedMedia", features=[media])
            watcher.open(f"?range={span}")
            drawn(watcher)
            found = browser.driver.execute_async_script(MEASURE)
            title = watcher.text("#events-title")
            browser.cdp("Emulation.clearDeviceMetricsOverride")
    bars = found["bars"]
    assert len(bars) <= found["wide"]
    steps = {60: "per minute", 300: "in 5 minutes", 600: "in 10 minutes", 3600: "per hour"}
    assert title == f"Events {({**steps, 7200: 'in 2 hours'})[found['step']]}"
    wrong = [
        (number, value, height)
        for number, (value, height) in enumerate(bars[:-1])
        if abs(height - value / found["most"] * found["high"]) > 3
    ]
    assert not wrong, (found["step"], len(bars), found["wide"], wrong[:9])


# ------------------------------------------------------------------------------------ time zones
def last_autumn(zone: zoneinfo.ZoneInfo) -> datetime.datetime:
    """Return the last instant at which clocks of a zone were set back."""
    hour = datetime.timedelta(hours=1)
    at = datetime.datetime.now(datetime.UTC).replace(minute=0, second=0, microsecond=0)

    def offset(when: datetime.datetime) -> Any:
        return when.astimezone(zone).utcoffset()

    at -= 24 * hour
    while not offset(at - hour) > offset(at):
        at -= hour
    return at


def test_the_night_in_which_the_clocks_are_set_back(browser: Browser, tmp_path: Path) -> None:
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    change = last_autumn(berlin)
    clock = SystemClock(tmp_path)
    shift = round(change.timestamp() + 5 * 3600 + 600 - time.time())
    clock.set(shift)
    folder = tmp_path / "server"
    folder.mkdir()
    at = round(change.timestamp() * 1000)
    with console_data.start(folder, environment=clock.environment) as server:
        server.track("m-first")
        # The table begins with the first start.
        first = at - 18 * 60 * MINUTE - 30 * MINUTE
        put(server, {first: 1, at - 30 * MINUTE: 111, at + 30 * MINUTE: 222})
        url = console_url(server)
        with operator(browser, server, age=-shift) as watcher:
            browser.cdp("Emulation.setTimezoneOverride", timezoneId="Europe/Berlin")
            watcher.open("?range=24h")
            drawn(watcher)

            def shown() -> list[tuple[str, str]]:
                found: list[list[str]] = browser.run("""
                  const times = document.querySelectorAll("#plots table")[0]
                    .querySelectorAll("time");
                  return [...times].map((one) => [one.dateTime, one.textContent]);
                """)
                return [(when, text) for when, text in found]

            def wanted(zone: datetime.tzinfo, suffix: str) -> list[tuple[str, str]]:
                times = [datetime.datetime.fromisoformat(when) for when, _ in shown()]
                local = [when.astimezone(zone) for when in times]
                texts = [f"{one.day} {one:%b %Y, %H:%M:%S}{suffix}" for one in local]
                return [(when, text) for (when, _), text in zip(shown(), texts, strict=True)]

            assert shown() == wanted(berlin, "")
            # Full hours, and the rest of the one in which the range begins.
            assert len({when for when, _ in shown()}) == 25
            # Two hours look the same, and are not.
            assert len({text for _, text in shown()}) == 24

            def reads(stored: int) -> str:
                watcher.open("?range=24h")
                drawn(watcher)
                browser.run("document.getElementById('events-plot').focus()")
                for _ in range(300):
                    if f"stored {stored} " in browser.run(READ):
                        break
                    watcher.keys(Keys.ARROW_LEFT)
                assert f"stored {stored} " in browser.run(READ)
                return str(browser.run(READ)).partition(" · ")[0]

            day = change.astimezone(berlin)
            local = f"{day.day} {day:%b}, 02:30"
            assert reads(111) == reads(222) == local
            watcher.one("#utc").click()
            assert shown() == wanted(datetime.UTC, " UTC")
            assert reads(111) == f"{change.day} {change:%b}, 00:30"
            assert reads(222) == f"{change.day} {change:%b}, 01:30"
            # The other pages remember it.
            watcher.open("events")
            assert all(text.endswith("UTC") for text in watcher.texts("main time"))
            assert url == watcher.url
