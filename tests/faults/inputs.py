# SPDX-License-Identifier: Apache-2.0
"""Inputs for a server: requests of all operations, changed at random. A number makes one."""

from __future__ import annotations

import base64
import copy
import gzip
import hashlib
import json
import random
import zlib
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, NamedTuple
from urllib.parse import quote_from_bytes, urlencode

from engage.handlers.operations import OPERATIONS
from support.http_corpus import GROUPS as CORPUS
from support.preferences import GROUPS, members
from support.provider_senders import SENDERS, webhooks_table
from support.providers import MAPPINGS
from support.server_process import KEY

#: One of these takes the place of a value.
VALUES: Sequence[Any] = (
    *(None, True, False, 0, -1, 1.5, 1e308, float("nan"), float("inf"), 2**53 + 1, 2**63, 10**30),
    *("", " ", "a" * 300, "\0", "\ud800", "é\u202e", "\U0001f680" * 80, "x" * 40_000),
    *("x" * 110_000, "$a.b", "2026-01-01T00:00:00Z", "9999-12-31T23:59:59.999+14:00", "0000-00-00"),
    *("1700000000000", [], {}, [[]], [None] * 300, {"": ""}, {"$where": 1}),
    *({"__proto__": {"a": 1}}, {"a": {"b": 1}}, {str(number): number for number in range(600)}),
)
NAMES: Sequence[str] = (
    *("userId", "anonymousId", "messageId", "traits", "context", "type", "timestamp", "sentAt"),
    *("", "$set", "a.b", "\0", "__proto__", "x" * 300, "integrations", "writeKey", "batch", "id"),
)
#: Bytes that are inserted into requests.
TOKENS: Sequence[bytes] = (
    *(b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\0", b" ", b"\t", b":", b"%00", b"%zz", b"\xff"),
    *(b"\x80", b"HTTP/1.1", b"HTTP/2.0", b"HTTP/1.0", b"Transfer-Encoding: chunked\r\n", b"GET "),
    *(b"//", b"?", b"Content-Length: 5\r\n", b"Content-Length: 18446744073709551616\r\n"),
    *(b"Content-Length: -1\r\n", b"Transfer-Encoding: gzip, chunked\r\n"),
    *(b"Expect: 100-continue\r\n", b"Host: b\r\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n"),
    *(b"5;a=b\r\nabcde\r\n", b"X: " + b"y" * 9000 + b"\r\n", b"[" * 3000, b"&=;"),
    *(b"Upgrade: h2c\r\n", b"Connection: close\r\n", b" folded\r\n", b"Origin: null\r\n"),
    b"\xef\xbb\xbf",
)
HEADERS: Sequence[str] = (
    *("Origin: https://shop.example.com", "Origin: null", "Sec-Fetch-Mode: cors"),
    *("X-Strict-Mode: 1", "Idempotency-Key: k1", "Idempotency-Key: \xff", "X-Request-Id: a b"),
    *("X-Request-Id: from-client", "Accept-Encoding: gzip", "Accept-Language: de, ar;q=0.5"),
    *("Content-Type: text/plain", "Content-Type: application/json; charset=utf-16"),
    *("Content-Type: multipart/form-data", "X: \x80", "X-Forwarded-For: 1.2.3.4"),
    *("User-Agent: " + "u" * 600, "If-None-Match: *", "Range: bytes=0-1", "Cookie: a=b"),
    *("Expect: 100-continue", "Referer: https://a.example/?q=\xe9", "TE: trailers"),
)
#: Further keys, each with rules.
KEYS = ("k-of-a-shop", "k-for-tracks", "k-disabled", "k-limited", "k-of-a-server", "k-verifying")
_SERVER_KEY = hashlib.sha256(b"k-of-a-server").hexdigest()
#: The workspaces' keys and webhooks beside :data:`~support.server_process.KEY`.
CONFIG = f"""
[[workspaces.write_keys]]
id = "shop"
key = "k-of-a-shop"
origins = ["https://shop.example.com"]
[[workspaces.write_keys]]
id = "tracks"
key = "k-for-tracks"
operations = ["track"]
[[workspaces.write_keys]]
id = "disabled"
key = "k-disabled"
disabled = true
[[workspaces.write_keys]]
id = "limited"
key = "k-limited"
rate = {{ events_per_second = 1 }}
[[workspaces.write_keys]]
id = "server"
kind = "server"
sha256 = "{_SERVER_KEY}"
{webhooks_table()}
{GROUPS}
[[workspaces]]
id = "other"
verify_identity = "required"
identity_secret = "a secret of other"
quota = {{ events_per_day = 20 }}
[[workspaces.write_keys]]
id = "website"
key = "k-verifying"
{webhooks_table("other", {"segment": SENDERS["segment"]})}
[[transforms]]
name = "redact"
[transforms.options]
keys = ["ssn", "context.ip"]
"""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
PROVIDERS = sorted(SENDERS)


class Input(NamedTuple):
    """What a client sends on a connection."""

    #: What it is about, for the counts.
    kind: str
    data: bytes
    #: The methods of the requests in it, each of which must be answered; ``None`` if it is not
    #: known how many requests a server finds in it.
    methods: Sequence[str] | None
    #: Where the client makes a pause.
    pauses: Sequence[int]
    #: Whether the client says in the end that it sends no more.
    ends: bool


def _examples() -> list[tuple[str, Any]]:
    """Return the examples of the schemas of the payloads: kind and payload."""
    folder = resources.files("engage_schemas").joinpath("payloads")
    found = []
    for operation in OPERATIONS:
        if operation.request not in (None, "*"):
            schema = json.loads(folder.joinpath(f"{operation.request}.json").read_bytes())
            found += [(operation.id, example) for example in schema["examples"]]
    return found


class Inputs:
    """Makes inputs.

    :param now: the time of webhook deliveries, in Unix seconds.
    """

    def __init__(self, seed: int, now: Callable[[], float]) -> None:
        self._seed, self.now = seed, now
        self.examples = _examples()
        self.paths = {operation.id: [*operation.paths] for operation in OPERATIONS}
        parts = [part for group in CORPUS.values() for part in group.cases.values()]
        self.corpus = [b"".join(one for one in part if isinstance(one, bytes)) for part in parts]
        self.mappings = {
            name: [mapping["input"] for mapping in MAPPINGS if mapping["provider"] == name]
            for name in PROVIDERS
        }

    def make(self, number: int) -> Input:
        """Return the input of a number."""
        one = _One(self, random.Random(f"{self._seed}/{number}"))
        pick = one.pick.random()
        if pick < 0.15:
            return one.broken()
        kind, made = "", []
        for _ in range(one.pick.choice((1, 1, 1, 1, 1, 1, 2, 5))):
            made.append(one.request())
            kind = made[0][0]
        data = b"".join(part for _, part, _ in made)
        methods = [method for *_, method in made]
        pauses = []
        if one.pick.random() < 0.04:
            pauses = sorted(one.pick.randrange(len(data) + 1) for _ in range(3))
        unclear = "" in methods
        return Input(kind, data, None if unclear else methods, pauses, unclear)


class _One:
    """Makes one input."""

    def __init__(self, inputs: Inputs, pick: random.Random) -> None:
        self._all, self.pick = inputs, pick

    # ------------------------------------------------------------------------------- payloads
    def payload(self, kind: str, example: Any) -> Any:
        """Return a valid payload with ids of few people."""
        pick = self.pick
        payload = copy.deepcopy(example)
        if not isinstance(payload, dict):
            return payload
        if "batch" in payload:
            events = [one for one in self._all.examples if one[0] in _EVENTS]
            payload["batch"] = [
                {"type": name, **self.payload(name, event)}
                for name, event in pick.choices(events, k=pick.choice((0, 1, 2, 3, 20)))
            ]
        elif kind in _EVENTS:
            payload.pop("type", None)
            for name, share in (("userId", 0.8), ("anonymousId", 0.4), ("messageId", 0.6)):
                if pick.random() < share:
                    few = 50 if name != "messageId" else 3000
                    payload[name] = f"{name[0]}-{pick.randrange(few)}"
        return payload

    def changed(self, document: Any, most: int = 3) -> Any:
        """Return a document with up to ``most`` changes."""
        document = copy.deepcopy(document)
        for _ in range(self.pick.randrange(most + 1)):
            document = self._change(document)
        return document

    def _change(self, document: Any) -> Any:
        pick = self.pick
        places: list[tuple[Any, Any]] = []
        todo = [document] if isinstance(document, dict | list) else []
        while todo:
            one = todo.pop()
            items = one.items() if isinstance(one, dict) else enumerate(one)
            for name, value in list(items):
                places.append((one, name))
                if isinstance(value, dict | list):
                    todo.append(value)
        if not places or pick.random() < 0.03:
            return copy.deepcopy(pick.choice(VALUES))
        owner, name = pick.choice(places)
        value = owner[name]
        what = pick.randrange(7)
        if what < 3:
            owner[name] = copy.deepcopy(pick.choice(VALUES))
        elif what == 3:
            del owner[name]
        elif what == 4:
            other = pick.choice(places)
            try:
                owner[name] = copy.deepcopy(other[0][other[1]])
            except (KeyError, IndexError):
                owner[name] = pick.choice(([value], {"a": value}))
        elif what == 5 and isinstance(owner, dict):
            owner[pick.choice(NAMES)] = copy.deepcopy(value)
        else:
            nested: Any = value
            for _ in range(pick.choice((1, 2, 40, 200))):
                nested = [nested]
            owner[name] = nested
        return document

    def text(self, document: Any) -> bytes:
        """Return a document as JSON, sometimes a wrong one."""
        pick = self.pick
        made = json.dumps(document, ensure_ascii=pick.random() < 0.7)
        data = made.encode("utf-8", "surrogatepass")
        if pick.random() < 0.03:
            data = pick.choice((made.encode("utf-16", "surrogatepass"), b"\xef\xbb\xbf" + data))
        return self.bytes_changed(data, 2) if pick.random() < 0.08 else data

    def bytes_changed(self, data: bytes, most: int) -> bytes:
        """Return bytes with up to ``most`` changes."""
        pick = self.pick
        changed = bytearray(data)
        for _ in range(pick.randint(1, most)):
            start = pick.randrange(len(changed) + 1)
            end = min(len(changed), start + pick.choice((0, 1, 1, 4, 30)))
            what = pick.randrange(5)
            if what == 0:
                changed[start:end] = b""
            elif what == 1:
                changed[start:end] = pick.choice(TOKENS)
            elif what == 2:
                changed[start:start] = changed[start:end] * pick.choice((1, 2, 50))
            elif what == 3:
                changed[start:start] = pick.choice(TOKENS)
            elif start < len(changed):
                changed[start] = pick.randrange(256)
        return bytes(changed)

    # ------------------------------------------------------------------------------- requests
    def broken(self) -> Input:
        """Return bytes that need not be HTTP."""
        pick = self.pick
        data = pick.choice(self._all.corpus)
        if pick.random() < 0.5:
            data += self.request()[1]
        data = self.bytes_changed(data, 5)
        pauses = [pick.randrange(len(data) + 1)] if pick.random() < 0.1 else []
        return Input("broken", data, None, pauses, pick.random() > 0.004)

    def request(self) -> tuple[str, bytes, str]:
        """Return a request: its kind, its bytes and its method; without one if it is unclear."""
        pick = self.pick.random()
        if pick < 0.55:
            return self._event()
        if pick < 0.8:
            return self._webhook()
        if pick < 0.92:
            return self._preferences()
        return self._other()

    def _event(self) -> tuple[str, bytes, str]:
        kind, example = self.pick.choice(self._all.examples)
        payload = self.changed(self.payload(kind, example))
        lines: list[str] = []
        query = ""
        if kind != "subscriptions":
            lines, query = self._key(payload)
        elif self.pick.random() < 0.7 and isinstance(payload, dict):
            signed = members(f"u-{self.pick.randrange(50)}")
            names = {"w": "workspaceId", "i": "identifier", "ik": "identifierKey", "h": "hash"}
            payload |= {names[name]: value for name, value in signed.items()}
            groups = self.pick.sample(("news", "offers", "product", "nothing"), 2)
            payload["changes"] = {group: self.pick.random() < 0.5 for group in groups}
        method = "PUT" if kind == "subscriptions" else "POST"
        path = self.pick.choice(self._all.paths[kind]) + query
        return (kind, *self._sent(method, path, self.text(payload), lines))

    def _key(self, payload: Any) -> tuple[list[str], str]:
        """Return the header and the query with a write key."""
        pick = self.pick.random()
        if pick < 0.86:
            key = KEY if pick < 0.72 else self.pick.choice(KEYS)
            return [f"Authorization: Basic {_base64(key + ':')}"], ""
        if pick < 0.9:
            return [], f"?writeKey={KEY}"
        if pick < 0.94 and isinstance(payload, dict):
            payload["writeKey"] = KEY
            return [], ""
        wrong = ("Authorization: Bearer x", f"Authorization: Basic {_base64('nope:')}", "X: y")
        return [self.pick.choice((*wrong, "Authorization: Basic ===", "Authorization:"))], ""

    def _webhook(self) -> tuple[str, bytes, str]:
        pick = self.pick
        provider = pick.choice(PROVIDERS)
        sender = SENDERS[provider]
        inputs = self._all.mappings[provider]
        payload = sender.payload
        try:
            document = json.loads(payload)
        except ValueError:
            document = None
        if document is not None:
            if inputs and provider not in ("twilio", "shopify") and pick.random() < 0.6:
                document = pick.choice(inputs)
                if isinstance(json.loads(payload), list) and not isinstance(document, list):
                    document = [document]
            payload = self.text(self.changed(document))
        elif pick.random() < 0.6:
            payload = self.bytes_changed(payload, 3)
        target = f"{pick.choice(('/api/public', '/api'))}/webhooks/{provider}"
        if pick.random() < 0.3:
            target += "?workspaceId=" + pick.choice(("acme", "acme", "other", "%ff"))
        now = self._all.now() - pick.choice((0, 0, 0, 0, 0, 0, 0, 10**4))
        options = sender.other if pick.random() < 0.05 else None
        headers, body = sender.deliver(target, now, payload=payload, options=options)
        lines = [f"{name}: {value.decode('latin-1')}" for name, value in headers]
        if pick.random() < 0.05 and lines:
            lines.remove(pick.choice(lines))
        return ("webhook", *self._sent("POST", target, body, lines, encoded=0.02))

    def _preferences(self) -> tuple[str, bytes, str]:
        pick = self.pick
        link = members(
            f"u-{pick.randrange(50)}", expires=pick.choice((None, 2_000_000_000, 1_000_000_000))
        )
        link |= {"s": "news", "lang": "de"} if pick.random() < 0.3 else {}
        if pick.random() < 0.3:
            link[pick.choice((*link, "x"))] = (
                str(pick.choice(VALUES)).encode("utf-8", "replace").decode()[:900]
            )
        path = pick.choice((*self._all.paths["preferences"], *self._all.paths["subscriptions"]))
        target = f"{path}?{urlencode(link)}"
        if pick.random() < 0.05:
            target += "&" + quote_from_bytes(pick.choice(TOKENS)[:200])
        if pick.random() < 0.35:
            return ("preferences", *self._sent("GET", target, None, []))
        boundary = "".join(pick.choices("abc-'", k=pick.choice((1, 8, 70))))
        part = 'Content-Disposition: form-data; name="List-Unsubscribe"\r\n\r\nOne-Click\r\n'
        bodies = {
            b"List-Unsubscribe=One-Click": "application/x-www-form-urlencoded",
            b"shown=news:1+offers:0&group=offers": "application/x-www-form-urlencoded",
            b"unsubscribe_all=1&shown=news:1": "application/x-www-form-urlencoded",
            b"changes[news]=true&changes[offers]=no": "application/x-www-form-urlencoded",
            f"--{boundary}\r\n{part}--{boundary}--\r\n".encode(): (
                f"multipart/form-data; boundary={boundary}"
            ),
        }
        body, content_type = pick.choice(list(bodies.items()))
        if pick.random() < 0.4:
            body = self.bytes_changed(body, 3)
        method = "PUT" if path.endswith("user-subscriptions") else "POST"
        lines = [f"Content-Type: {content_type}"]
        return ("preferences", *self._sent(method, target, body, lines, encoded=0.05))

    def _other(self) -> tuple[str, bytes, str]:
        pick = self.pick
        path = pick.choice(pick.choice(list(self._all.paths.values())))
        path = path.replace("{provider}", pick.choice((*PROVIDERS, "nope", "%00")))
        path = path.replace("{writeKey}", pick.choice((KEY, "nope", "%ff")))
        if pick.random() < 0.2:
            path = pick.choice((path.upper(), path + "/", "//" + path, path + "?a=%zz&b", "*"))
        if not path.startswith("/"):
            return ("other", *self._sent("OPTIONS", path, None, []))
        method = pick.choice(METHODS)
        lines = [f"Authorization: Basic {_base64(KEY + ':')}"] if pick.random() < 0.7 else []
        if method == "OPTIONS":
            lines += ["Origin: https://shop.example.com", "Access-Control-Request-Method: POST"]
        body = self.text({}) if method in ("POST", "PUT", "PATCH") else None
        return ("other", *self._sent(method, path, body, lines))

    def _sent(
        self,
        method: str,
        target: str,
        body: bytes | None,
        lines: list[str],
        *,
        encoded: float = 0.25,
    ) -> tuple[bytes, str]:
        """Return a request as bytes, and its method if a server must answer it once."""
        pick = self.pick
        lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *lines]
        if pick.random() < 0.3:
            lines += pick.sample(HEADERS, pick.randint(1, 3))
        if pick.random() < 0.02:
            lines.append("Connection: close")
        if body is not None and pick.random() < encoded:
            body = self._encoded(body, lines)
        clear = method
        if body is None:
            return "\r\n".join([*lines, "", ""]).encode("latin-1"), clear
        framing = pick.random()
        if framing < 0.72:
            lines.append(f"Content-Length: {len(body)}")
        elif framing < 0.96:
            lines.append("Transfer-Encoding: chunked")
            body = self._chunks(body)
        else:
            clear = ""
            lines.append(
                pick.choice(
                    (
                        f"Content-Length: {len(body) + pick.choice((-1, 1, 9))}",
                        f"Content-Length: +{len(body)}",
                        f"Content-Length: {len(body)}\r\nContent-Length: {len(body)}",
                        f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked",
                        "Transfer-Encoding: chunked, gzip",
                        "X-No-Length: 1",
                    )
                )
            )
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body, clear

    def _encoded(self, body: bytes, lines: list[str]) -> bytes:
        pick = self.pick
        coding = pick.choice(
            ("gzip", "gzip", "gzip", "x-gzip", "deflate", "br", "gzip, gzip", "zz")
        )
        lines.append(f"Content-Encoding: {coding}")
        if "gzip" in coding:
            made = gzip.compress(body, 1, mtime=0)
            what = pick.randrange(12)
            if what == 0:
                return made[: pick.randrange(len(made))]
            if what == 1:
                return self.bytes_changed(made, 2)
            if what == 2:
                return made + gzip.compress(b" " * pick.choice((1, 10**6, 10**7)), 9, mtime=0)
            return made
        return zlib.compress(body) if coding == "deflate" else body

    def _chunks(self, body: bytes) -> bytes:
        pick = self.pick
        made, at = b"", 0
        size = max(1, len(body) // pick.choice((1, 1, 2, 7, 60)))
        while at < len(body):
            part = body[at : at + size]
            more = b";a=b" if pick.random() < 0.1 else b""
            made += b"%x%b\r\n%b\r\n" % (len(part), more, part)
            at += size
        return made + b"0\r\n" + (b"X-Trailer: a\r\n" if pick.random() < 0.1 else b"") + b"\r\n"


_EVENTS = ("identify", "track", "page", "screen", "group", "alias")


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
