# SPDX-License-Identifier: Apache-2.0
"""Tells the person who starts the server about the console."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Final

from engage.console.sign_in.links import link_url, new_token

if TYPE_CHECKING:
    from engage.config import Config

__all__ = ["announce", "token_for_terminal"]

_log = logging.getLogger(__name__)

#: How to sign in, for a log.
SIGN_IN: Final = "engage console-link prints a one-time link"


def token_for_terminal(config: Config) -> str | None:
    """Return the token of a one-time link that may be shown, or ``None``.

    It is shown on a terminal only: others read logs, and keep them.
    """
    if config.logging.format == "json" or not sys.stderr.isatty():
        return None
    return new_token()


def announce(config: Config, url: str, token: str | None, *, available: bool) -> None:
    """Report where the console is and how to sign in.

    :param available: whether the storage has answered; without it, no one can sign in.
    """
    if token is None:
        _log.info("console", extra={"url": url, "signIn": SIGN_IN})
        return
    assert config.console is not None
    waits = "" if available else "  (as soon as the storage answers, which it does not now)\n"
    print(
        "\nengage: open this link; it signs you in to the console, once, within 10 minutes:\n\n"
        f"  {link_url(config.console, url, token)}\n{waits}",
        file=sys.stderr,
        flush=True,
    )
