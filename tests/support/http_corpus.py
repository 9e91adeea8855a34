# SPDX-License-Identifier: Apache-2.0
"""Raw requests of all kinds, for ``http_playing`` to send.

:data:`GROUPS` has them, by the config of the server that they need.

Length: a list of requests, which nothing but another list could hold.
"""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from engage.keys.auth import KEYLESS_BODY
from support.server_inprocess import BASIC
from support.server_process import KEY

__all__ = ["GROUPS", "HALF_CLOSE", "HANG_UP", "PAUSE", "READ", "READ_HEAD", "WAIT", "Group"]

# What a client does besides sending bytes.
READ: Final = "read an answer"
READ_HEAD: Final = "read an answer to HEAD"
PAUSE: Final = "let the server work"
HALF_CLOSE: Final = "send no more"
HANG_UP: Final = "close the connection"
WAIT: Final = "wait until a request is handled"

TRACK: Final = "/v1/track"
EVENT: Final = b'{"userId":"u","event":"E","messageId":"%s"}'
SHOP: Final = "Origin: https://shop.example.com"
EVIL: Final = "Origin: https://evil.example.com"
KEYED: Final = f"Authorization: {BASIC}"
PREFLIGHT: Final = (
    "Access-Control-Request-Method: POST",
    "Access-Control-Request-Headers: authorization, content-type, x-anything",
)
HOOK: Final = "/api/public/webhooks/segment"
SUBSCRIPTIONS: Final = "/api/public/subscription-management/user-subscriptions"


@dataclasses.dataclass(frozen=True)
class Group:
    """Requests to servers with the same config."""

    #: Name of a request → what its client sends and does.
    cases: Mapping[str, Sequence[bytes | str]]
    #: As for ``start_server``.
    server: str = ""
    config_extra: str = ""
    #: What happens before the requests.
    before: str = ""


def head(method: str, target: str, *lines: str, version: str = "1.1") -> bytes:
    """Return the head of a request."""
    first = [f"{method} {target} HTTP/{version}", "Host: localhost"]
    return "\r\n".join([*first, *lines, "", ""]).encode("latin-1")


def post(target: str, body: bytes, *lines: str, method: str = "POST") -> bytes:
    """Return a request with a body and the write key."""
    return head(method, target, KEYED, f"Content-Length: {len(body)}", *lines) + body


def track(message_id: str, *lines: str, target: str = TRACK) -> bytes:
    """Return a request with a valid event."""
    return post(target, EVENT % message_id.encode(), *lines)


def chunks(*parts: bytes) -> bytes:
    """Return a chunked body."""
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


CHUNKED: Final = "Transfer-Encoding: chunked"
LARGE: Final = b'{"userId":"u","event":"E","properties":{"a":"%s"}}' % (b"x" * KEYLESS_BODY.bytes)


