# SPDX-License-Identifier: Apache-2.0
"""Storages, logs and readers with one flaw, for the tests of the conformance suites."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any


def _flawed(base: type, method: str, call: Callable[..., Any]) -> type:
    """Return a subclass whose method is ``call(good method, *arguments, **options)``."""

    async def flawed(self: Any, *arguments: Any, **options: Any) -> Any:
        return await call(getattr(super(cls, self), method), *arguments, **options)

    cls = type(f"Flawed_{method}", (base,), {method: flawed})
    return cls


def without(base: type, method: str, /) -> type:
    """Return a subclass whose method does nothing."""

    async def nothing(good: Any, *arguments: Any, **options: Any) -> None:
        pass

    if inspect.iscoroutinefunction(getattr(base, method)):
        return _flawed(base, method, nothing)
    return type(f"Flawed_{method}", (base,), {method: lambda *_: None})


def called(base: type, method: str, /, **changed: Any) -> type:
    """Return a subclass whose method is called with other keyword arguments."""

    def call(good: Any, *arguments: Any, **options: Any) -> Any:
        return good(*arguments, **{**options, **changed})

    return _flawed(base, method, call)


def given(base: type, method: str, /, **fields: Any) -> type:
    """Return a subclass whose method gets other fields in its first argument.

    :param fields: new values, or functions that return them; they get what the method was given.
        The first argument is an item, or a list of items each of which is changed.
    """

    def change(one: Any) -> Any:
        values = {name: new(one) if callable(new) else new for name, new in fields.items()}
        return dataclasses.replace(one, **values)

    def call(good: Any, first: Any, *rest: Any, **options: Any) -> Any:
        changed = list(map(change, first)) if isinstance(first, Sequence) else change(first)
        return good(changed, *rest, **options)

    return _flawed(base, method, call)


def returned(
    base: type, method: str, change: Callable[[Any], Any] | None = None, /, **fields: Any
) -> type:
    """Return a subclass whose method returns something else.

    :param change: returns it of what the good method returned.
    :param fields: new fields of what the good method returned, as of :func:`given`.
    """

    async def call(good: Any, *arguments: Any, **options: Any) -> Any:
        found = await good(*arguments, **options)
        if change is not None:
            return change(found)
        values = {name: new(found) if callable(new) else new for name, new in fields.items()}
        return None if found is None else dataclasses.replace(found, **values)

    return _flawed(base, method, call)
