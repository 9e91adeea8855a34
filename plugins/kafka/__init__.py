# SPDX-License-Identifier: Apache-2.0
"""The log on Apache Kafka.

================  ==================================================================================
``log.py``        the interface that the core calls: opening, readiness, backlog
``appending.py``  the queue of each partition, and the batches that are sent
``reading.py``    one member of a group of readers: offsets, gaps, rebalances
``topics.py``     the topics: how they are created, which settings are refused
``options.py``    the options: addresses, TLS and SASL
``client.py``     the client: connections, errors, time limits
``aio.py``        the classes of aiokafka, as engage needs them, in subclasses
================  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

import orjson

from engage.api import ConfigError, EventLog, LogContext, LogFactory, Register, hookimpl

__all__ = ["engage_register_log"]

#: How to install the libraries for Kafka.
INSTALL: Final = "run pip install 'engage-server[kafka]', or in a clone pip install '.[kafka]'"


def _make(options: Mapping[str, Any], context: LogContext) -> EventLog:
    try:
        from .log import KafkaLog
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "aiokafka":
            raise
        raise ConfigError(f"aiokafka is not installed: {INSTALL}") from None
    return KafkaLog.from_options(options, context)


@hookimpl
def engage_register_log(register: Register[LogFactory]) -> None:
    """Register ``kafka``."""
    schema = resources.files("engage_schemas").joinpath("plugins/kafka.json").read_bytes()
    register("kafka", _make, orjson.loads(schema))
