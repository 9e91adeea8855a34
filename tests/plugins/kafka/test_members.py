# SPDX-License-Identifier: Apache-2.0
"""Commits of a member whose group is rebalanced meanwhile; the answers of Kafka are made up."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import pytest
from aiokafka.errors import CommitFailedError

from engage.api import StorageUnavailable
from engage_plugins.kafka.client import Member
from engage_plugins.kafka.options import Address


class _Rebalanced:
    """Stands for aiokafka's consumer: commits fail once :attr:`answer` is set."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()

    async def commit(self, _: object) -> None:
        await self.answer.wait()
        raise CommitFailedError("the group has rebalanced")


async def _member() -> tuple[Any, _Rebalanced]:
    address = Address(servers="127.0.0.1:9")
    member: Any = Member(address, topic="t", group="g", max_batch=1, revoked=list, assigned=list)
    await member.stop(1.0)
    member._consumer = _Rebalanced()
    return member, member._consumer


def test_a_commit_that_fails_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> bool:
        member, kafka = await _member()
        kafka.answer.set()
        committed: bool = await member.commit({0: 5}, 60.0)
        return committed

    assert asyncio.run(run()) is False
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert "rebalanced during a commit" in line.getMessage()
    assert "\n" not in line.getMessage()
    assert line.exc_info is None


def test_a_commit_that_fails_after_its_time_is_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The caller has got an error when the time was over, and commits again."""

    async def run() -> None:
        member, kafka = await _member()
        with pytest.raises(StorageUnavailable, match="did not answer in time"):
            await member.commit({0: 5}, 0.01)
        kafka.answer.set()
        await asyncio.sleep(0.01)
        gc.collect()

    # What other tests have left is reported now.
    gc.collect()
    caplog.clear()
    asyncio.run(run())
    assert caplog.records == []
