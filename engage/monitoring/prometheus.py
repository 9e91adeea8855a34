# SPDX-License-Identifier: Apache-2.0
"""The table of :mod:`engage.monitoring.metrics` for Prometheus.

``prometheus_client`` is imported only when metrics are served, because that library decides at
import time whether several processes share their numbers (environment variable
``PROMETHEUS_MULTIPROC_DIR``, set by :mod:`engage.server.serve`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engage.monitoring.metrics import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from engage.monitoring.metrics import Metrics

__all__ = ["SharedNumbers", "registry_of", "shared_registry"]

#: Seconds that the shared files of a process are behind.
FLUSH_SECONDS: Final = 0.1


def registry_of(metrics: Metrics) -> CollectorRegistry:
    """Return a registry that reads a table whenever it is read."""
    return _registry(lambda: _read(metrics))


def shared_registry(folder: str) -> CollectorRegistry:
    """Return a registry that reads the sum of the files in the folder that processes share."""
    return _registry(lambda: _read_shared(folder))


@dataclasses.dataclass(eq=False)
class _Collector:
    collect: Callable[[], Iterable[Metric]]


def _registry(collect: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_Collector(collect))
    return registry


def _read_shared(folder: str) -> Iterable[Metric]:
    """Return the sum of the files of :class:`SharedNumbers`.

    A file without any byte is left out, which prometheus_client could not read: it is that of a
    process that starts, or that was killed there.
    """
    from prometheus_client.multiprocess import MultiProcessCollector

    files = []
    for path in Path(folder).glob("*.db"):
        with contextlib.suppress(FileNotFoundError):  # That of a process that ended.
            if path.stat().st_size:
                files.append(str(path))
    merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
    return merged


def _read(metrics: Metrics) -> Iterable[Metric]:
    """Return the numbers of a table."""
    from prometheus_client.metrics_core import Metric

    by_name: dict[str, Metric] = {}
    for family, labels, value in metrics.rows():
        name = f"engage_{family.name}"
        metric = by_name.setdefault(name, Metric(name, family.text, family.kind))
        given = dict(zip(family.labels, labels, strict=True))
        total = 0.0
        for suffix, bound, number in _samples(family.kind, value):
            if bound is None:
                metric.add_sample(name + suffix, given, number)
            else:  # A bucket of Prometheus has all observations up to its bound.
                total += number
                metric.add_sample(name + suffix, {**given, "le": bound}, total)
        if isinstance(value, Histogram):
            metric.add_sample(f"{name}_count", given, total)
    return by_name.values()


class SharedNumbers:
    """Copies the table of this process to the files that the server's processes share.

    The files belong to ``prometheus_client``; the parent reads the sum of all.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._values: dict[tuple[str, ...], Any] = {}

    async def run(self) -> None:
        """Copy ten times a second, until cancelled."""
        while True:
            self.flush()
            await asyncio.sleep(FLUSH_SECONDS)

    def flush(self) -> None:
        """Copy the numbers that have changed."""
        from prometheus_client import values

        for family, labels, value in self._metrics.rows():
            for suffix, bound, number in _samples(family.kind, value):
                key = (family.name, suffix, bound or "", *labels)
                shared = self._values.get(key)
                if shared is None:
                    name = f"engage_{family.name}"
                    names, texts = family.labels, labels
                    if bound is not None:
                        names, texts = (*names, "le"), (*labels, bound)
                    shared = self._values[key] = values.ValueClass(
                        family.kind,
                        name,
                        name + suffix,
                        names,
                        texts,
                        family.text,
                        multiprocess_mode="livesum" if family.summed else "mostrecent",
                    )
                elif shared.get() == number:
                    continue
                # The latest value of a gauge counts if it is not a sum.
                shared.set(number, time.time() if family.kind == "gauge" else None)


def _samples(kind: str, value: float | Histogram) -> Iterator[tuple[str, str | None, float]]:
    """Yield (suffix of the name, bound of the bucket, number) for a number of the table."""
    if not isinstance(value, Histogram):
        yield "_total" if kind == "counter" else "", None, float(value)
        return
    from prometheus_client.utils import floatToGoString

    for bound, count in zip((*value.bounds, math.inf), value.counts, strict=True):
        yield "_bucket", floatToGoString(bound), float(count)  # type: ignore[no-untyped-call]
    yield "_sum", None, value.total
