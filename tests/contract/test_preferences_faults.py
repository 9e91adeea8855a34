# SPDX-License-Identifier: Apache-2.0
"""The preferences page while the storage is down, beyond its limits, and when the server is
killed."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from engage.api import StorageUnavailable, Suppression
from engage.store.suppressions import hashed_address
from support import console_data
from support.people import KEY
from support.preferences import (
    AT_FIRST,
    GROUPS,
    PAGE,
    SUBSCRIPTIONS,
    choices,
    ledger,
    members,
    page_of,
)
from support.server_inprocess import BASIC, Serving, Valve, basic, serving
from support.server_process import start_server
from support.waiting import wait_for

BACKEND = "5e" * 16
SERVER_KEY = f"""
[[workspaces.write_keys]]
id = "backend"
kind = "server"
sha256 = "{hashlib.sha256(BACKEND.encode()).hexdigest()}"
"""

ONE_CLICK = b"List-Unsubscribe=One-Click"


async def post(server: Serving, url: str, body: bytes | dict[str, str]) -> Any:
    content = body if isinstance(body, bytes) else urlencode(body).encode()
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    return await server.send(url, content, key=None, headers=headers)


async def get(server: Serving, url: str, method: str = "GET") -> Any:
    return await server.send(url, method=method, key=None)


async def test_a_page_says_that_the_storage_is_down(tmp_path: Path) -> None:
    """Also between showing and sending."""
    valve = Valve("preferences", "apply_all")
    async with serving(tmp_path, config_extra=GROUPS, meddle=valve) as server:
        url = page_of(members("u-1"), s="news", sub="0")
        assert (await get(server, url)).status == 200
        valve.error = StorageUnavailable("the disk is full")
        answers = [
            await get(server, url),
            await post(server, url, {"unsubscribe": "news"}),
            await post(server, url, ONE_CLICK),
        ]
        for answer in answers:
            text = answer.body.decode()
            assert answer.status == 503
            assert 5 <= int(answer.headers["retry-after"]) <= 30
            assert answer.headers["cache-control"] == "no-store"
            assert "Please try again in a few minutes" in text
            assert "disk" not in text
        head = await get(server, url, "HEAD")
        assert (head.status, head.body) == (503, b"")
        program = await get(server, page_of(members("u-1"), SUBSCRIPTIONS))
        assert (program.status, program.json["code"]) == (503, "storage_unavailable")
        # A link that is not valid is told so, because that needs no storage.
        assert (await get(server, f"{PAGE}?w=acme")).status == 401
        valve.error = None
        assert "You are unsubscribed" in (await post(server, url, ONE_CLICK)).body.decode()


async def test_an_error_of_the_server_is_a_page(tmp_path: Path) -> None:
    valve = Valve("preferences")
    async with serving(tmp_path, config_extra=GROUPS, meddle=valve) as server:
        valve.error = RuntimeError("a secret")
        answer = await get(server, page_of(members("u-1")))
        assert answer.status == 500
        assert b"does not answer" in answer.body
        assert b"secret" not in answer.body


async def test_a_person_who_subscribes_too_often_can_unsubscribe(tmp_path: Path) -> None:
    limits = "\n[limits]\nresubscriptions_per_day = 2\n"
    async with serving(tmp_path, config_extra=GROUPS + limits) as server:
        url = page_of(members("u-1"))
        for status in (200, 200, 429):
            assert (await post(server, url, {"unsubscribe": "news"})).status == 200
            answer = await post(server, url, {"subscribe": "news"})
            assert answer.status == status
        assert int(answer.headers["retry-after"]) > 80_000
        assert b"Please try again tomorrow" in answer.body
        assert (await post(server, url, ONE_CLICK)).status == 200
        state = (await get(server, page_of(members("u-1"), SUBSCRIPTIONS))).json
        assert not any(state["subscriptions"].values())


async def test_what_is_suppressed_is_shown(tmp_path: Path) -> None:
    """Of the address that the link names, or that surely is the user's."""
    async with serving(tmp_path, config_extra=GROUPS + SERVER_KEY) as server:
        store = server.app.store
        await store.suppress(
            [
                Suppression(
                    workspace_id="acme",
                    channel=channel,
                    address=address,
                    group_id=group,
                    reason=reason,
                    at=1_700_000_000_000,
                )
                for channel, address, group, reason in (
                    ("email", "ann@example.com", "", "bounce"),
                    ("email", "bob@example.com", "", "bounce"),
                    ("sms", "+491", "delivery", "stop"),
                    ("whatsapp", "+491", "", "stop"),
                )
            ]
        )
        people: dict[str, dict[str, Any]] = {
            "ann": {"email": " Ann@Example.com", "phone": "+49-1"},
            "mallory": {"email": "ann@example.com", "phone": "+492"},
            "bob": {"email": 5},
        }
        for user, traits in people.items():
            key = basic(f"{BACKEND}:") if user == "ann" else BASIC
            await server.send("/v1/identify", {"userId": user, "traits": traits}, key=key)

        async def suppressed(link: dict[str, str]) -> list[tuple[str, str | None, str]]:
            answer = await get(server, page_of(link, SUBSCRIPTIONS))
            assert answer.status == 200
            page = (await get(server, page_of(link))).body
            suppressions = answer.json["suppressions"]
            traits = people.get(link["i"], {}) if link["ik"] == "id" else {}
            left_out = [] if link["i"] == "ann" else sorted(traits)
            assert answer.json.get("addressesLeftOut", []) == left_out
            channels = {(one["channel"], one["groupId"]) for one in suppressions}
            assert (b"Nothing is sent to your address" in page) == (("email", None) in channels)
            of_group = b"Not sent to your address at the moment: Delivery." in page
            assert of_group == (("sms", "delivery") in channels)
            assert {one["at"] for one in suppressions} <= {"2023-11-14T22:13:20.000Z"}
            return sorted((one["channel"], one["groupId"], one["reason"]) for one in suppressions)

        phone = [("sms", "delivery", "stop"), ("whatsapp", None, "stop")]
        both = [("email", None, "bounce"), *phone]
        assert await suppressed(members("ann")) == both
        for user in ("mallory", "bob", "nobody"):
            assert await suppressed(members(user)) == []
        link = members("ann", identifier="ANN@example.com", key="email")
        assert await suppressed(link) == both[:1]
        assert await suppressed(members("ann", identifier="+49 1", key="phone")) == phone


