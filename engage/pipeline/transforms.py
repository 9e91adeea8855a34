# SPDX-License-Identifier: Apache-2.0
"""Runs the transforms, in the order of the config.

Each transform gets the result of the previous one. The result is validated, and its size is checked
again. The message id, workspace, write key, time of arrival and source cannot be changed. If a
transform raises, or returns something that is not an event, the event is refused; it is never
stored untransformed.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from typing import Any

import orjson

from engage.api import DROP, EVENT_TYPES, Event, Transform
from engage.errors import ApiError, Limit, Problem
from engage.pipeline.decode import too_deep
from engage.pipeline.normalise import apply_transformed
from engage.pipeline.validate import Schemas

__all__ = ["Transforms"]

_log = logging.getLogger(__name__)


class Transforms:
    """The transforms that the config enables.

    :param steps: names and transforms, in their order.
    :param json_depth: how deeply a result may be nested (``limits.json_depth``).
    """

    def __init__(
        self, steps: Sequence[tuple[str, Transform]], schemas: Schemas, *, json_depth: int
    ) -> None:
        self._steps = tuple(steps)
        self._schemas = schemas
        self._json_depth = json_depth
        self._failures: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._steps)

    def apply(self, event: Event, limit: Limit) -> Event | None:
        """Run all transforms on an event.

        :param limit: the maximum size of the result when stored.
        :return: the new event, or ``None`` if a transform dropped it.
        :raises ApiError: 400 ``transform_failed``, 413 ``event_too_large``.
        """
        document: Any = event.document()
        name = ""
        for name, transform in self._steps:
            try:
                document = transform(document)
            except Exception as error:
                # The place of the error but not its text, which may quote the event.
                self._log_failure(name, f"failed with {type(error).__name__} at {_place(error)}")
                raise _failed(name) from None
            if document is DROP:
                return None
            if type(document) is not dict:
                returned = "None" if document is None else f"a {type(document).__name__}"
                problem = f"returned {returned}: return the event or DROP"
                self._log_failure(name, problem)
                raise _failed(name, [Problem("", f"it {problem}")])
        try:
            # Encode and decode, so that values that JSON cannot represent are noticed here.
            document = orjson.loads(orjson.dumps(document))
        except (TypeError, ValueError) as error:
            self._log_failure(name, f"returned a value that is not JSON ({error})")
            raise _failed(name) from None
        kind = document.get("type")
        if type(kind) is not str or kind not in EVENT_TYPES:
            raise _failed(name, [Problem("/type", f"must be one of {', '.join(EVENT_TYPES)}")])
        try:
            document = self._schemas.read(kind, document)
        except ApiError as error:
            raise _failed(name, error.errors) from None
        if too_deep(document, self._json_depth):
            depth = f"the limit is {self._json_depth} levels (limits.json_depth)"
            raise _failed(name, [Problem("", f"the event is nested too deeply; {depth}")])
        try:
            return apply_transformed(event, document, limit)
        except ApiError as error:
            if error.code == "event_too_large":
                raise
            raise _failed(name, error.errors) from None

    def _log_failure(self, name: str, problem: str) -> None:
        """Log the 1st, 2nd, 4th, 8th … failure, so that a broken transform does not fill the disk.

        :param problem: a predicate without a value of the event.
        """
        count = self._failures[name] = self._failures.get(name, 0) + 1
        if count & (count - 1) == 0:
            _log.error("transform %s %s (failures so far: %d)", name, problem, count)


def _place(error: Exception) -> str:
    """Return the file and line that raised an error."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{frame.f_code.co_filename}:{line}"


def _failed(name: str, problems: Sequence[Problem] = ()) -> ApiError:
    detail = f": {problems[0]}" if problems else ""
    return ApiError("transform_failed", f"the transform {name} failed{detail}", errors=problems)
