# SPDX-License-Identifier: Apache-2.0
"""PUBLIC: the hooks, on one page.

A plugin implements any of them with ``@engage.api.hookimpl`` and calls ``register`` once for each
thing that it brings. Names are lower case, ``[a-z0-9-]``, and unique in the whole installation.

Deliberately no hooks: authentication, decoding, the bodies of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import click

    from engage.api import ObserverFactory, ProviderFactory, StorageFactory, TransformFactory

hookspec = pluggy.HookspecMarker("engage")

#: A JSON Schema (draft 2020-12) of a plugin's options, as a decoded object.
OptionsSchema = Mapping[str, Any]


@hookspec
def engage_register_storage(
    register: Callable[[str, StorageFactory, OptionsSchema], None],
) -> None:
    """Bring a storage, selected by ``[storage] backend = "<name>"``.

    :param register: ``register(name, factory, options_schema)``; ``[storage.<name>]`` are the
        options, validated before ``factory`` gets them.
    """


@hookspec
def engage_register_webhook(
    register: Callable[[str, ProviderFactory, OptionsSchema], None],
) -> None:
    """Bring a webhook provider, reached at ``/api/public/webhooks/<name>``.

    :param register: ``register(name, factory, options_schema)``; ``[workspaces.webhooks.<name>]``
        are the options, validated before ``factory`` gets them, once for each such workspace.
    """


@hookspec
def engage_register_transform(
    register: Callable[[str, TransformFactory, OptionsSchema], None],
) -> None:
    """Bring a transform, run for every event in the order of ``[[transforms]]`` in the config.

    :param register: ``register(name, factory, options_schema)``.
    """


@hookspec
def engage_register_observer(
    register: Callable[[str, ObserverFactory, OptionsSchema], None],
) -> None:
    """Bring an observer, told of what is durable when ``[observers.<name>]`` is in the config.

    :param register: ``register(name, factory, options_schema)``.
    """


@hookspec
def engage_register_commands(cli: click.Group) -> None:
    """Add subcommands to ``engage``.

    :param cli: the command group; ``cli.command()`` as usual in click. A name that exists already
        is an error.
    """
