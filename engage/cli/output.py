# SPDX-License-Identifier: Apache-2.0
"""What commands print: lines, tables, JSON, a progress bar, and why they failed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Final, Self

import click

from engage.api import MAX_TIME, render_time
from engage.config.schema_check import SettingsError
from engage.monitoring.visible import visible as safe

__all__ = [
    "CommandFailed",
    "Progress",
    "discard_output",
    "one_line",
    "plural",
    "print_cells",
    "print_counts",
    "print_json",
    "print_table",
    "safe",
    "shown_time",
    "warn",
]


def shown_time(milliseconds: int) -> str:
    """Return a stored time in RFC 3339. One that another program wrote may be out of range."""
    return render_time(max(0, min(milliseconds, MAX_TIME)))


def one_line(text: str) -> str:
    """Return a client's text in one line, without anything that a terminal would interpret."""
    return safe(" ".join(text.split()))


def plural(count: int, noun: str) -> str:
    """Return a number with its noun in singular or plural."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def warn(text: str) -> None:
    """Print a line on standard error, which does not end the command."""
    click.echo(f"engage: {safe(text)}", err=True)


def print_json(document: bytes) -> None:
    """Print JSON in one line, or in several: a terminal gets nothing that it would interpret."""
    terminal = sys.stdout.isatty()
    click.echo(safe(document.decode(), lines=True) if terminal else document)


def print_cells(*cells: str) -> None:
    """Print a row in one line: with spaces on a terminal, otherwise with tabs."""
    click.echo((" " if sys.stdout.isatty() else "\t").join(map(safe, cells)))


def print_counts(what: str, numbers: Mapping[str, int], *, colour: str | None = None) -> None:
    """Print numbers of something: for a person in a terminal, and for a program elsewhere.

    :param colour: of its name.
    """
    if sys.stdout.isatty():
        listed = ", ".join(f"{number:,} {name}" for name, number in numbers.items())
        click.echo(f"\r\x1b[K{click.style(what, bold=True, fg=colour)}: {listed}")
    else:
        click.echo("\t".join([what, *(f"{name}={n}" for name, n in numbers.items())]))


def print_table(columns: Sequence[str], table: Iterable[Iterable[str]]) -> None:
    """Print rows: in columns on a terminal, otherwise with tabs and without a head."""
    rows = [[safe(cell) for cell in row] for row in table]
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(row))
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for number, row in enumerate((list(columns), *rows)):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.secho("  ".join(cells).rstrip(), bold=number == 0)


def discard_output() -> None:
    """Redirect output that cannot be written to the null device.

    Otherwise Python would try to write it again at exit, and fail with status 120.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class CommandFailed(click.ClickException):
    """A command failed: exit status 1, and one line for each problem."""

    exit_code = 1

    def __init__(self, error: Exception) -> None:
        problems = error.problems if isinstance(error, SettingsError) else (_message(error),)
        self.lines = [one_line(problem) for problem in problems]
        super().__init__(self.lines[0])

    def show(self, file: IO[Any] | None = None) -> None:
        """Write the lines to standard error."""
        for line in self.lines:
            click.echo(f"engage: {line}", file=file, err=True)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return f"{place}{error.strerror}"
    return str(error)


_WIDTH: Final = 30


class Progress:
    """A bar that is shown if standard error is a terminal and the work takes over a second.

    :param noun: the counted things, in the plural.
    :param shown: whether to show the bar at all.
    """

    def __init__(self, noun: str, *, shown: bool = True) -> None:
        self._noun = noun
        self._on = shown and sys.stderr.isatty()
        self._started = self._shown = time.monotonic()
        self._drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def show(self, count: int, fraction: float | None = None, *, noun: str | None = None) -> None:
        """Show the progress. It is cheap enough to call for each record.

        :param count: the number of records so far.
        :param fraction: the part of the work that is done, 0 to 1; ``None`` if it is unknown.
        :param noun: the counted things from now on. The rate begins anew with others.
        """
        if not self._on:
            return
        now = time.monotonic()
        if noun is not None and noun != self._noun:
            self._noun, self._started = noun, now
        if now - self._started < 1 or now - self._shown < 0.1:
            return
        self._shown, self._drawn = now, True
        rate = count / (now - self._started)
        self._draw(f"{count:,} {self._noun}, {rate:,.0f}/s", fraction)

    def say(self, step: str, count: int = 0) -> None:
        """Show what is done at the moment, and for how long the work has gone on.

        :param count: how many things of it are done; 0: that is not shown.
        """
        if self._on:
            seconds = time.monotonic() - self._started
            self._drawn = True
            self._draw(f"{step}{f': {count:,}' if count else ''} ({seconds:.0f} s)")

    def _draw(self, text: str, fraction: float | None = None) -> None:
        if fraction is not None:
            full = round(_WIDTH * min(1.0, max(0.0, fraction)))
            text = f"[{'#' * full}{'.' * (_WIDTH - full)}] {100 * fraction:3.0f} %  {text}"
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()