def _usual() -> Iterator[tuple[str, Sequence[bytes | str]]]:
    """Yield requests for a server with the default config."""
    yield "an event", [track("1"), READ]
    yield "the same event again", [track("1"), READ]
    yield "another event with its id", [post(TRACK, EVENT[:-3] + b'1","x":1}'), READ]
    for operation in ("identify", "page", "screen", "group", "alias"):
        body = b'{"userId":"u","groupId":"g","previousId":"p","name":"n","messageId":"%s"}'
        yield operation, [post(f"/v1/{operation}", body % operation.encode()), READ]
    item = b'{"type":"track","userId":"u","event":"E","messageId":"b%d"}'
    batch = b'{"batch":[%s]}'
    yield "a batch", [post("/v1/batch", batch % b",".join([item % 1, item % 2])), READ]
    mixed = batch % b",".join([item % 3, item % 1, b'{"type":"nope"}'])
    yield "a batch with an invalid item", [post("/v1/batch", mixed), READ]
    yield "a strict batch", [post("/v1/batch", mixed, "X-Strict-Mode: 1"), READ]
    yield "a batch of invalid items", [post("/v1/batch", batch % b"1,2"), READ]
    keyed = batch % (item % 4)
    beacon = head("POST", f"/beacon/v1/batch?writeKey={KEY}", f"Content-Length: {len(keyed)}", SHOP)
    yield "a beacon", [beacon + keyed, READ]
    named = b'{"userId":"u","event":"E","messageId":"n","writeKey":"%s"}' % KEY.encode()
    without = head("POST", TRACK, f"Content-Length: {len(named)}")
    yield "a key in the body", [without + named, READ]
    body = EVENT % b"q1"
    length = f"Content-Length: {len(body)}"
    yield (
        "a key in the query",
        [head("POST", f"{TRACK}?writeKey={KEY}&a=%zz", length) + body, READ],
    )
    yield (
        "two keys in the query",
        [head("POST", f"{TRACK}?writeKey={KEY}&writeKey=b", "Content-Length: 2") + b"{}", READ],
    )
    yield (
        "an idempotency key",
        [
            post(TRACK, b'{"userId":"u","event":"E"}', "Idempotency-Key: k1"),
            READ,
            post(TRACK, b'{"userId":"u","event":"E"}', "Idempotency-Key: k1"),
            READ,
        ],
    )
    yield "no message id", [post(TRACK, b'{"userId":"u","event":"E"}'), READ]

    yield "slashes before the path", [track("s1", target="//v1/track"), READ]
    yield "more slashes", [track("s2", target="////v1/track"), READ]
    yield "an absolute target", [track("s3", target="http://example.com/v1/track?a=b"), READ]
    yield "slashes elsewhere", [track("s4", target="/v1//track"), READ]
    yield "an unknown path", [track("s5", target="/nothing/here?writeKey=secret"), READ]
    yield "an unknown path for a page", [track("s6", SHOP, target="/nothing"), READ]
    for method in ("GET", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "BREW", "PROPFIND"):
        for path in (TRACK, "/nothing", "/healthz", HOOK, f"/v1/projects/{KEY}/settings"):
            yield f"{method} {path}", [head(method, path, KEYED), READ]
    for path in (TRACK, "/nothing", "/healthz", "/readyz", HOOK, "/api/public/webhooks/nope"):
        yield f"HEAD {path}", [head("HEAD", path), READ_HEAD, head("GET", "/healthz"), READ]
        yield f"OPTIONS {path}", [head("OPTIONS", path), READ]
        yield f"OPTIONS {path} from a page", [head("OPTIONS", path, SHOP), READ]
        yield f"preflight {path}", [head("OPTIONS", path, SHOP, *PREFLIGHT), READ]
    yield "OPTIONS *", [head("OPTIONS", "*"), READ]
    yield "OPTIONS with a body", [post(TRACK, b"{}", method="OPTIONS"), READ]
    yield (
        "an odd preflight",
        [head("OPTIONS", TRACK, SHOP, "Access-Control-Request-Headers: a b"), READ],
    )
    yield "GET with a body", [post("/healthz", b"{}", method="GET"), READ, track("g"), READ]

    # 405 before encoding before length before key.
    wrong = ("Content-Encoding: br", "Authorization: Digest x")
    yield "405 first", [head("PUT", TRACK, *wrong, "Content-Length: 9000000"), READ]
    yield "then 415", [head("POST", TRACK, *wrong, "Content-Length: 9000000"), READ]
    yield "then 413", [head("POST", TRACK, wrong[1], "Content-Length: 9000000"), READ]
    yield "then 411", [head("POST", TRACK, wrong[1]), READ]
    yield "then 401", [head("POST", TRACK, wrong[1], "Content-Length: 2") + b"{}", READ]
    yield (
        "a length with zeros",
        [head("POST", TRACK, KEYED, "Content-Length: 0000000000000000002") + b"{}", READ],
    )
    for name, line in {
        "no key": "X-Nothing: x",
        "a wrong key": "Authorization: Basic bm9wZTo=",
        "an empty authorization": "Authorization: ",
        "what cannot be a key": "Authorization: Basic a=b c",
        "two authorizations": f"{KEYED}\r\n{KEYED}",
    }.items():
        request = head("POST", TRACK, line, "Content-Length: 2")
        yield name, [request + b"{}", READ]
        yield (
            f"{name} from a page",
            [request.replace(b"\r\n", b"\r\n%b\r\n" % SHOP.encode(), 1) + b"{}", READ],
        )
        yield (
            f"{name}, fetched",
            [head("POST", TRACK, line, "Sec-Fetch-Mode: cors", "Content-Length: 2") + b"{}", READ],
        )
        if name != "no key":
            yield f"{name}, the body later", [request, READ, b"{}" + track(f"later {name}"), READ]
    named = b'{"userId":"u","event":"E","writeKey":"unknown-key-here"}'
    without = head("POST", TRACK, f"Content-Length: {len(named)}")
    yield "a wrong key in the body", [without + named, READ]

    yield (
        "gzip",
        [post(TRACK, gzip.compress(EVENT % b"z", mtime=0), "Content-Encoding: gzip"), READ],
    )
    yield "damaged gzip", [post(TRACK, b"\x1f\x8bxx", "Content-Encoding: gzip"), READ]
    yield "no JSON", [post(TRACK, b"nope"), READ]
    yield "an empty body", [post(TRACK, b""), READ]
    yield "an invalid event", [post(TRACK, b'{"userId":1}'), READ]
    yield "an invalid event from a page", [post(TRACK, b'{"userId":1}', SHOP), READ]
    body = EVENT % b"c"
    yield "chunks", [head("POST", TRACK, KEYED, CHUNKED) + chunks(body[:9], body[9:]), READ]
    yield (
        "chunks in pieces",
        [
            head("POST", TRACK, KEYED, CHUNKED),
            PAUSE,
            chunks(EVENT % b"c2")[:11],
            PAUSE,
            chunks(EVENT % b"c2")[11:],
            READ,
        ],
    )
    yield "bad chunks", [head("POST", TRACK, KEYED, CHUNKED) + b"zz\r\n", READ]
    yield ("bad chunks and a wrong key", [head("POST", TRACK, wrong[1], CHUNKED) + b"zz\r\n", READ])
    yield "bad chunks later", [head("POST", TRACK, KEYED, CHUNKED), PAUSE, b"zz\r\n", READ]

    # Without a key in the head the limit is 1 MiB.
    length = f"Content-Length: {len(LARGE)}"
    yield "a large body with a key", [head("POST", TRACK, KEYED, length) + LARGE, READ]
    yield "a large body without a key", [head("POST", TRACK, length), READ]
    keyless = head("POST", TRACK, CHUNKED)
    yield "large chunks without a key", [keyless, PAUSE, chunks(LARGE)[:-5], READ]
    yield "large chunks without a key at once", [keyless + chunks(LARGE), READ]
    yield "large chunks and a wrong key", [head("POST", TRACK, wrong[1], CHUNKED), READ]

    yield "a truncated body", [post(TRACK, b"{}")[:-1], HALF_CLOSE, READ]
    yield "a truncated body later", [post(TRACK, b"{}")[:-1], PAUSE, HALF_CLOSE, READ]
    yield (
        "a truncated body and a wrong key",
        [head("POST", TRACK, wrong[1], "Content-Length: 9") + b"{}", HALF_CLOSE, READ],
    )
    yield "a half-closed connection", [track("h"), HALF_CLOSE, READ]
    yield "two requests, half-closed", [track("h1") + track("h2"), HALF_CLOSE, READ, READ]
    yield "a client that hangs up after its body", [track("hung up"), WAIT, HANG_UP]
    yield "a client that hangs up in its body", [track("never")[:-3], PAUSE, HANG_UP]

    length = f"Content-Length: {len(EVENT % b'e1')}"
    expect = head("POST", TRACK, KEYED, "Expect: 100-continue", length)
    yield "Expect", [expect, READ, EVENT % b"e1", READ, track("e3"), READ]
    yield "Expect with the body", [expect + EVENT % b"e2", READ, track("e4"), READ]
    refusal = head("POST", TRACK, wrong[1], "Expect: 100-continue", length)
    yield "Expect and a wrong key", [refusal, READ]
    yield "Expect with the body and a wrong key", [refusal + EVENT % b"e5", READ, track("e6"), READ]
    yield (
        "Expect of an old client",
        [
            head("POST", TRACK, KEYED, "Expect: 100-continue", length, version="1.0")
            + EVENT % b"e7",
            READ,
        ],
    )
    yield (
        "Expect for another method",
        [head("GET", "/healthz", "Expect: 100-continue", "Content-Length: 3"), READ],
    )

    pipeline = [track(f"p{n}") for n in range(3)]
    yield "a pipeline", [b"".join(pipeline), READ, READ, READ]
    bad = head("POST", TRACK, wrong[1], "Content-Length: 2") + b"{}"
    yield "a pipeline with a refusal", [track("p4") + bad + track("p5"), READ, READ, READ]
    yield (
        "a pipeline of all kinds",
        [
            head("GET", "/healthz")
            + head("HEAD", "/healthz")
            + head("OPTIONS", TRACK)
            + head("GET", "/nothing")
            + track("p6"),
            READ,
            READ_HEAD,
            READ,
            READ,
            READ,
        ],
    )
    yield "a pipeline that ends", [track("p7", "Connection: close") + track("p8"), READ]
    yield "an old client", [head("GET", "/healthz", version="1.0"), READ]
    yield (
        "an old client that stays",
        [head("GET", "/healthz", "Connection: keep-alive", version="1.0"), READ, track("p9"), READ],
    )

    for sent in ("from-client", "short", "not harmless!", "x" * 65, "a.b_c-123"):
        yield f"the request id {sent}", [track(f"i{len(sent)}", f"X-Request-Id: {sent}"), READ]
        yield (
            f"an error with the request id {sent}",
            [head("GET", "/nothing", f"X-Request-Id: {sent}"), READ],
        )
    yield "from a page", [track("o1", SHOP), READ]
    yield "from an odd origin", [track("o2", "Origin: a b"), READ]
    yield "no host", [b"GET /healthz HTTP/1.1\r\n\r\n", READ]
    yield "no host, an old client", [b"GET /healthz HTTP/1.0\r\n\r\n", READ]
    yield "two hosts", [head("GET", "/healthz", "Host: other"), READ]
    yield "a bad host", [b"GET /healthz HTTP/1.1\r\nHost: a b\r\n\r\n", READ]
    yield "many headers", [head("GET", "/healthz", *["X: y"] * 101), READ]
    yield "many arguments", [head("GET", "/healthz?" + "&" * 1000), READ]
    yield "no HTTP", [b"\x16\x03\x01\x02\0\x01\0", READ]

    settings = f"/v1/projects/{KEY}/settings"
    for path in (settings, "/sourceConfig", "/sourceConfig/"):
        yield f"GET {path}", [head("GET", path, KEYED), READ]
        yield f"GET {path} from a page", [head("GET", path, KEYED, SHOP), READ]
        yield f"HEAD {path}", [head("HEAD", path, KEYED), READ_HEAD]
        yield f"GET {path} again", [head("GET", path, KEYED, "If-None-Match: *"), READ]
        yield f"GET {path} of another time", [head("GET", path, KEYED, 'If-None-Match: "a"'), READ]
    yield "settings of no key", [head("GET", "/v1/projects/nope/settings"), READ]
    yield "settings of bytes", [head("GET", "/v1/projects/\xff/settings"), READ]
    yield "settings of escaped bytes", [head("GET", "/v1/projects/%ff%20/settings"), READ]
    yield "source config without a key", [head("GET", "/sourceConfig/"), READ]
    for path in ("/engage.js", "/openapi.json", "/docs"):
        yield f"HEAD {path}", [head("HEAD", path), READ_HEAD]
        yield f"HEAD {path} compressed", [head("HEAD", path, "Accept-Encoding: gzip"), READ_HEAD]
        yield f"GET {path} again", [head("GET", path, "If-None-Match: *"), READ]

    yield "subscriptions", [post(SUBSCRIPTIONS, b"{}", method="PUT"), READ]
    yield "subscriptions, 411", [head("PUT", SUBSCRIPTIONS), READ]
    yield "subscriptions, 415", [post(SUBSCRIPTIONS, b"", wrong[0], method="PUT"), READ]
    yield "an unknown provider", [post("/api/public/webhooks/nope", b"{}"), READ]
    yield "an unknown provider, GET", [head("GET", "/api/public/webhooks/nope"), READ]
    yield "a webhook of nobody", [post(HOOK, b"{}"), READ]
    yield "a webhook, 411", [head("POST", HOOK), READ]
    yield "a webhook, 415", [post(HOOK, b"{}", wrong[0]), READ]


