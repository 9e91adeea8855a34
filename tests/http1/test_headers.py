# SPDX-License-Identifier: Apache-2.0
"""The headers of a request behave as Tornado's do."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tornado.httputil import HTTPHeaders

from engage.http1.request import RequestHeaders

NAMES = ["Host", "host", "X-ONE", "x-one", "X-One", "x-os2x-y", "x--z-", "n" * 70]
VALUES = ["", "a", "b,c", "\xff"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "set", "delete"]),
        st.sampled_from(NAMES),
        st.sampled_from(VALUES),
    ),
    max_size=8,
)


@given(STEPS)
def test_they_hold_what_tornados_headers_hold(steps: list[tuple[str, str, str]]) -> None:
    ours, tornados = RequestHeaders(), HTTPHeaders()
    for step, name, value in steps:
        for headers in (ours, tornados):
            if step == "add":
                headers.add(name, value)
            elif step == "set":
                headers[name] = value
            elif name in headers:
                del headers[name]
    for headers in (ours, copy.copy(ours), ours.copy()):
        assert list(headers.get_all()) == list(tornados.get_all())
        assert (list(headers), len(headers)) == (list(tornados), len(tornados))
        assert (dict(headers), str(headers)) == (dict(tornados), str(tornados))
        assert headers == tornados
        for name in [*NAMES, "absent"]:
            assert (name in headers) is (name in tornados)
            assert headers.get(name) == tornados.get(name)
            assert headers.get(name, "x") == tornados.get(name, "x")
            assert headers.get_list(name) == tornados.get_list(name)
            if name in tornados:
                assert headers[name] == tornados[name]


def test_an_absent_header_raises_a_key_error() -> None:
    headers = RequestHeaders()
    with pytest.raises(KeyError):
        headers["Host"]
    with pytest.raises(KeyError):
        del headers["Host"]
