# SPDX-License-Identifier: Apache-2.0
"""PUBLIC: all hooks.

A plugin implements any of them with ``@engage.api.hookimpl``, and calls ``register`` once for each
thing that it provides. Names are lower case, ``[a-z0-9-]``, and unique in an installation.

Authentication, decoding and the bodies of answers have no hooks, deliberately.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

from engage.api import OptionsSchema as OptionsSchema  # importable from here too

if TYPE_CHECKING:
    import click

    from engage.api import (
        LogFactory,
        ObserverFactory,
        ProviderFactory,
        Register,
        TransformFactory,
    )
    from engage.store.facade import StorageFactory

hookspec = pluggy.HookspecMarker("engage")


@hookspec
def engage_register_storage(register: Register[StorageFactory]) -> None:
    """Register a storage, which ``[storage] backend = "<name>"`` selects.

    :param register: ``register(name, factory, options_schema)``; the options are
        ``[storage.<name>]``, validated before ``factory`` is called.
    """


@hookspec
def engage_register_log(register: Register[LogFactory]) -> None:
    """Register a log in front of the storage, which ``[log] backend = "<name>"`` selects.

    :param register: ``register(name, factory, options_schema)``; the options are ``[log.<name>]``,
        validated before ``factory`` is called.
    """


@hookspec
def engage_register_webhook(register: Register[ProviderFactory]) -> None:
    """Register a webhook provider, whose URL is ``/api/public/webhooks/<name>``.

    :param register: ``register(name, factory, options_schema)``; the options are
        ``[workspaces.webhooks.<name>]``, validated before ``factory`` is called. It is called once
        for each workspace that has them.
    """


@hookspec
def engage_register_transform(register: Register[TransformFactory]) -> None:
    """Register a transform. Transforms run for every event, in the order of ``[[transforms]]``.

    :param register: ``register(name, factory, options_schema)``.
    """


@hookspec
def engage_register_observer(register: Register[ObserverFactory]) -> None:
    """Register an observer, which ``[observers.<name>]`` enables; it receives durable events.

    :param register: ``register(name, factory, options_schema)``.
    """


@hookspec
def engage_register_commands(cli: click.Group) -> None:
    """Add subcommands to ``engage``.

    :param cli: the command group; add commands with ``cli.command()``, as usual in click. Reusing a
        name is an error.
    """
