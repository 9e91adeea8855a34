# SPDX-License-Identifier: Apache-2.0
"""The preferences page over HTTP: scanners, one click, the form, expiry, forged links."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from support import console_data
from support.each import each
from support.preferences import (
    AT_FIRST,
    GROUPS,
    OLD_SECRET,
    PAGE,
    SUBSCRIPTIONS,
    body_of,
    choices,
    ledger,
    members,
    page_of,
)
from support.server_process import SECRET, Server, start_server

pytestmark = pytest.mark.timeout(300)

ONE_CLICK = {"List-Unsubscribe": "One-Click"}
FORM = "application/x-www-form-urlencoded"
#: Any time before now.
EXPIRED = 1_000_000_000
OTHER = f"""
[[workspaces]]
id = "channel"
subscription_secret = "{SECRET}-of-channel"
[workspaces.preferences_page]
one_click = "channel"
{GROUPS}
"""


@pytest.fixture(scope="module", params=console_data.STORAGES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Return a server on each storage; each test has people of its own."""
    folder = tmp_path_factory.mktemp("preferences")
    storage = console_data.tables(request.param)
    with start_server(folder, storage=storage, config_extra=GROUPS + OTHER) as one:
        text = one.config.read_text()
        secrets = f'subscription_secret = ["{SECRET}", "{OLD_SECRET}"]'
        one.config.write_text(text.replace(f'subscription_secret = "{SECRET}"\n', secrets + "\n"))
        one.restart()
        yield one


def shown(state: dict[str, bool]) -> str:
    """Return the field of the form that has what was shown."""
    return " ".join(f"{group}:{on:d}" for group, on in state.items())


# ------------------------------------------------------------------------------------- scanners
def test_a_scanner_that_opens_every_link_changes_nothing(server: Server) -> None:
    link = members("scanned")
    for query in ({}, {"s": "news", "sub": "0"}, {"s": "offers", "sub": "1"}):
        for number in range(4):
            headers = {"Purpose": "prefetch", "Sec-Purpose": "prefetch"} if number % 2 else {}
            assert server.get(page_of(link, **query), headers=headers).status_code == 200
            head = server.client.head(page_of(link, **query))
            assert (head.status_code, head.content) == (200, b"")
    for url in (page_of(link, SUBSCRIPTIONS), page_of(link, sub="0")):
        assert server.get(url).status_code == 200
    assert server.client.options(page_of(link)).status_code == 204
    assert ledger(server, "scanned") == []
    assert choices(server, link) == AT_FIRST
    assert all(state["userId"] != "scanned" for state in server.export("subscriptions"))


def test_the_url_does_not_leak_from_the_page(server: Server) -> None:
    link = members("private")
    wrong = {**link, "h": "0" * 64}
    answers = [
        server.get(page_of(link), headers={"Origin": "https://evil.example"}),
        server.client.head(page_of(link)),
        server.client.post(page_of(link), data=ONE_CLICK, headers={"Origin": "null"}),
        server.client.post(page_of(link), data={"shown": "news:0"}),
        server.get(page_of(wrong), headers={"Origin": "https://evil.example"}),
        server.client.post(page_of(link), data={"sub": "0"}),
    ]
    assert [one.status_code for one in answers] == [200, 200, 200, 200, 401, 400]
    for answer in answers:
        headers = answer.headers
        assert headers["content-type"] == "text/html; charset=utf-8"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "form-action 'self'" in policy
        assert "script-src" not in policy
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert headers["x-robots-tag"] == "noindex"
        assert headers["x-content-type-options"] == "nosniff"
        assert not {"set-cookie", "location", "access-control-allow-origin"} & headers.keys()
        assert "<script" not in answer.text
        assert not re.search(r"(src|href|action)=\"?(?!data:)", answer.text)
    preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    options = server.client.options(page_of(link), headers=preflight)
    assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, POST, OPTIONS")
    assert not any(name.startswith("access-control") for name in options.headers)


def test_head_has_the_headers_of_get(server: Server) -> None:
    for link in (members("headed"), {"w": "acme"}):
        get, head = server.get(page_of(link)), server.client.head(page_of(link))
        assert (head.status_code, head.content) == (get.status_code, b"")
        own = {"date", "x-request-id"}
        assert {k: v for k, v in head.headers.items() if k not in own} == {
            k: v for k, v in get.headers.items() if k not in own
        }