def _origins() -> Iterator[tuple[str, Sequence[bytes | str]]]:
    """Yield requests for a server that allows one origin."""
    for line in (SHOP, EVIL):
        for path in (TRACK, "/healthz", "/nothing", HOOK, "/sourceConfig/"):
            yield f"preflight {path}, {line}", [head("OPTIONS", path, line, *PREFLIGHT), READ]
            yield f"OPTIONS {path}, {line}", [head("OPTIONS", path, line), READ]
            yield f"GET {path}, {line}", [head("GET", path, line), READ]
        yield f"an event, {line}", [track("o", line), READ]
    yield "no origin", [track("o3"), READ]
    yield "settings", [head("GET", "/sourceConfig/", KEYED), READ]


def _slow() -> Iterator[tuple[str, Sequence[bytes | str]]]:
    """Yield requests for a server with short time limits."""
    yield "408", [head("POST", TRACK, KEYED, "Content-Length: 9") + b"{}", READ]
    yield "408 of a page", [head("POST", TRACK, KEYED, SHOP, "Content-Length: 9") + b"{}", READ]
    yield "408 in chunks", [head("POST", TRACK, KEYED, CHUNKED) + b"9\r\n{}", READ]
    yield "408 of a webhook", [head("POST", SUBSCRIPTIONS, "Content-Length: 9"), READ]
    yield "408 after 404", [head("POST", "/nothing", "Content-Length: 9"), READ]
    yield "408 in the head", [head("POST", TRACK)[:-2], READ]


