# SPDX-License-Identifier: Apache-2.0
"""What transforms may change, and what happens when one fails."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engage.api import DROP, Event, Transform
from engage.errors import ApiError
from engage.pipeline.transforms import Transforms
from support.each import each
from support.pipeline import SCHEMAS, limit, make_event


def apply(*steps: Any, size: int = 65536, of: Event | None = None) -> Event | None:
    named: list[tuple[str, Transform]] = [(f"step-{i}", step) for i, step in enumerate(steps)]
    transforms = Transforms(named, SCHEMAS, json_depth=64)
    return transforms.apply(make_event("m") if of is None else of, limit(size))


def adding(**fields: Any) -> Transform:
    return lambda document: {**document, **fields}


def test_each_transform_gets_the_result_of_the_one_before() -> None:
    seen: list[Any] = []

    def second(document: dict[str, Any]) -> dict[str, Any]:
        seen.append(document["a"])
        document["b"] = 2
        return document

    result = apply(adding(a=1), second)
    assert result is not None
    assert seen == [1]
    assert {"a": 1, "b": 2}.items() <= result.document().items()


def test_drop_ends_the_chain() -> None:
    def never(document: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError

    assert apply(lambda document: DROP, never) is None


def test_a_transform_gets_a_copy() -> None:
    before = make_event("m")
    body = before.body

    def mutate(document: dict[str, Any]) -> dict[str, Any]:
        document.clear()
        document.update(type="track", userId="v", event="f")
        return document

    after = apply(mutate, of=before)
    assert before.body == body
    assert after is not None
    assert (after.user_id, after.name) == ("v", "f")


@each(
    "transform",
    [
        *(lambda document: 1 / 0, lambda document: None, lambda document: [document]),
        *(adding(event=None), adding(userId=" "), adding(userId=1.5), adding(type="unknown")),
        *(adding(type=["track"]), adding(timestamp="yesterday")),
        *(adding(timestamp="2026-02-30T00:00:00Z"), adding(x=object()), adding(x=2**70)),
        *(adding(x={1: 2}), adding(x="\ud800"), lambda document: {}),
    ],
)
def test_a_failing_transform_refuses_the_event(transform: Transform) -> None:
    with pytest.raises(ApiError) as caught:
        apply(adding(a=1), transform)
    assert (caught.value.status, caught.value.code) == (400, "transform_failed")
    assert "step-1" in caught.value.message


def test_a_result_that_is_nested_too_deeply_is_refused() -> None:
    value: Any = 1
    for _ in range(63):
        value = [value]
    assert apply(adding(x=value)) is not None
    with pytest.raises(ApiError) as caught:
        apply(adding(x=[value]))
    assert caught.value.code == "transform_failed"


def test_the_size_of_the_result_is_checked() -> None:
    after = apply(adding(x=""))
    assert after is not None
    size = len(after.body)
    assert apply(adding(x="y" * 10), size=size + 10) is not None
    with pytest.raises(ApiError) as caught:
        apply(adding(x="y" * 11), size=size + 10)
    assert caught.value.code == "event_too_large"


def test_the_log_has_the_transform_and_the_place_but_no_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(document: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(f"secret {document}")

    transforms = Transforms([("clumsy", failing)], SCHEMAS, json_depth=64)
    with caplog.at_level(logging.ERROR):
        for _ in range(100):
            with pytest.raises(ApiError) as caught:
                transforms.apply(make_event("m"), limit(65536))
            assert "secret" not in caught.value.message
    assert len(caplog.records) == 7  # 1, 2, 4 … 64
    assert "clumsy" in caplog.text
    assert "test_transforms.py" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned None: return the event or DROP"),
        (["secret"], "returned a list: return the event or DROP"),
        (
            {"x": object()},
            "returned a value that is not JSON (Type is not JSON serializable: object)",
        ),
    ],
)
def test_a_wrong_result_is_named(
    caplog: pytest.LogCaptureFixture, returned: Any, said: str
) -> None:
    with pytest.raises(ApiError) as caught:
        apply(lambda document: returned)
    assert f"transform step-0 {said} (failures so far: 1)" in caplog.text
    assert "secret" not in caplog.text
    if not isinstance(returned, dict):
        assert caught.value.message == f"the transform step-0 failed: it {said}"
