# SPDX-License-Identifier: Apache-2.0
"""Every server SDK with a wrong key, a locked storage, a bad event, a lost answer."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from sdks.catalogue import SDKS, Sdk

from support.reverse_proxy import reverse_proxy
from support.server_process import Server
from support.sqlite import locked

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(400)]

RETRYING = [sdk for sdk in SDKS if sdk.retries]


def tracks(count: int) -> list[dict[str, Any]]:
    return [
        {"call": "track", "userId": "u", "event": "E", "properties": {"n": n}} for n in range(count)
    ]


@pytest.mark.parametrize("sdk", SDKS, ids=str)
def test_a_wrong_key_is_final(engage: Server, sdk: Sdk) -> None:
    """The SDK sends one request, reports an error, and nothing is stored."""
    with reverse_proxy(engage.url) as proxy:
        errors = sdk.run(proxy.url, "not-a-key", tracks(1))
        statuses = [status for *_, status in proxy.requests]
    assert statuses == [401]
    assert errors
    assert engage.export("events") == []


@pytest.mark.parametrize("sdk", RETRYING, ids=str)
def test_a_locked_storage_loses_no_event(short_timeout: Server, sdk: Sdk) -> None:
    """The answer is 503 with ``Retry-After``; the SDK retries, and no event is stored twice."""
    with reverse_proxy(short_timeout.url) as proxy:
        proxy.retry_after = 1
        with locked(short_timeout.database):
            process = sdk.start(proxy.url, short_timeout.key, tracks(5))
            deadline = time.monotonic() + 60
            while not any(status == 503 for *_, status in proxy.requests):
                assert time.monotonic() < deadline, proxy.requests
                time.sleep(0.05)
            time.sleep(2)  # Long enough for a second attempt.
        assert sdk.finish(process) == []
        statuses = [status for *_, status in proxy.requests]
    assert 503 in statuses
    assert statuses[-1] == 200
    assert sorted(e["properties"]["n"] for e in short_timeout.export("events")) == list(range(5))


def test_dittofeed_drops_events_on_503(short_timeout: Server) -> None:
    """The Dittofeed SDK never retries (see docs/clients.md); its flush reports the error."""
    [sdk] = [sdk for sdk in SDKS if not sdk.retries]
    with reverse_proxy(short_timeout.url) as proxy:
        with locked(short_timeout.database):
            errors = sdk.run(proxy.url, short_timeout.key, tracks(3))
            time.sleep(3)  # The write itself may give up later than the request does.
        assert [status for *_, status in proxy.requests] == [503]
    assert errors
    assert short_timeout.export("events") == []


@pytest.mark.parametrize("sdk", SDKS, ids=str)
def test_a_bad_event_does_not_affect_others(engage: Server, sdk: Sdk) -> None:
    """An event with a user id of 513 characters becomes a dead letter; the others are stored."""
    made = tracks(4)
    made[2]["userId"] = "x" * 513
    with reverse_proxy(engage.url) as proxy:
        sdk.run(proxy.url, engage.key, made)
        assert {status for *_, status in proxy.requests} == {200}
    assert sorted(e["properties"]["n"] for e in engage.export("events")) == [0, 1, 3]
    [letter] = engage.export("dead-letters")
    assert letter["reason"] == "invalid_payload"


@pytest.mark.parametrize("sdk", SDKS, ids=str)
def test_a_lost_answer_stores_no_event_twice(engage: Server, sdk: Sdk) -> None:
    """The server is killed before it sends the answer; the retry is a duplicate."""
    lost = threading.Event()
    restarted = threading.Event()
    killing = threading.Lock()

    def lose(status: int) -> bool:
        if restarted.is_set():
            return False
        with killing:  # Several requests may have their answers at the same time.
            if not lost.is_set():
                assert status == 200
                engage.kill()
                lost.set()
        restarted.wait(60)
        return True

    with reverse_proxy(engage.url) as proxy:
        proxy.lose = lose
        process = sdk.start(proxy.url, engage.key, tracks(4))
        assert lost.wait(60)
        engage.start()
        proxy.target = engage.url
        restarted.set()
        sdk.finish(process)
        statuses = [status for *_, status in proxy.requests]
    # Two of the Node SDKs send the first event alone, and the others in parallel.
    lost_answers = statuses.count(None)
    assert statuses == [None] * lost_answers + [200] * (len(statuses) - lost_answers)
    assert sdk.retries or len(statuses) == 1
    assert sorted(e["properties"]["n"] for e in engage.export("events")) == list(range(4))
    assert engage.export("dead-letters") == []
