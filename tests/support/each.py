# SPDX-License-Identifier: Apache-2.0
"""One test for many cases, which reports every case that fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

#: How many characters of a case, and of its reason, are shown.
_CASE, _REASON = 200, 1500


class _Cases:
    """The cases of one run of a test, and the errors of those that failed."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self._failed: list[tuple[str, BaseException]] = []

    @contextmanager
    def running(self, row: dict[str, Any]) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            shown = (getattr(value, "__name__", None) or repr(value) for value in row.values())
            self._failed.append((", ".join(shown)[:_CASE], error))

    def report(self) -> None:
        __tracebackhide__ = True
        assert self._rows, "a test without a case"
        if self._failed:
            text = f"{len(self._failed)} of {len(self._rows)} cases failed:"
            for case, error in self._failed:
                text += f"\n{case}\n{type(error).__name__}: {error}"[:_REASON].replace("\n", "\n  ")
            raise AssertionError(text) from self._failed[0][1]


def each(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., Any]], Any]:
    """Run a test with each case, and fail with all cases that fail.

    It takes the first two arguments of ``pytest.mark.parametrize``, and makes one test of all
    cases. Use it for cheap checks. The cases share the fixtures of the test.

    :param names: the parameters that a case has values for, separated by commas.
    :param cases: tuples of values; if there is one name, the values.
    :raises ValueError: if a case has not as many values as there are names.
    """
    keys = names.replace(" ", "").split(",")
    rows = [dict(zip(keys, case if len(keys) > 1 else [case], strict=True)) for case in cases]

    def decorate(test: Callable[..., Any]) -> Any:
        @functools.wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            __tracebackhide__ = True
            cases = _Cases(rows)
            for row in rows:
                with cases.running(row):
                    test(*args, **fixtures, **row)
            cases.report()

        @functools.wraps(test)
        async def run_async(*args: Any, **fixtures: Any) -> None:
            __tracebackhide__ = True
            cases = _Cases(rows)
            for row in rows:
                with cases.running(row):
                    await test(*args, **fixtures, **row)
            cases.report()

        chosen: Any = run_async if inspect.iscoroutinefunction(test) else run
        # pytest asks the signature for the names of fixtures.
        signature = inspect.signature(test)
        fixtures = [value for key, value in signature.parameters.items() if key not in keys]
        chosen.__signature__ = signature.replace(parameters=fixtures)
        return chosen

    return decorate


def variants(base: Mapping[str, Any] = {}, /, **members: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield an object with each value of each member; the other members are those of ``base``."""
    for name, values in members.items():
        for value in values:
            yield {**base, name: value}
