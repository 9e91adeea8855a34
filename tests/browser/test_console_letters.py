# SPDX-License-Identifier: Apache-2.0
"""A rejected event in the console: found, understood, corrected, checked, and replayed once."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from support.console import console_url
from support.operator import Operator
from support.server_process import Server
from support.waiting import wait_for

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

#: A number that JavaScript cannot represent.
BIG = 9007199254740993


def stored(console: Server, message_id: str) -> list[dict[str, Any]]:
    return [event for event in console.export() if event["messageId"] == message_id]


def letter_of(console: Server, message_id: str) -> dict[str, Any]:
    """Wait for the dead letter of a message id."""

    def found() -> Any:
        letters = console.export("dead-letters")
        return next((one for one in letters if one.get("messageId") == message_id), None)

    letter: dict[str, Any] = wait_for(found, what="the dead letter")
    return letter


def reject(console: Server, message_id: str, **fields: Any) -> str:
    """Send a track event without a name, and return the id of its dead letter."""
    body = {"userId": "ann", "messageId": message_id, **fields}
    assert console.post("/v1/track", body).status_code == 400
    return str(letter_of(console, message_id)["id"])


def edit(operator: Operator, before: str, after: str) -> None:
    """Replace a part of the text, as a person does."""
    text = operator.one("#text").get_property("value")
    assert isinstance(text, str)
    assert before in text
    operator.fill("#text", text.replace(before, after))


def test_an_event_is_corrected_by_keyboard(operator: Operator, console: Server) -> None:
    letter = reject(console, "m-keyboard", properties={"big": BIG})
    operator.open("rejected?reason=invalid_payload&pointer=/event")
    assert "is required" in operator.text()
    operator.tab_to("Show all causes")
    operator.keys(Keys.TAB, Keys.ENTER)
    assert letter in operator.path
    assert "event: is required" in operator.text(".reasons")
    assert str(BIG) in str(operator.one("#text").get_property("value"))
    assert "Replay" not in operator.texts("main button")

    operator.tab_to("text")
    operator.browser.run("arguments[0].setSelectionRange(1, 1)", operator.one("#text"))
    operator.keys('"event": 7, ')
    operator.tab_to("Check")
    operator.keys(Keys.ENTER)
    operator.see("Not valid", "main [role=alert]")
    assert "event: must be a string" in operator.text(".reasons")
    assert "Replay" not in operator.texts("main button")
    edit(operator, '"event": 7', '"event": "Mended"')
    operator.tab_to("Check")
    operator.keys(Keys.ENTER)
    operator.see("nothing is stored yet", "[role=status]")
    assert str(BIG) in operator.text("main .stack pre.json")
    assert stored(console, "m-keyboard") == []
    assert letter_of(console, "m-keyboard")

    operator.tab_to("Replay")
    operator.keys(Keys.ENTER)
    operator.see("was replayed: it is stored", "[role=status]")
    assert str(BIG) in operator.text("pre.json")
    [event] = stored(console, "m-keyboard")
    assert event["event"] == "Mended"
    assert event["properties"] == {"big": BIG}
    assert letter not in json.dumps(console.export("dead-letters"))
    operator.open("audit")
    assert "letter-replayed" in operator.text()
    operator.allowed.add(404)
    operator.open(f"letter?id={letter}")
    operator.see("It is no longer here")


def test_the_line_that_is_wrong_is_selected(operator: Operator, console: Server) -> None:
    many = {f"p{n:02}": "\U0001f600" for n in range(60)}
    letter = reject(console, "m-line", event="E", properties=many, timestamp="soon")
    operator.open(f"letter?id={letter}")
    selected = (
        "const area = document.getElementById('text');"
        " return area.value.slice(area.selectionStart, area.selectionEnd).trim()"
    )
    assert operator.browser.run(selected) == '"timestamp": "soon"'
    assert operator.browser.run("return document.activeElement.id") != "text"
    edit(operator, '"p55":', '"p55"')
    operator.click("Check")
    operator.see("Not valid: 1 problem", "main [role=alert]")
    assert operator.texts(".notice") == []
    assert operator.browser.run(selected).startswith('"p55"')
    # It is in view, and a key replaces it.
    assert operator.browser.run("return document.activeElement.id") == "text"
    assert operator.browser.run("return document.activeElement.scrollTop") > 0
    operator.keys('"p55": 1,')
    operator.click("Check")
    operator.see("timestamp: must be", ".reasons")
    assert operator.browser.run(selected) == '"timestamp": "soon"'
    operator.browser.run("document.getElementById('text').setSelectionRange(0, 0)")
    operator.click(operator.texts(".reasons a")[0])
    assert operator.browser.run(selected) == '"timestamp": "soon"'


def test_all_events_of_a_cause_are_replayed_after_a_question(
    operator: Operator, console: Server
) -> None:
    for number in range(3):
        reject(console, f"m-bulk-{number}", event="E", context=5)
    operator.size(1280, 500)
    operator.open("rejected")
    row = "tr[aria-current]"
    assert operator.texts(row) == []
    link = operator.one('td a[href*="pointer=%2Fcontext"][href*="ask=replay"]')
    operator.browser.run("arguments[0].scrollIntoView({block: 'center'})", link)
    link.click()
    operator.see("3 events will be processed again", "#cause")
    assert "context: must be an object" in operator.texts(row)[0]
    top = operator.browser.run(
        "return document.querySelector('#cause').getBoundingClientRect().top"
    )
    assert 0 < top < 450
    operator.click("Cancel", "#cause")
    operator.see("Delete all", "#cause")
    operator.click("Replay all", "#cause")
    operator.click("Replay 3 events", "#cause")
    operator.see("3 failed", ".status.bad")


def test_a_letter_that_was_cut_has_no_button(operator: Operator, console: Server) -> None:
    letter = reject(console, "m-cut", properties={"text": "x" * 40_000})
    operator.open(f"letter?id={letter}")
    assert "cannot be replayed" in operator.text()
    assert not {"Check", "Replay"} & set(operator.texts("main button"))


def test_without_scripts_a_key_is_created_and_an_event_replayed(
    operator: Operator, console: Server
) -> None:
    letter = reject(console, "m-no-script")
    operator.browser.cdp("Emulation.setScriptExecutionDisabled", value=True)
    operator.open("keys")
    assert not operator.one("[data-copy]").is_displayed()
    operator.fill("#new-id", "plain")
    operator.click("Create key")
    operator.see("was created")
    operator.open("events")
    operator.fill("#f-name", "Order")
    operator.click("Filter")
    operator.until(lambda: "name=Order" in operator.path)
    assert {row[3] for row in operator.rows("[data-expand]")} == {"Order"}
    operator.open("rejected")
    operator.click("Replay all")
    operator.see("will be processed again")
    operator.open(f"letter?id={letter}")
    edit(operator, "{", '{"event": "Plain", ')
    operator.click("Check")
    operator.see("nothing is stored yet")
    operator.click("Replay")
    operator.see("it is stored")
    assert len(stored(console, "m-no-script")) == 1


def test_two_thousand_letters_while_the_console_is_killed(
    operator: Operator, console: Server
) -> None:
    count = 2000  # Four seconds: 500 are replayed in a second.
    event = {"type": "track", "userId": "ann", "event": "Replayed", "messageId": "m-same"}
    assert console.post("/v1/batch", {"batch": [event]}).status_code == 200
    for start in range(0, count, 100):
        items = [{**event, "properties": {"n": n}} for n in range(start, start + 100)]
        console.post("/v1/batch", {"batch": items})

    def conflicts() -> int:
        letters = console.export("dead-letters")
        return sum(letter["reason"] == "message_id_conflict" for letter in letters)

    wait_for(lambda: conflicts() == count, what="the dead letters")
    operator.open("rejected?reason=message_id_conflict")
    operator.click("Replay all", "#cause")
    operator.see(f"{count:,} events will be stored under new".replace(",", "\u202f"))
    operator.click("Replay 2\u202f000 events")
    operator.until(lambda: operator.path.startswith("replays"))

    # The page follows without being loaded again, which would move the focus.
    operator.until(lambda: operator.texts("#progress"))
    operator.browser.run("window.loaded = true")
    value = "return document.getElementById('progress').value"
    before = operator.browser.run(value)
    operator.until(lambda: operator.browser.run(value) > before)
    assert operator.browser.run("return window.loaded")
    [pid] = console.consoles()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: console.consoles() - {pid}, what="the console to start again")
    old = operator.url
    wait_for(lambda: console_url(console) != old, what="the console to listen")
    operator.url = console_url(console)
    operator.sign_in(console)
    operator.open("rejected?reason=message_id_conflict")
    operator.problems()  # The page of the killed console could not reach it.
    assert conflicts() > 0
    operator.click("Replay all", "#cause")
    operator.see("will be stored under new message ids")
    operator.one("#cause button.primary").click()

    def finished() -> bool:
        operator.open("replays")
        return "done" in operator.texts("main .status")

    operator.until(finished)
    replayed = [event for event in console.export() if event.get("event") == "Replayed"]
    assert sorted(event["properties"]["n"] for event in replayed if "properties" in event) == list(
        range(count)
    )
    assert conflicts() == 0
