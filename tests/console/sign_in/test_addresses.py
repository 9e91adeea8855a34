# SPDX-License-Identifier: Apache-2.0
"""Where the console is."""

from __future__ import annotations

from typing import Any

from engage.config import ConsoleConfig
from engage.console.sign_in.addresses import Addresses
from support.each import each


@each(
    "config, url",
    [
        *(({}, "http://127.0.0.1:8081"), ({"host": "0.0.0.0"}, "http://127.0.0.1:8081")),
        *(({"host": "::"}, "http://[::1]:8081"), ({"host": "::1"}, "http://[::1]:8081")),
        ({"host": "console.lan"}, "http://console.lan:8081"),
        ({"public_url": "https://ops.example.com/engage"}, "https://ops.example.com/engage"),
    ],
)
def test_the_url_of_the_console(config: dict[str, Any], url: str) -> None:
    assert Addresses(ConsoleConfig(**config), 8081).url == url