def test_the_path_of_older_links_of_dittofeed_has_the_page(server: Server) -> None:
    path = "/dashboard/public/subscription-management"
    answer = server.get(page_of(members("old"), path, s="news", sub="0"))
    assert answer.status_code == 200
    assert "Unsubscribe from Newsletter" in answer.text


def test_another_method_is_refused_with_a_page(server: Server) -> None:
    answer = server.client.put(page_of(members("put")), json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, POST, OPTIONS")
    assert "That did not work" in answer.text


# ------------------------------------------------------------------------------------- one click
def multipart(*, declared: str, used: str, field: str = "List-Unsubscribe") -> tuple[str, bytes]:
    """Return the content type and the body of a form with one field."""
    body = (
        f'--{used}\r\nContent-Disposition: form-data; name="{field}"\r\n\r\nOne-Click\r\n'
        f"--{used}--\r\n"
    )
    return f"multipart/form-data; boundary={declared}", body.encode()


#: Content type and body, byte for byte.
BODIES: dict[str, tuple[str, bytes]] = {
    # Gmail, as in Google's "Email sender guidelines", and RFC 8058, section 8.1.
    "gmail": (FORM, b"List-Unsubscribe=One-Click"),
    "with a character set": (f"{FORM}; charset=UTF-8", b"List-Unsubscribe=One-Click"),
    "with the end of a line": (FORM, b"List-Unsubscribe=One-Click\r\n"),
    "without a content type": ("", b"List-Unsubscribe=One-Click"),
    # RFC 8058, section 8.3, as printed (Content-Length: 124): the boundary of the header is not
    # that of the body, which is erratum 5117. There is no line end after it.
    "rfc 8058": (
        "multipart/form-data; boundary=---FormBoundaryjWmhtjORrn",
        b'---FormBoundaryjWmhtjORrn\r\nContent-Disposition: form-data; name="List-Unsubscribe"\r\n'
        b"\r\nOne-Click\r\n---FormBoundaryjWmhtjORrn--",
    ),
    "rfc 8058 with the erratum": (
        "multipart/form-data; boundary=-FormBoundaryjWmhtjORrn",
        b'---FormBoundaryjWmhtjORrn\r\nContent-Disposition: form-data; name="List-Unsubscribe"\r\n'
        b"\r\nOne-Click\r\n---FormBoundaryjWmhtjORrn--",
    ),
    # As Apple's and Java's libraries, and those of browsers, write it.
    "apple": multipart(
        declared='"Boundary-7F3C0A5E-4C1B-4F0E"', used="Boundary-7F3C0A5E-4C1B-4F0E"
    ),
    "webkit": multipart(declared="----WebKitFormBoundaryA1", used="----WebKitFormBoundaryA1"),
    "with a content type in the part": (
        "Multipart/Form-Data; boundary=b",
        b"--b\r\ncontent-type: text/plain; charset=UTF-8\r\n"
        b"content-disposition: form-data; name=List-Unsubscribe\r\n"
        b"content-length: 9\r\n\r\nOne-Click\r\n--b--\r\n",
    ),
    "with bare line feeds": (
        "multipart/form-data; boundary=b",
        b'--b\nContent-Disposition: form-data; name="List-Unsubscribe"\n\nOne-Click\n--b--\n',
    ),
}


def test_the_example_of_the_rfc_has_its_length() -> None:
    assert len(BODIES["rfc 8058"][1]) == 124


@each("name", BODIES)
def test_one_click_stops_the_group_of_the_link(server: Server, name: str) -> None:
    """As mail programs send it: without cookies, and sometimes twice."""
    user = f"one-click {name}"
    link = members(user)
    kind, body = BODIES[name]
    headers = {"User-Agent": "Mailer/1.0 " + "x" * 300, **({"Content-Type": kind} if kind else {})}
    for _ in range(3):
        answer = server.client.post(page_of(link, s="news", sub="0"), content=body, headers=headers)
        assert answer.status_code == 200
        assert "You are unsubscribed from Newsletter." in answer.text
        assert "<form" not in answer.text
        assert not {"location", "set-cookie"} & answer.headers.keys()
    assert choices(server, link) == {**AT_FIRST, "news": False}
    [record] = ledger(server, user)
    assert (record["how"], record["groupId"], record["after"]) == ("one-click", "news", False)
    assert record["userAgent"] == headers["User-Agent"][:256]


@each(
    "workspace, group, left",
    [
        *(("acme", "news", {"product", "delivery"}), ("acme", "", set())),
        ("acme", "delivery", {"news", "product"}),
        # The group is not in the config any more: the safe side is to stop all.
        *(("acme", "removed", set()), ("channel", "news", {"delivery"})),
        *(("channel", "delivery", {"news", "product"}), ("channel", "", set())),
    ],
)
def test_what_one_click_stops(server: Server, workspace: str, group: str, left: set[str]) -> None:
    secret = SECRET if workspace == "acme" else f"{SECRET}-of-channel"
    link = members(f"{workspace} {group}", workspace=workspace, secret=secret)
    url = page_of(link, **({"s": group} if group else {}))
    assert server.client.post(url, data=ONE_CLICK).status_code == 200
    assert {name for name, on in choices(server, link).items() if on} == left


@each(
    "kind, body",
    [
        *((FORM, b"sub=0&s=news"), (FORM, b"List-Unsubscribe=Two-Click")),
        *(
            (FORM, b"List-Unsubscribe"),
            (FORM, b"\xff=%ff"),
            (FORM, b"X-List-Unsubscribe = One-Click"),
        ),
        (FORM, b"List-Unsubscribe = One-Click&group=news"),
        ("application/json", b'{"List-Unsubscribe": "One-Click", "subscribe": "offers"}'),
        ("application/json", b"{}"),
        multipart(declared="b", used="b", field="Unsubscribe"),
    ],
)
def test_a_body_without_the_words_changes_nothing(server: Server, kind: str, body: bytes) -> None:
    link = members("without words")
    url = page_of(link, s="news", sub="0")
    answer = server.client.post(url, content=body, headers={"Content-Type": kind})
    assert answer.status_code == 400
    assert "Nothing has been changed" in answer.text
    assert ledger(server, "without words") == []


#: As some programs send it: RFC 8058 lets a server refuse them, but the person sees nothing of it.
LENIENT = {
    "empty": (FORM, b""),
    "blank": (FORM, b"\r\n"),
    "JSON": ("application/json", b'{"List-Unsubscribe": "One-Click"}'),
    "small JSON": ("application/json", b'{"list-unsubscribe":"one-click"}'),
    "quoted": (FORM, b'"List-Unsubscribe=One-Click"'),
    "quoted value": (FORM, b'List-Unsubscribe="One-Click"'),
    "blanks": (FORM, b"List-Unsubscribe = One-Click"),
    "escaped": (FORM, b"List-Unsubscribe%3DOne-Click"),
    "header": ("text/plain", b"List-Unsubscribe: One-Click"),
    "no parts": ("multipart/form-data; boundary=b", b"List-Unsubscribe=One-Click"),
}


@pytest.mark.parametrize("name", LENIENT)
def test_a_body_that_can_only_mean_one_click_is_one(server: Server, name: str) -> None:
    user = f"lenient {name}"
    link, (kind, body) = members(user), LENIENT[name]
    for query in ({"s": "news", "sub": "1"}, {}, {"sub": "1"}):
        answer = server.client.post(
            page_of(link, **query), content=body, headers={"Content-Type": kind}
        )
        assert answer.status_code == 400, "the link does not name what to stop"
    assert ledger(server, user) == []
    for query in ({"s": "news", "sub": "0"}, {"s": "news"}):
        answer = server.client.post(
            page_of(link, **query), content=body, headers={"Content-Type": kind}
        )
        assert answer.status_code == 200
        assert "You are unsubscribed from Newsletter." in answer.text
    assert choices(server, link) == {**AT_FIRST, "news": False}
    assert [record["how"] for record in ledger(server, user)] == ["one-click"]
    answer = server.client.post(page_of(link, sub="0"), content=body)
    assert answer.status_code == 200
    assert not any(choices(server, link).values())


def test_one_click_may_have_no_body_at_all(server: Server) -> None:
    link = members("no body")
    target = page_of(link, s="news", sub="0")
    request = f"POST {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), 30) as connection:
        connection.sendall(request.encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert choices(server, link)["news"] is False


def test_a_link_may_have_the_ampersands_of_html(server: Server) -> None:
    link = members("ampersands")
    path, _, query = page_of(link, s="news", sub="0").partition("?")
    for written in ("&amp;", "&amp;amp;"):
        url = f"{path}?{query.replace('&', written)}"
        assert "Unsubscribe from Newsletter" in server.get(url).text
    assert server.client.post(url, data=ONE_CLICK).status_code == 200
    assert choices(server, link) == {**AT_FIRST, "news": False}
    url = page_of(link, SUBSCRIPTIONS).replace("&", "&amp;")
    assert server.get(url).status_code == 200
    for wrong in (f"{url}&i=ampersands", url.replace("h=", "h=0", 1)):
        assert server.get(wrong).status_code == 401


def test_a_body_is_small(server: Server) -> None:
    link = members("bounds")
    url = page_of(link, s="news")

    def urlencoded(size: int) -> tuple[str, bytes]:
        return FORM, (BODIES["gmail"][1] + b"&pad=").ljust(size, b"x")

    def in_parts(size: int) -> tuple[str, bytes]:
        kind, body = BODIES["webkit"]
        return kind, body.ljust(size, b"x")

    for padded in (urlencoded, in_parts):
        for size, status in ((4097, 413), (4096, 200)):
            kind, body = padded(size)
            answer = server.client.post(url, content=body, headers={"Content-Type": kind})
            assert (size, answer.status_code) == (size, status)
        assert len(ledger(server, "bounds")) == 1
    form = b"shown=news:0&pad=".ljust(1024 * 1024, b"x")
    for extra, status in ((b"x", 413), (b"", 200)):
        answer = server.client.post(url, content=form + extra, headers={"Content-Type": FORM})
        assert answer.status_code == status
    zipped = {"Content-Type": FORM, "Content-Encoding": "gzip"}
    assert server.client.post(url, content=b"x", headers=zipped).status_code == 415
    no_length = server.client.post(url, content=iter([BODIES["gmail"][1]]))
    assert no_length.status_code == 200


# ------------------------------------------------------------------------------------- the form
def test_only_what_was_shown_and_differs_changes(server: Server) -> None:
    link = members("form")
    fields = {"shown": shown(AT_FIRST), "group": ["offers", "product", "delivery"]}
    answer = server.client.post(page_of(link), data=fields)
    assert answer.status_code == 200
    assert 'role="status"' in answer.text
    assert "Your choices are saved." in answer.text
    assert choices(server, link) == {**AT_FIRST, "news": False, "offers": True}
    records = ledger(server, "form")
    assert {one["groupId"]: one["before"] for one in records} == {"news": None, "offers": None}
    assert {record["how"] for record in records} == {"page"}
    again = server.client.post(page_of(link), data={"shown": shown(AT_FIRST), "group": "x"})
    assert again.status_code == 200
    assert choices(server, link) == dict.fromkeys(AT_FIRST, False) | {"offers": True}


def test_two_tabs_do_not_undo_each_other(server: Server) -> None:
    """The second tab shows "product" as it was before the first one turned it off."""
    link = members("tabs")
    kept = ["news", "product", "delivery"]
    first = {"shown": shown(AT_FIRST), "group": [one for one in kept if one != "product"]}
    second = {"shown": shown(AT_FIRST), "group": [one for one in kept if one != "news"]}
    for fields in (first, second):
        assert server.client.post(page_of(link), data=fields).status_code == 200
    assert choices(server, link) == {**AT_FIRST, "news": False, "product": False}


def test_a_group_that_was_added_or_removed_in_between_does_not_change(server: Server) -> None:
    link = members("in between")
    # The page had a group that is gone, and not yet "product" and "delivery".
    fields = {"shown": "gone:1 news:1 offers:0", "group": ["offers", "gone"]}
    assert server.client.post(page_of(link), data=fields).status_code == 200
    assert choices(server, link) == {**AT_FIRST, "news": False, "offers": True}
    for button in ("unsubscribe", "subscribe"):
        answer = server.client.post(page_of(link), data={button: "gone"})
        assert answer.status_code == 200
    assert server.client.post(page_of(link), data={"unsubscribe_channel": "fax"}).is_success
    assert len(ledger(server, "in between")) == 2


@each(
    "fields, off, sentence",
    [
        ({"unsubscribe": "news"}, {"news"}, "You are unsubscribed from Newsletter."),
        (
            {"unsubscribe_channel": "email"},
            {"news", "product"},
            "unsubscribed from Newsletter, Offers &amp; &lt;more&gt;, product.",
        ),
        (
            {"unsubscribe_all": "1"},
            {"news", "product", "delivery"},
            "You are unsubscribed from everything.",
        ),
    ],
)
def test_a_button_unsubscribes(
    server: Server, fields: dict[str, str], off: set[str], sentence: str
) -> None:
    user = f"button {sorted(fields)}"
    link = members(user)
    answer = server.client.post(page_of(link, s="news", sub="0"), data=fields)
    assert answer.status_code == 200
    assert sentence in answer.text
    assert "Do you want" not in answer.text
    assert choices(server, link) == {**AT_FIRST, **dict.fromkeys(off, False)}
    assert {entry["how"] for entry in ledger(server, user)} == {"page"}


def test_a_link_that_subscribes_asks_first(server: Server) -> None:
    link = members("subscribes")
    url = page_of(link, s="offers", sub="1")
    assert "Subscribe to Offers &amp; &lt;more&gt;" in server.get(url).text
    answer = server.client.post(url, data={"subscribe": "offers"})
    assert "You are subscribed to Offers &amp; &lt;more&gt;." in answer.text
    assert choices(server, link)["offers"] is True
    # There is nothing to ask any more.
    again = server.get(url).text
    assert "You are subscribed to Offers" in again
    assert "Subscribe to Offers" not in again


def test_the_page_offers_one_group_and_its_channel(server: Server) -> None:
    text = server.get(page_of(members("offers"), s="news", sub="0")).text
    assert text.index("Unsubscribe from Newsletter") < text.index("everything by e-mail")
    assert text.index("everything by e-mail") < text.index("Or choose one by one")
    # The only group of its channel.
    sms = server.get(page_of(members("offers"), s="delivery", sub="0")).text
    assert "Unsubscribe from Delivery" in sms
    assert "everything by text message" not in sms
    own = members("offers", workspace="channel", secret=f"{SECRET}-of-channel")
    text = server.get(page_of(own, s="news", sub="0")).text
    assert text.index("everything by e-mail") < text.index("Unsubscribe from Newsletter")
    everything = server.get(page_of(members("offers"), sub="0")).text
    assert everything.count("Unsubscribe from everything") == 1


# ------------------------------------------------------------------------------------- expiry
def test_an_expired_link_only_unsubscribes(server: Server) -> None:
    link = members("expired", expires=EXPIRED)
    url = page_of(link, s="news", sub="0")
    page = server.get(url)
    assert page.status_code == 200
    assert "This link has expired" in page.text
    assert "Unsubscribe from Newsletter" in page.text
    assert "checkbox" not in page.text
    assert "Offers" not in page.text
    for fields in (
        {"subscribe": "offers"},
        {"shown": "offers:0 news:1", "group": ["offers", "news"]},
    ):
        answer = server.client.post(url, data=fields)
        assert (answer.status_code, "This link has expired" in answer.text) == (403, True)
        assert "checkbox" not in answer.text
    assert ledger(server, "expired") == []
    # One part of the form unsubscribes.
    mixed = {"shown": "offers:0 product:1", "group": ["offers"]}
    answer = server.client.post(url, data=mixed)
    assert (answer.status_code, "checkbox" in answer.text) == (200, False)
    assert "You are unsubscribed from product." in answer.text
    assert "saved" not in answer.text
    assert server.client.post(url, data=ONE_CLICK).status_code == 200
    assert server.client.post(url, data={"unsubscribe": "delivery"}).status_code == 200
    assert choices(server, members("expired")) == dict.fromkeys(AT_FIRST, False)
    assert [one["groupId"] for one in ledger(server, "expired")] == ["product", "news", "delivery"]


def test_a_link_expires_at_its_second(server: Server) -> None:
    later = members("second", expires=int(time.time()) + 3600)
    assert "checkbox" in server.get(page_of(later)).text
    assert server.client.post(page_of(later), data={"subscribe": "offers"}).status_code == 200
    assert choices(server, later)["offers"] is True
    soon = members("second", expires=int(time.time()) + 1)
    time.sleep(1.1)
    assert "checkbox" not in server.get(page_of(soon)).text


def test_an_expired_link_for_programs(server: Server) -> None:
    link = members("program", expires=EXPIRED)
    answer = server.get(page_of(link, SUBSCRIPTIONS))
    assert (answer.status_code, answer.json()["code"]) == (403, "link_expired")
    names = {"w": "workspaceId", "i": "identifier", "ik": "identifierKey", "h": "hash"}
    body: dict[str, Any] = {names[name]: link[name] for name in names} | {"expires": EXPIRED}

    def put(changes: dict[str, bool]) -> Any:
        return server.client.put(SUBSCRIPTIONS, json={**body, "changes": changes})

    for changes in ({}, {"offers": True}, {"offers": True, "news": False}):
        assert put(changes).json()["code"] == "link_expired"
    assert ledger(server, "program") == []
    assert put({"news": False}).json() == {"success": True, "subscriptions": {"news": False}}
    form = {**body, "changes[product]": "false"}
    assert server.client.put(SUBSCRIPTIONS, data=form).status_code == 200
    unsigned = {**body, "expires": None, "changes": {"news": False}}
    assert server.client.put(SUBSCRIPTIONS, json=unsigned).status_code == 401
    assert choices(server, members("program")) == {**AT_FIRST, "news": False, "product": False}


# ------------------------------------------------------------------------------------- forgeries
def forged(user: str) -> Iterator[dict[str, str]]:
    """Yield links that are not signed."""
    good, expiring = members(user), members(user, expires=EXPIRED)
    for place in range(64):
        digit = f"{int(good['h'][place], 16) ^ 1:x}"
        yield {**good, "h": good["h"][:place] + digit + good["h"][place + 1 :]}
    yield {**good, "h": good["h"].upper()}
    yield {**good, "h": good["h"][:63]}
    yield {**good, "h": good["h"] + "0"}
    yield {**good, "w": "channel"}
    yield {**good, "w": "unknown"}
    yield {**good, "w": "acme\x00"}
    yield {**good, "i": "somebody"}
    yield {**good, "i": f"{user} "}
    yield {**good, "ik": "email"}
    yield {**good, "ik": "name"}
    yield {**good, "i": "x" * 513}
    yield members(user, secret="a secret of somebody else")
    yield members(user, workspace="channel")
    # The expiry is removed, added, moved, or written in another way.
    yield {name: value for name, value in expiring.items() if name != "e"}
    yield {**good, "e": str(EXPIRED)}
    for text in (EXPIRED + 1, EXPIRED - 1, f"0{EXPIRED}", f"+{EXPIRED}", f"{EXPIRED}.0", "", "1e9"):
        yield {**expiring, "e": str(text)}
    yield {**expiring, "e": "٣" + str(EXPIRED)[1:]}
    yield {**expiring, "e": "9" * 17}
    # The expiry as a part of another member.
    yield {**{k: v for k, v in expiring.items() if k != "e"}, "ik": f'id","e":{EXPIRED}'}
    for name in good:
        yield {key: value for key, value in good.items() if key != name}


def test_a_forged_link_has_one_answer(server: Server) -> None:
    """The same for all, so that it does not tell what is wrong, nor which workspaces there are."""
    pages, answers, posts = set(), set(), set()
    links = list(forged("forged"))
    assert len(links) > 90
    for link in links:
        page = server.get(page_of(link, s="news", sub="0"))
        pages.add((page.status_code, page.text))
        answer = server.get(page_of(link, SUBSCRIPTIONS))
        answers.add((answer.status_code, answer.json()["code"], answer.json()["message"]))
        post = server.client.post(page_of(link, s="news"), data=ONE_CLICK)
        posts.add((post.status_code, post.text))
    [(status, text)] = pages
    assert (status, "This link is not valid" in text, "Acme" in text) == (401, True, False)
    assert posts == pages
    assert answers == {(401, "invalid_user_hash", "the hash belongs to no known user")}
    for suffix in ("&i=forged", "&h=0", "&e=1&e=2"):
        assert server.get(page_of(members("forged")) + suffix).status_code == 401
    assert server.get(f"{PAGE}?w=%ff&i=a&ik=id&h=0").status_code == 401
    assert ledger(server, "forged") == []


def test_an_old_secret_works_until_it_is_removed(server: Server) -> None:
    link = members("rotated", secret=OLD_SECRET)
    assert server.client.post(page_of(link, s="news"), data=ONE_CLICK).status_code == 200
    new = members("rotated")
    assert server.client.post(page_of(new, s="product"), data=ONE_CLICK).status_code == 200
    old, now = ledger(server, "rotated")
    assert (old["groupId"], now["groupId"]) == ("news", "product")
    assert old["secret"] != now["secret"]
    assert OLD_SECRET.encode().hex()[:8] not in str(old)


# ------------------------------------------------------------------------------------- people
def test_a_link_with_an_address_reaches_its_user_among_a_hundred(server: Server) -> None:
    """Anyone can give users that do not exist the address of a person, before and after."""
    address = f"victim-{time.time_ns()}@example.com"

    def forge(prefix: str) -> None:
        batch = [
            {"type": "identify", "userId": f"{prefix}-{number}", "traits": {"email": address}}
            for number in range(50)
        ]
        assert server.post("/v1/batch", {"batch": batch}).status_code == 200

    forge("before")
    server.post("/v1/identify", {"userId": "victim", "traits": {"email": address.upper()}})
    forge("after")
    link = members("victim", identifier=address, key="email")
    page = server.get(page_of(link))
    assert f"For {address}" in page.text
    fields = {"shown": shown(AT_FIRST), "group": ["news", "offers", "delivery"]}
    assert server.client.post(page_of(link), data=fields).status_code == 200
    assert server.client.post(page_of(link, s="news"), data=ONE_CLICK).status_code == 200
    assert choices(server, link) == choices(server, members("victim"))
    assert [(entry["groupId"], entry["how"]) for entry in ledger(server, "victim")] == [
        ("offers", "page"),
        ("product", "page"),
        ("news", "one-click"),
    ]
    # No other user, and nobody without a signature.
    others = {state["userId"] or "" for state in server.export("subscriptions")}
    assert not [other for other in others if other.startswith(("before-", "after-"))]
    expiring = members("victim", identifier=address, key="email", expires=EXPIRED)
    assert "This link has expired" in server.get(page_of(expiring)).text
    assert server.get(page_of({**link, "e": str(EXPIRED)})).status_code == 401


def test_a_link_of_a_visitor_works_before_and_after_the_sign_up(server: Server) -> None:
    anonymous = f"visitor-{time.time_ns()}"
    address = f"{anonymous}@example.com"
    server.post("/v1/identify", {"anonymousId": anonymous, "traits": {"email": address}})
    links = [
        members(anonymous, key="anonymousId"),
        members(anonymous, identifier=address, key="email", visitor=True),
    ]
    assert server.client.post(page_of(links[0], s="news"), data=ONE_CLICK).status_code == 200
    server.post("/v1/identify", {"userId": f"{anonymous}-user", "anonymousId": anonymous})
    assert server.client.post(page_of(links[1], s="product"), data=ONE_CLICK).status_code == 200
    for link in links:
        assert choices(server, link) == {**AT_FIRST, "news": False, "product": False}
    # The user has no choice of the visitor.
    assert choices(server, members(f"{anonymous}-user")) == AT_FIRST


def test_a_link_reaches_no_choice_of_another_id(server: Server) -> None:
    """Whoever links the ids, and whichever of them exists."""
    mine, victim = f"mine-{time.time_ns()}", f"victim-{time.time_ns()}"
    assert server.client.post(page_of(members(victim), s="news"), data=ONE_CLICK).is_success
    server.post("/v1/identify", {"anonymousId": mine, "traits": {"a": 1}})
    server.post("/v1/identify", {"anonymousId": victim, "traits": {"a": 1}})
    server.post("/v1/track", {"anonymousId": mine, "userId": victim, "event": "x"})
    server.post("/v1/identify", {"anonymousId": victim, "userId": mine})
    server.post("/v1/alias", {"previousId": victim, "userId": mine})
    stolen = {**AT_FIRST, "news": False}
    for link in (members(mine, key="anonymousId"), members(mine)):
        assert choices(server, link) == AT_FIRST
        assert server.client.post(page_of(link, s="product"), data=ONE_CLICK).is_success
        assert server.client.put(SUBSCRIPTIONS, json=body_of(link, news=True)).is_success
        assert choices(server, members(victim)) == stolen
    rows = [state for state in server.export("subscriptions") if state["groupId"] == "product"]
    assert {(row["userId"], row["anonymousId"]) for row in rows} >= {(mine, None), (None, mine)}
    assert not [row for row in rows if victim in (row["userId"], row["anonymousId"])]


def test_a_link_by_an_address_with_the_id_outlives_the_address(server: Server) -> None:
    """Without the id, the user is looked up by the address."""
    user = f"moved-{time.time_ns()}"
    old, new = f"old-{user}@example.com", f"new-{user}@example.com"
    link = members(user, identifier=old, key="email")
    server.post("/v1/identify", {"userId": user, "traits": {"email": old}})
    for named in (link, {**link, "u": user}):
        assert choices(server, named) == AT_FIRST
    server.post("/v1/identify", {"userId": user, "traits": {"email": new}})
    assert server.get(page_of(link)).status_code == 401
    assert server.get(page_of({**link, "u": "other"})).status_code == 401
    named = {**link, "u": user}
    for twice in (f"&u={user}", "&u=other"):
        assert server.get(page_of(named) + twice).status_code == 401
    assert server.client.post(page_of(named, s="news"), data=ONE_CLICK).status_code == 200
    assert choices(server, members(user)) == {**AT_FIRST, "news": False}
    of_visitor = members(user, identifier=old, key="email", visitor=True)
    assert choices(server, {**of_visitor, "u": user}) == {**AT_FIRST, "news": False}
    assert server.get(page_of({**of_visitor, "u": "other"})).status_code == 401


def test_a_link_from_before_that_fits_only_a_visitor_unsubscribes(server: Server) -> None:
    """The page shows nothing, and offers to unsubscribe, as of a link that has expired."""
    anonymous = f"before-{time.time_ns()}"
    address = f"{anonymous}@example.com"
    server.post("/v1/identify", {"anonymousId": anonymous, "traits": {"email": address}})
    link = members(anonymous, identifier=address, key="email")
    page = server.get(page_of(link, s="news"))
    assert page.status_code == 200
    assert "Unsubscribe from Newsletter" in page.text
    assert "Product" not in page.text
    assert server.get(page_of(link, SUBSCRIPTIONS)).json()["code"] == "link_expired"
    assert server.client.post(page_of(link, s="news"), data=ONE_CLICK).status_code == 200
    now = members(anonymous, identifier=address, key="email", visitor=True)
    assert choices(server, now) == {**AT_FIRST, "news": False}
    assert choices(server, members(anonymous)) == AT_FIRST
    for wrong in ("0", "2", "true", ""):
        assert server.get(page_of({**link, "v": wrong}, SUBSCRIPTIONS)).status_code == 401


# ------------------------------------------------------------------------------------- reading
def test_a_page_of_ones_own_reads_the_choices(server: Server) -> None:
    link = members("read")
    url = page_of(link, SUBSCRIPTIONS, lang="de", s="news")
    answer = server.get(url, headers={"Origin": "https://shop.example.com"})
    assert answer.json() == {"success": True, "subscriptions": AT_FIRST, "suppressions": []}
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["access-control-allow-origin"] == "*"
    head = server.client.head(url)
    assert (head.status_code, head.content) == (200, b"")
    assert ledger(server, "read") == []
    options = server.client.options(url, headers={"Origin": "https://shop.example.com"})
    assert options.headers["access-control-allow-methods"] == "PUT, GET, HEAD, OPTIONS"


# ------------------------------------------------------------------------------------- languages
@each(
    "lang, accepted, found",
    [
        *(("", "", "en"), ("de", "fr", "de"), ("de-AT", "fr", "de")),
        *(("xx", "fr-CA,en;q=0.5", "fr"), ("", "nl, pt-BR;q=0.8, es;q=0.9", "es")),
        *(("", "nl;q=1, ar;q=0.1", "ar"), ("", "fr;q=0, de;q=0.2", "de")),
        *(("", "*, de;q=x;q=1, ;;;", "en"), ("../../etc", "", "en")),
    ],
)
def test_the_language_is_that_of_the_link_or_the_browser(
    server: Server, lang: str, accepted: str, found: str
) -> None:
    for link in (members("speaker"), {"w": "acme"}):
        url = page_of(link, **({"lang": lang} if lang else {}))
        answer = server.get(url, headers={"Accept-Language": accepted})
        assert answer.headers["content-language"] == found
        assert f'<html lang="{found}" dir="{"rtl" if found == "ar" else "ltr"}">' in answer.text


def test_a_group_has_its_name_in_the_language(server: Server) -> None:
    link = members("speaker")
    assert "Rundbrief abbestellen" in server.get(page_of(link, s="news", lang="de")).text
    # Isolated, so that a name in Latin letters does not change the order of the words around it.
    text = server.get(page_of(link, s="news", lang="ar")).text
    assert "إلغاء الاشتراك في \u2068النشرة\u2069" in text
    assert "Newsletter" in server.get(page_of(link, lang="fr")).text
