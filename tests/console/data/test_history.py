# SPDX-License-Identifier: Apache-2.0
"""What the overview draws, from counters in a real store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engage.console.data.history import RANGES, Overview, overview
from engage.console.data.reader import Reader
from engage.console.pages.overview import table_of
from engage.monitoring.history import History
from engage.monitoring.metrics import Metrics
from engage.monitoring.sampler import Refusal
from engage.pipeline.items import DROPPED, IGNORED, NOTICES
from engage.store.facade import Storage
from support.sqlite import config_file, open_store

#: 2026-11-22T12:00:00Z.
NOON = 1_795_348_800_000
MINUTE = 60_000
DAY = 86_400


async def drawn(store: Any, span: str = "1h", workspace: str = "acme", now: int = NOON) -> Overview:
    view = await overview(store, Reader(8.0), workspace, span, now=now)
    assert view is not None
    return view


async def counted(store: Storage, at: int) -> None:
    history = History(Metrics())
    history.turn(at)
    history.metrics.event("track", "stored", 4, "acme", "website")
    history.metrics.event("track", "duplicate", 2, "acme", "website")
    history.metrics.event("track", "invalid_payload", 1, "acme", "ios")
    history.metrics.event("track", "dropped", 1, "acme", "ios")
    history.metrics.event("track", "stored", 9, "other", "website")
    history.metrics.event("track", "stored", 3, "acme", None)
    history.metrics.event("subscription", "ignored", 2, "acme", "website")
    history.metrics.event("subscription", "ignored", 5, "other", "website")
    history.metrics.event("traits", "dropped", 3, "acme", "website")
    history.metrics.refused(Refusal(reason="invalid_write_key", status=401, route="track"))
    for milliseconds in [3] * 98 + [40, 20_000]:
        history.metrics.request("track", 200, milliseconds / 1000)
    history.metrics.write(0.002, 1, 17)
    await history.write_to(store)


async def test_the_counters_of_a_workspace_by_minute(tmp_path: Path) -> None:
    async with open_store(config_file(tmp_path)) as store:
        await counted(store, NOON - 5 * MINUTE)
        await counted(store, NOON)
        await counted(store, NOON)  # a second process
        view = await drawn(store)
    assert (view.step, len(view.at), view.at[-1]) == (60, 60, NOON)
    assert [index for index, ran in enumerate(view.running) if ran] == [54, 59]
    last = {name: series[59] for name, series in view.outcomes.items()}
    assert last == {"stored": 16, "duplicate": 4, "rejected": 2, "refused": 2}
    assert {name: series[54] for name, series in view.keys.items()} == {
        "website": 6,
        "ios": 2,
        "?": 1,
    }
    assert view.noticed == {NOTICES[IGNORED]: 6, NOTICES[DROPPED]: 9}
    assert view.queue[54] == 17
    assert view.queue[55] is None
    assert view.latency["p50"][58] is None
    assert view.latency["p50"][59] == pytest.approx(3.78, abs=0.01)
    assert view.p95 == (2.5, 5.0)
    p99 = view.latency["p99"][59]
    assert p99 is not None
    assert 25 <= p99 <= 50


@pytest.mark.parametrize("span", RANGES)
async def test_every_range_ends_now(tmp_path: Path, span: str) -> None:
    async with open_store(config_file(tmp_path)) as store:
        await counted(store, NOON + 30 * MINUTE)
        view = await drawn(store, span, now=NOON + 30 * MINUTE + 5000)
    seconds, step = RANGES[span]
    assert len(view.at) == seconds // step
    assert view.at[-1] <= NOON + 30 * MINUTE + 5000 < view.at[-1] + step * 1000
    assert view.outcomes["stored"][-1] == 8


@pytest.mark.parametrize(
    ("span", "bars", "step"),
    [
        ("1h", 60, 60),
        ("24h", 1440, 60),
        ("24h", 1439, 300),
        ("24h", 289, 300),
        ("24h", 288, 600),
        ("24h", 144, 3600),
        ("14d", 336, 3600),
        ("14d", 335, 7200),
        ("14d", 168, 21600),
        ("14d", 15, 86400),
        ("14d", 1, 86400),
    ],
)
async def test_a_narrow_plot_has_longer_steps_and_loses_nothing(
    tmp_path: Path, span: str, bars: int, step: int
) -> None:
    """They begin at full minutes, hours and days."""
    now = NOON + 37 * MINUTE
    async with open_store(config_file(tmp_path)) as store:
        for minutes in (0, 1, 9, 62, 700, 1300, 1439, 1440, 14 * 1440 - 60):
            await counted(store, now - minutes * MINUTE)
        whole = await drawn(store, span, now=now)
        view = await overview(store, Reader(8.0), "acme", span, now=now, bars=bars)
    assert view is not None
    assert view.step == step
    assert RANGES[span][0] // step <= len(view.at) <= max(bars, RANGES[span][0] // DAY + 1)
    assert all(at % (step * 1000) == 0 for at in view.at)
    for at, stored in zip(whole.at, whole.outcomes["stored"], strict=True):
        if stored:
            index = view.at.index(at - at % (step * 1000))
            assert view.outcomes["stored"][index] >= stored
            assert view.running[index]
            assert view.queue[index] == 17
    assert sum(view.outcomes["stored"]) == sum(whole.outcomes["stored"])
    assert sum(view.keys["website"]) == sum(whole.keys["website"])
    assert (view.p95, view.noticed) == (whole.p95, whole.noticed)


@pytest.mark.parametrize(("span", "length"), [("1h", 60), ("24h", 3600), ("14d", 86400)])
async def test_a_row_of_the_numbers_is_a_full_minute_hour_or_day(
    tmp_path: Path, span: str, length: int
) -> None:
    """Of UTC; the first one may begin with the range."""
    now = NOON + 37 * MINUTE
    async with open_store(config_file(tmp_path)) as store:
        for minutes in range(0, 14 * 1440, 97):
            await counted(store, now - minutes * MINUTE)
        data = await drawn(store, span, now=now)
    rows = table_of(data)
    starts = [row["at"] for row in rows]
    assert starts == sorted(starts, reverse=True)
    assert all(at % (length * 1000) == 0 for at in starts[:-1])
    assert len({at // (length * 1000) for at in starts}) == len(starts)
    assert sum(row["stored"] for row in rows) == sum(data.outcomes["stored"])


async def test_only_a_request_with_a_wrong_key_counts_as_one_of_an_unknown_key(
    tmp_path: Path,
) -> None:
    """The server answers others before it knows their key, such as a path that does not exist."""
    async with open_store(config_file(tmp_path)) as store:
        history = History(Metrics())
        history.turn(NOON)
        for reason, status in (("storage_unavailable", 503), ("not_found", 404)):
            history.metrics.refused(Refusal(reason=reason, status=status, route="track"))
        history.metrics.refused(Refusal(reason="write_key_disabled", status=403, route="track"))
        await history.write_to(store)
        view = await drawn(store)
    assert view.outcomes["refused"][59] == 3
    assert {name: series[59] for name, series in view.keys.items()} == {"?": 1}


HOUR = 60 * MINUTE


@pytest.mark.parametrize(
    ("starts", "started", "stopped"),
    [
        *(([], NOON + MINUTE, False), ([0], NOON, False)),
        *(([5 * MINUTE, 0], NOON - 5 * MINUTE, True), ([3 * HOUR, 0], NOON - 3 * HOUR, True)),
        ([59 * MINUTE], NOON - 59 * MINUTE, True),
    ],
)
async def test_nothing_stopped_before_the_first_start(
    tmp_path: Path, starts: list[int], started: int, stopped: bool
) -> None:
    async with open_store(config_file(tmp_path)) as store:
        for ago in starts:
            await counted(store, NOON - ago)
        view = await drawn(store)
    assert (view.started, view.stopped) == (started, stopped)
