# SPDX-License-Identifier: Apache-2.0
"""Runs the console without a server beside it, and makes links and passwords for commands."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from engage.api import EngageError
from engage.console.sign_in.addresses import Addresses
from engage.console.sign_in.links import hash_of, link_record, link_url, new_token
from engage.console.sign_in.passwords import MIN_LENGTH, hash_password
from engage.console.sign_in.sessions import new_secret
from engage.monitoring import logs
from engage.server.announcement import announce, token_for_terminal
from engage.server.serve import secrets_of
from engage.server.worker import handle_signals

if TYPE_CHECKING:
    from engage.config import Config, ConsoleConfig
    from engage.registry import Registry
    from engage.store.facade import Storage

__all__ = ["end_sessions", "make_link", "password_setting", "serve_console"]

_log = logging.getLogger(__name__)


def serve_console(config: Config, registry: Registry) -> int:
    """Run the console until a signal ends it; a second signal ends it at once.

    :return: the exit status: 1 if the console cannot start; one line in the log gives the reason.
    """
    secrets = tuple(secrets_of(config, registry))
    logs.configure(config.logging.level, config.logging.format, secrets=secrets)
    try:
        return asyncio.run(_run(config, registry))
    except (EngageError, OSError) as error:
        _log.error("the console cannot start: %s", error)
        return 1
    finally:
        logs.flush()


async def make_link(settings: ConsoleConfig, records: Storage, now: int) -> str:
    """Store a new one-time link, and return its URL.

    :param now: milliseconds since 1970 UTC.
    :raises StorageUnavailable: if the store does not answer.
    """
    token = new_token()
    await records.put_record(link_record(hash_of(token), now), expected_version=0)
    return link_url(settings, Addresses(settings, settings.port).url, token)


async def end_sessions(records: Storage, now: int) -> None:
    """End all sessions, on every console of a store.

    :param now: milliseconds since 1970 UTC.
    :raises StorageUnavailable: if the store does not answer.
    """
    await records.put_record(new_secret(now))


def password_setting(password: str) -> str:
    """Return the value of ``console.password`` for a password.

    :raises EngageError: if the password is too short.
    """
    if len(password) < MIN_LENGTH:
        raise EngageError(f"the password must have at least {MIN_LENGTH} characters")
    return hash_password(password)


async def _run(config: Config, registry: Registry) -> int:
    # The commands that only make a link need no pages.
    from engage.console.process import ConsoleProcess

    token = token_for_terminal(config)
    process = ConsoleProcess(
        config,
        registry,
        link_hash=None if token is None else hash_of(token),
        ready=lambda url, available: announce(config, url, token, available=available),
    )
    handle_signals(process.stop)
    return await process.run()
