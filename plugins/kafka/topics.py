# SPDX-License-Identifier: Apache-2.0
"""The topics: how they are created, and which settings are refused.

==================  ==============================================================================
``<topic>``         the records that the loaders read
``<topic>.dead``    acknowledged records that the storage refuses; they never expire
``<topic>.ready``   one empty record for each check of readiness
==================  ==============================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from engage.api import DAY_MS

#: Bytes of a record besides its value that a topic has room for: key, headers, framing.
_EXTRA: Final = 256 * 1024
_MIN_MESSAGE: Final = 4 * 1024 * 1024
#: What Kafka allows if a topic does not have the setting.
DEFAULT_MESSAGE: Final = 1048588


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewTopic:
    """A topic that engage creates if it is missing."""

    name: str
    partitions: int
    settings: Mapping[str, str]
    replicas: int = 3


def topics_of(topic: str, *, max_value: int) -> list[NewTopic]:
    """Return the topics of a log.

    :param max_value: the largest value of a record, in bytes.
    """
    safe = {
        "cleanup.policy": "delete",
        "min.insync.replicas": "2",
        "unclean.leader.election.enable": "false",
        "retention.bytes": "-1",
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(max(_MIN_MESSAGE, max_value + _EXTRA)),
    }
    return [
        NewTopic(name=topic, partitions=12, settings={**safe, "retention.ms": str(7 * DAY_MS)}),
        NewTopic(name=f"{topic}.dead", partitions=1, settings={**safe, "retention.ms": "-1"}),
        NewTopic(
            name=f"{topic}.ready",
            partitions=1,
            settings={**safe, "retention.ms": "3600000", "segment.bytes": "1048576"},
        ),
    ]


def retention(settings: Mapping[str, str]) -> int | None:
    """Return for how many milliseconds a topic keeps a record; ``None``: without limit."""
    value = int(settings.get("retention.ms", -1))
    return None if value < 0 else value


def weaknesses(name: str, settings: Mapping[str, str], *, replicas: int) -> list[str]:
    """Return the settings of a topic that allow acknowledged events to be lost, a line for each.

    :param settings: those that the brokers use, including their defaults.
    :param replicas: of the partition that has the fewest.
    """
    lines = []
    if replicas < 3:
        lines.append(
            f"{name} has {replicas} replica{'' if replicas == 1 else 's'}; with fewer than 3, "
            "an acknowledged event can be lost, or no event is accepted, when one broker fails"
        )
    if int(settings.get("min.insync.replicas", 1)) < 2:
        lines.append(
            f"{name} has min.insync.replicas={settings.get('min.insync.replicas', 1)}: "
            "an event is acknowledged when a single broker has it; set it to 2"
        )
    if settings.get("unclean.leader.election.enable", "false") != "false":
        lines.append(
            f"{name} has unclean.leader.election.enable=true: "
            "a broker that lacks acknowledged events may become the leader; set it to false"
        )
    if settings.get("cleanup.policy", "delete") != "delete":
        lines.append(
            f"{name} has cleanup.policy={settings['cleanup.policy']}: "
            "compaction keeps only the last event of each user; set it to delete"
        )
    if int(settings.get("retention.bytes", -1)) >= 0:
        lines.append(
            f"{name} has retention.bytes={settings['retention.bytes']}: "
            "many events at once would delete others before they are loaded; set it to -1"
        )
    kept = retention(settings)
    if kept is not None and kept < DAY_MS:
        lines.append(
            f"{name} has retention.ms={kept}: an outage of the storage that is longer than that "
            f"loses events; set it to at least {DAY_MS} (a day)"
        )
    if settings.get("message.timestamp.type", "CreateTime") != "LogAppendTime":
        lines.append(
            f"{name} has message.timestamp.type={settings.get('message.timestamp.type')}: "
            "records would expire by the clocks of the servers; set it to LogAppendTime"
        )
    return lines