def _events(name: str) -> Iterator[tuple[str, Sequence[bytes | str]]]:
    """Yield a few requests for a server that is not in its usual state."""
    yield "an event", [track(f"{name} 1"), READ]
    yield "an event of a page", [track(f"{name} 2", SHOP), READ]
    yield "a pipeline", [track(f"{name} 3") + track(f"{name} 4"), READ, READ]
    yield ("an old client", [head("GET", "/readyz", "Connection: keep-alive", version="1.0"), READ])
    yield "alive", [head("GET", "/healthz"), READ]
    yield "ready", [head("GET", "/readyz"), READ]
    yield "a wrong key", [head("POST", TRACK, "Authorization: x", "Content-Length: 1") + b"1", READ]
    yield "subscriptions", [post(SUBSCRIPTIONS, b"{}", method="PUT"), READ]


def _new_keys() -> Iterator[tuple[str, Sequence[bytes | str]]]:
    """Yield requests with keys that the store has and the server has not read."""

    def line(number: int) -> str:
        return f"Authorization: Basic NEW-KEY-{number}"

    body = EVENT % b"new"
    length = f"Content-Length: {len(body)}"
    yield "a new key", [head("POST", TRACK, line(0), length) + body, READ]
    yield "the body later", [head("POST", TRACK, line(1), length), PAUSE, body, READ]
    yield "half-closed", [head("POST", TRACK, line(2), length) + body, HALF_CLOSE, READ]
    yield "hung up", [head("POST", TRACK, line(3), length) + body, WAIT, HANG_UP]
    expect = head("POST", TRACK, line(4), "Expect: 100-continue", length)
    yield "expect", [expect, READ, body, READ]
    yield "in the query", [head("POST", f"{TRACK}?writeKey=NEW-KEY-5", length) + body, READ]
    named = b'{"userId":"u","event":"E","messageId":"inside","writeKey":"NEW-KEY-6"}'
    yield "in the body", [head("POST", TRACK, "Content-Length: NAMED") + named, READ]
    yield "settings", [head("GET", "/v1/projects/NEW-KEY-7/settings"), READ]
    yield "source config", [head("GET", "/sourceConfig/", line(8)), READ]
    pair = head("POST", TRACK, line(9), length) + body
    yield "a pipeline", [pair + pair, READ, READ]
    yield (
        "wrong in the end",
        [
            head("POST", TRACK, "Authorization: Basic bm9wZTo=", length),
            PAUSE,
            body + track("after"),
            READ,
            READ,
        ],
    )
    yield "truncated", [head("POST", TRACK, line(10), length) + body[:-1], HALF_CLOSE, READ]


