# SPDX-License-Identifier: Apache-2.0
"""Commands of ``engage``, run in the process of the test."""

from __future__ import annotations

from click.testing import CliRunner, Result

from engage.cli import main


def run(*arguments: object, text: str | None = None) -> Result:
    """Run ``engage``.

    :param text: what the command reads from standard input.
    """
    return CliRunner().invoke(main, [*map(str, arguments)], input=text, prog_name="engage")
