# SPDX-License-Identifier: Apache-2.0
"""The browser SDKs under test: how a page uses each."""

from __future__ import annotations

import base64
import dataclasses

from support.server_process import KEY, Server


@dataclasses.dataclass(frozen=True)
class Kind:
    """One way to use a browser SDK."""

    name: str
    bundle: str
    #: JavaScript that sets ``window.sdk``; HOST, ADDRESS (no scheme), KEY, BASIC are filled in.
    start: str
    #: JavaScript of the calls.
    calls: str
    #: (type, name) of what must be stored.
    expected: tuple[tuple[str, str | None], ...]
    #: One more call, made just before the browser leaves the page.
    last: str = 'sdk.track("Last");'
    retries: bool = True

    def page(self, engage: Server, key: str = KEY) -> str:
        start = self.start
        for name, value in {
            "HOST": engage.url,
            "ADDRESS": engage.url.removeprefix("http://"),
            "KEY": key,
            "BASIC": "Basic " + base64.b64encode(f"{key}:".encode()).decode(),
        }.items():
            start = start.replace(name, value)
        return (
            "<!doctype html><html lang=en><head><meta charset=utf-8><title>Shop</title></head>"
            f'<body><script src="/{self.bundle}.js"></script><script>{start}</script></body></html>'
        )


FIVE_CALLS = """
sdk.identify("u-1", {email: "a@b.co", n: 1});
sdk.track("Order Completed", {revenue: 12.5, "a.b": [1, {c: null}], text: "ünï ✓"});
sdk.page("Docs", "Home", {x: 1});
sdk.group("g-1", {name: "Unit"});
sdk.alias("u-2", "u-1");
"""
FIVE = (
    *(("identify", None), ("track", "Order Completed"), ("page", "Home"), ("group", None)),
    ("alias", None),
)
SEGMENT = """
window.sdk = AnalyticsBrowser.load(
  {writeKey: "KEY", cdnURL: "HOST"},
  {integrations: {"Segment.io": {apiHost: "ADDRESS/v1", protocol: "http" MORE}}});
"""
RUDDER = """
window.sdk = new RudderAnalytics();
sdk.load("KEY", "HOST", {configUrl: "HOST", sendAdblockPage: false MORE});
"""
BATCHING = ', deliveryStrategy: {strategy: "batching", config: {size: 10, timeout: 500}}'
BEACON = ", useBeacon: true, beaconQueueOptions: {maxItems: 5, flushQueueInterval: 500}"

KINDS = [
    Kind("segment", "segment", SEGMENT.replace("MORE", ""), FIVE_CALLS, FIVE),
    Kind("segment-batching", "segment", SEGMENT.replace("MORE", BATCHING), FIVE_CALLS, FIVE),
    Kind("rudder", "rudder", RUDDER.replace("MORE", ""), FIVE_CALLS, FIVE),
    Kind(
        "rudder-beacon",
        "rudder",
        RUDDER.replace("MORE", BEACON),
        FIVE_CALLS,
        FIVE,
        # The answer to a beacon cannot be read.
        retries=False,
    ),
    Kind(
        "dittofeed",
        "dittofeed",
        'window.sdk = DittofeedSdk; DittofeedSdk.init({writeKey: "BASIC", host: "HOST"});',
        """
sdk.identify({userId: "u-1", traits: {email: "a@b.co", n: 1}});
sdk.track({userId: "u-1", event: "Order Completed",
           properties: {revenue: 12.5, "a.b": [1, {c: null}], text: "ünï ✓"}});
sdk.page({userId: "u-1", name: "Home", properties: {x: 1}});
sdk.screen({userId: "u-1", name: "Start"});
""",
        (
            ("identify", None),
            ("track", "Order Completed"),
            ("page", "Home"),
            ("screen", "Start"),
        ),
        last='sdk.track({userId: "u-1", event: "Last"}); sdk.flush();',
        retries=False,
    ),
]
