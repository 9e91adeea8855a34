# SPDX-License-Identifier: Apache-2.0
"""A file that says up to which event an export has written."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from typing import Final

import orjson

from engage.api import EngageError, ForeignCursor, render_time
from engage.durable import sync_folder

__all__ = ["CursorFile"]

#: Milliseconds after its receipt in which an event takes its place in the order, without a log.
_LATE: Final = 60_000


@dataclasses.dataclass(slots=True)
class CursorFile:
    """The file. Its content is a JSON object.

    :param path: the file; it is replaced, so its folder must be writable.
    """

    path: Path
    cursor: str | None = None
    #: When the events before the cursor were read, in milliseconds since 1970 UTC.
    at: int = 0

    def read(self) -> str | None:
        """Return the cursor; ``None`` if there is no file yet.

        :raises EngageError: if the file cannot be read, or is not one of this kind.
        """
        try:
            stored = orjson.loads(self.path.read_bytes())
            self.cursor, self.at = str(stored["cursor"]), int(stored["at"])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EngageError(f"{self.path} cannot be read: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise EngageError(f"{self.path} has no cursor of `engage export`") from error
        return self.cursor

    def write(self, cursor: str, now: int) -> None:
        """Write a cursor, durably: a crash leaves it, or the one before.

        :param now: milliseconds since 1970 UTC.
        :raises EngageError: if that is not possible.
        """
        if cursor == self.cursor:
            return
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            with new.open("wb") as file:
                file.write(orjson.dumps({"cursor": cursor, "at": now}) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            reason = error.strerror or error
            raise EngageError(f"{self.path} cannot be written: {reason}") from error
        self.cursor, self.at = cursor, now

    def foreign(self, error: ForeignCursor) -> EngageError:
        """Return an error that says how to go on."""
        path = shlex.quote(str(self.path))
        since = render_time(max(0, self.at - _LATE))
        return EngageError(
            f"{self.path}: {error}. Move the file away, and go on with the events since then, some "
            f"of which are written again: engage export events --cursor-file {path} --since {since}"
        )
