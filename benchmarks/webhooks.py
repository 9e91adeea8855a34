# SPDX-License-Identifier: Apache-2.0
"""``make bench``: measures the CPU time of webhook deliveries, compared with a track event.

The server runs in this process and gets one request after the other over a socket. The client's
CPU time is in both figures, so it is not in their difference. ECDSA (sendgrid) and RSA (amazon-ses)
are expensive and unavoidable: their figures are reported but have no budget. The benchmark also
measures how long a large delivery takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.http_client import RawClient
from support.provider_senders import PUBLIC_URL, SENDERS, webhooks_table
from support.server_inprocess import BASIC, Serving, serving

#: The budget: milliseconds of CPU time that a delivery may cost more than a track event.
ADDED = 1.0
#: The budget for a delivery of 1000 events, in seconds.
LARGE = 1.0
#: Providers without a budget.
REPORTED_ONLY = ("amazon-ses", "sendgrid")

Send = Callable[[int], Awaitable[None]]


async def _cost(send: Send, rounds: int) -> float:
    """Return the milliseconds of CPU time of one call: the best of three series."""
    for number in range(20):
        await send(-1 - number)
    best = float("inf")
    for series in range(3):
        start = time.process_time()
        for number in range(rounds):
            await send(series * rounds + number)
        best = min(best, (time.process_time() - start) / rounds * 1000)
    return best


async def _post(client: RawClient, target: str, headers: dict[str, bytes], body: bytes) -> None:
    head = [f"POST {target} HTTP/1.1".encode(), b"Host: localhost"]
    head += [name.encode() + b": " + value for name, value in headers.items()]
    head.append(b"Content-Length: %d" % len(body))
    await client.send(b"\r\n".join([*head, b"", b""]) + body)
    answer = await client.answer()
    if answer.status != 200:
        raise RuntimeError(f"{target}: {answer.status} {answer.body!r}")


async def _large(server: Serving, count: int) -> float:
    """Return the seconds until a delivery of SendGrid with ``count`` events is answered."""
    sender = SENDERS["sendgrid"]
    event = json.loads(sender.payload)[0]
    items = [
        event | {"sg_event_id": f"large-{number}", "email": f"user-{number}@example.com"}
        for number in range(count)
    ]
    target = "/api/public/webhooks/sendgrid"
    headers, body = sender.deliver(target, time.time(), payload=json.dumps(items).encode())
    async with await server.connect() as client:
        start = time.perf_counter()
        await _post(client, target, dict(headers), body)
        return time.perf_counter() - start


async def _measure(rounds: int) -> bool:
    public_url = f'public_url = "{PUBLIC_URL}"\n'
    with tempfile.TemporaryDirectory(prefix="engage-bench-") as folder:
        async with (
            serving(Path(folder), server=public_url, config_extra=webhooks_table()) as server,
            await server.connect() as client,
        ):

            async def track(number: int) -> None:
                body = {"userId": "u", "event": "E", "messageId": f"t{number}"}
                headers = {"Authorization": BASIC.encode()}
                await _post(client, "/v1/track", headers, json.dumps(body).encode())

            base = await _cost(track, rounds)
            print(f"a track event: {base:.3f} ms of CPU time, including the client\n")
            print("| provider | ms of CPU time | difference to track | |")
            print("|---|---|---|---|")
            good = True
            for provider, sender in sorted(SENDERS.items()):
                target = f"/api/public/webhooks/{provider}"
                # Signed once, because the cost of the sender is not measured. The first delivery is
                # stored; all others are compared with it as duplicates.
                headers, body = sender.deliver(target, time.time())

                async def deliver(
                    number: int,
                    target: str = target,
                    headers: dict[str, bytes] = dict(headers),  # noqa: B006
                    body: bytes = body,
                ) -> None:
                    await _post(client, target, headers, body)

                cost = await _cost(deliver, rounds)
                over = cost - base > ADDED and provider not in REPORTED_ONLY
                good = good and not over
                note = (
                    "ECDSA or RSA" if provider in REPORTED_ONLY else "over budget" if over else ""
                )
                print(f"| {provider} | {cost:.3f} | {cost - base:+.3f} | {note} |", flush=True)
            seconds = await _large(server, 1000)
            print(f"\n1000 events of SendGrid in one delivery: {seconds:.3f} s")
            return good and seconds <= LARGE


def main() -> int:
    """Measure and print; return 1 if a figure is over its budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="deliveries per series")
    arguments = parser.parse_args()
    return 0 if asyncio.run(_measure(arguments.rounds)) else 1


if __name__ == "__main__":
    sys.exit(main())