GROUPS: Final[Mapping[str, Group]] = {
    "usual": Group(dict(_usual())),
    "origins": Group(
        dict(_origins()), config_extra='[cors]\norigins = ["https://shop.example.com"]\n'
    ),
    "slow": Group(dict(_slow()), server="request_timeout = 0.4"),
    "crash": Group(dict(_events("crash")), before="crash"),
    "storage": Group(dict(_events("storage")), before="no storage"),
    "drain": Group(dict(_events("drain")), before="drain"),
    "small": Group(
        {
            "a body over its limit": [head("POST", TRACK, KEYED, "Content-Length: 1001"), READ],
            "chunks over their limit": [
                head("POST", TRACK, KEYED, CHUNKED) + chunks(b" " * 1001),
                READ,
            ],
            "chunks over their limit later": [
                head("POST", TRACK, KEYED, CHUNKED),
                PAUSE,
                chunks(b" " * 1001),
                READ,
            ],
            "chunks over their limit and a wrong key": [
                head("POST", TRACK, "Authorization: x", CHUNKED) + chunks(b" " * 1001),
                READ,
            ],
            "subscriptions over their limit": [
                head("PUT", SUBSCRIPTIONS, CHUNKED) + chunks(b" " * 1001),
                READ,
            ],
        },
        config_extra="[limits]\nbody_bytes = 1000\nevent_bytes = 900\n",
    ),
    "new keys": Group(dict(_new_keys()), before="new keys"),
}
