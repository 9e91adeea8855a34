# SPDX-License-Identifier: Apache-2.0
"""PUBLIC: the hooks, on one page.

A plugin implements any of them with ``@engage.api.hookimpl`` and calls ``register`` once for each
thing that it brings. Names are lower case, ``[a-z0-9-]``, and unique in the whole installation.

Deliberately no hooks: authentication, decoding, the bodies of answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

from engage.api import OptionsSchema as OptionsSchema  # importable from here too

if TYPE_CHECKING:
    import click

    from engage.api import (
        ObserverFactory,
        ProviderFactory,
        Register,
        StorageFactory,
        TransformFactory,
    )

hookspec = pluggy.HookspecMarker("engage")


@hookspec
def engage_register_storage(register: Register[StorageFactory]) -> None:
    """Bring a storage, selected by ``[storage] backend = "<name>"``.

    :param register: ``register(name, factory, options_schema)``; ``[storage.<name>]`` are the
        options, validated before ``factory`` gets them.
    """


@hookspec
def engage_register_webhook(register: Register[ProviderFactory]) -> None:
    """Bring a webhook provider, reached at ``/api/public/webhooks/<name>``.

    :param register: ``register(name, factory, options_schema)``; ``[workspaces.webhooks.<name>]``
        are the options, validated before ``factory`` gets them, once for each such workspace.
    """


@hookspec
def engage_register_transform(register: Register[TransformFactory]) -> None:
    """Bring a transform, run for every event in the order of ``[[transforms]]`` in the config.

    :param register: ``register(name, factory, options_schema)``.
    """


@hookspec
def engage_register_observer(register: Register[ObserverFactory]) -> None:
    """Bring an observer, told of what is durable when ``[observers.<name>]`` is in the config.

    :param register: ``register(name, factory, options_schema)``.
    """


@hookspec
def engage_register_commands(cli: click.Group) -> None:
    """Add subcommands to ``engage``.

    :param cli: the command group; ``cli.command()`` as usual in click. A name that exists already
        is an error.
    """
