# SPDX-License-Identifier: Apache-2.0
"""Commands of ``engage``, run in the process of the test."""

from __future__ import annotations

from typing import Any
from unittest import mock

from click.testing import CliRunner, Result

from engage.cli import instance, main
from engage.config import Config
from engage.registry import Registry, load_plugins
from support.exports import registry


def run(*arguments: object, text: str | None = None, plugins: Registry | None = None) -> Result:
    """Run ``engage``.

    The installed plugins are not loaded again, which takes most of the time of a command.

    :param text: what the command reads from standard input.
    :param plugins: instead of those that are installed.
    """

    def load(config: Config | None, **options: Any) -> Registry:
        if config is not None and config.plugins.files:
            return load_plugins(config, **options)
        return plugins or registry()

    with mock.patch.object(instance, "load_plugins", load):
        return CliRunner().invoke(main, [*map(str, arguments)], input=text, prog_name="engage")