async def test_what_is_suppressed_of_an_erased_person_is_shown(tmp_path: Path) -> None:
    """Only the hash of the address is kept; somebody else may have the address now."""
    config = f'{GROUPS}\n[erasures]\nkey = "{KEY}"\n'
    async with serving(tmp_path, config_extra=config) as server:
        store = server.app.store
        at = 1_700_000_000_000
        common: Any = {"workspace_id": "acme", "channel": "email", "reason": "bounce", "at": at}
        hashed = hashed_address(KEY, "acme", "email", "ann@example.com")
        await store.suppress([Suppression(address=hashed, group_id="", **common)])
        for address, shown in (("ANN@example.com", True), ("bob@example.com", False)):
            identity = {"userId": address, "traits": {"email": address}}
            await server.send("/v1/identify", identity)
            link = members(address, identifier=address, key="email")
            suppressions = (await get(server, page_of(link, SUBSCRIPTIONS))).json["suppressions"]
            assert [suppression["reason"] for suppression in suppressions] == ["bounce"] * shown
            page = (await get(server, page_of(link))).body
            assert (b"Nothing is sent to your address" in page) == shown


def click(url: str, name: str, answered: list[str]) -> None:
    """Unsubscribe one person after the other until the server is killed."""
    for count in range(200):
        user = f"killed-{name}-{count}"
        try:
            answer = httpx.post(
                url + page_of(members(user), s="news"),
                data={"List-Unsubscribe": "One-Click"},
                timeout=60,
            )
        except httpx.TransportError:
            return
        assert answer.status_code == 200
        answered.append(user)


@pytest.mark.parametrize("storage", console_data.STORAGES)
@pytest.mark.timeout(300)
def test_an_answer_means_that_the_choice_is_kept(tmp_path: Path, storage: str) -> None:
    """The server is killed between the change and the answer, or before, or after."""
    tables = console_data.tables(storage)
    with start_server(tmp_path, storage=tables, config_extra=GROUPS) as server:
        for turn in range(3):
            answered: list[str] = []
            names = [f"{turn}-{number}" for number in range(3)]
            threads = [
                threading.Thread(target=click, args=(server.url, name, answered)) for name in names
            ]
            for thread in threads:
                thread.start()
            wait_for(lambda: answered, what="the first answer")  # noqa: B023
            time.sleep(turn * 0.15)
            server.kill()
            for thread in threads:
                thread.join()
            server.start()
            stored = {change["userId"] for change in server.export("subscription-history")}
            assert set(answered) <= stored
            # The mail program does it again, and nothing is there twice.
            user = answered[-1]
            link = members(user)
            again = server.client.post(
                page_of(link, s="news"), data={"List-Unsubscribe": "One-Click"}
            )
            assert again.status_code == 200
            assert choices(server, link) == {**AT_FIRST, "news": False}
            assert len(ledger(server, user)) == 1
