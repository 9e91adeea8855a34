# SPDX-License-Identifier: Apache-2.0
"""When ``/readyz`` answers 200."""

from __future__ import annotations

import asyncio

import pytest

from engage.api import StorageUnavailable
from engage.upkeep.readiness import FRESH, PATIENCE, WRITE_PATIENCE, Readiness

pytestmark = pytest.mark.virtual_time


class Storage:
    """A storage that counts the checks; they wait or fail as a test wants."""

    def __init__(self) -> None:
        self.questions = 0
        self.works = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.now = 100.0

    async def check(self) -> None:
        """See :meth:`engage.store.facade.Storage.check`."""
        self.questions += 1
        await self.gate.wait()
        if not self.works:
            raise StorageUnavailable("no")


async def test_the_storage_is_checked_at_most_once_a_second() -> None:
    """However many requests there are."""
    storage = Storage()
    ready = Readiness(storage.check, clock=lambda: storage.now)
    assert await ready.ready()
    assert all(await asyncio.gather(*(ready.ready() for _ in range(50))))
    assert storage.questions == 1
    storage.now += FRESH + 0.1
    assert all(await asyncio.gather(*(ready.ready() for _ in range(50))))
    assert storage.questions == 2


async def test_the_latest_answer_waits_for_nothing() -> None:
    """It is the result of the last check, and begins another one at most once a second."""
    storage = Storage()
    ready = Readiness(storage.check, clock=lambda: storage.now)

    async def answers() -> set[bool]:
        found = set()
        for _ in range(20):
            found.add(ready.latest())
            await asyncio.sleep(0)
        return found

    assert not ready.latest()
    await asyncio.sleep(0.01)
    assert await answers() == {True}
    storage.now += FRESH + 0.1
    storage.works = False
    assert ready.latest()  # the last check, for a moment
    await asyncio.sleep(0.01)
    assert await answers() == {False}
    assert storage.questions == 2
    storage.now += FRESH + 0.1
    storage.gate.clear()
    assert await answers() == {False}
    assert storage.questions == 3
    storage.works = True
    storage.gate.set()
    await asyncio.sleep(0.01)
    assert await answers() == {True}
    await ready.close()


async def test_a_server_is_not_ready_before_the_storage_answered() -> None:
    """Failures are tolerated only after a first success."""
    storage = Storage()
    storage.works = False
    ready = Readiness(storage.check, clock=lambda: storage.now)
    assert not await ready.ready()
    storage.works = True
    assert await ready.ready()


async def test_a_server_stays_ready_for_ten_seconds_of_failures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Then it is not ready, which is logged once."""
    storage = Storage()
    ready = Readiness(storage.check, clock=lambda: storage.now)
    assert await ready.ready()
    storage.works = False
    for _ in range(int(PATIENCE)):
        storage.now += 1.0
        assert await ready.ready()
    storage.now += 1.0
    assert not await ready.ready()
    assert len([record for record in caplog.records if "does not answer" in record.message]) == 1
    ready.alive()
    assert await ready.ready()
    storage.works = True
    storage.now += PATIENCE
    assert await ready.ready()
    assert "answers again" in caplog.text


async def test_a_check_that_never_ends_is_repeated() -> None:
    """One call that hangs must not make the server unready indefinitely."""
    storage = Storage()
    storage.gate.clear()
    ready = Readiness(storage.check, timeout=1.0, clock=lambda: storage.now)
    assert not await ready.ready()
    storage.gate.set()
    assert await ready.ready()
    assert storage.questions == 2


async def test_a_storage_that_hangs_does_not_delay_the_answer() -> None:
    """The answer of the storage counts when it comes."""
    storage = Storage()
    ready = Readiness(storage.check, clock=lambda: storage.now)
    assert await ready.ready()
    storage.gate.clear()
    storage.now += PATIENCE + 1.0
    assert not await ready.ready()
    assert not await ready.ready()
    assert storage.questions == 2
    storage.gate.set()
    assert await ready.ready()
    storage.gate.clear()
    storage.now += PATIENCE + 1.0
    assert not await ready.ready()
    await ready.close()


async def test_a_server_is_not_ready_two_seconds_after_a_write_failed() -> None:
    """As soon as a check succeeds, it is ready again."""
    storage = Storage()
    ready = Readiness(storage.check, clock=lambda: storage.now)
    assert await ready.ready()
    storage.works = False
    storage.now += WRITE_PATIENCE
    ready.write_failed()
    assert await ready.ready()
    storage.now += 0.1
    assert not await ready.ready()
    assert not await ready.ready()
    assert storage.questions == 2  # a failed check is not repeated at once
    storage.now += FRESH + 0.1
    storage.works = True
    assert await ready.ready()
    assert await ready.ready()
    assert storage.questions == 3


async def test_a_stored_event_makes_up_for_a_failed_write() -> None:
    """The storage stores again, so it has its usual ten seconds."""
    storage = Storage()
    ready = Readiness(storage.check, clock=lambda: storage.now)
    assert await ready.ready()
    ready.write_failed()
    ready.alive()
    storage.works = False
    storage.now += PATIENCE - 1
    assert await ready.ready()
