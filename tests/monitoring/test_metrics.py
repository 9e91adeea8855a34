# SPDX-License-Identifier: Apache-2.0
"""engage.monitoring.metrics: everything that is counted is in the answer to Prometheus."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engage.monitoring.metrics import Metrics
from engage.monitoring.prometheus import PrometheusMetrics
from engage.monitoring.refusals import Refusal


def _lines(metrics: PrometheusMetrics) -> list[str]:
    return generate_latest(metrics.registry).decode().splitlines()


def test_every_metric_is_exposed() -> None:
    metrics = PrometheusMetrics()
    for _ in range(2):
        metrics.request("track", 200, 0.003)
    metrics.request("track", 400, 0.003)
    metrics.event("track", "stored")
    metrics.event("track", "stored", 4)
    metrics.event("identify", "invalid_payload")
    metrics.write(0.004, 100)
    metrics.queue(7)
    metrics.storage_error()
    metrics.dead_letter("invalid_payload", 2)
    metrics.webhook("sendgrid", "accepted")
    metrics.dropped("profile_change", 3)
    metrics.refused(Refusal(reason="invalid_json", status=400, route="track"))
    metrics.storage({"wal_bytes": 4096, "free_bytes": 1e9})
    metrics.storage({"wal_bytes": 8192})
    lines = _lines(metrics)
    for line in (
        'engage_requests_total{route="track",status="200"} 2.0',
        'engage_requests_total{route="track",status="400"} 1.0',
        'engage_request_seconds_count{route="track"} 3.0',
        'engage_events_total{outcome="stored",type="track"} 5.0',
        'engage_events_total{outcome="invalid_payload",type="identify"} 1.0',
        'engage_write_seconds_bucket{le="0.005"} 1.0',
        'engage_write_seconds_bucket{le="0.0025"} 0.0',
        "engage_write_events_sum 100.0",
        "engage_queue_events 7.0",
        "engage_storage_errors_total 1.0",
        'engage_dead_letters_total{reason="invalid_payload"} 2.0',
        'engage_webhook_deliveries_total{outcome="accepted",provider="sendgrid"} 1.0',
        'engage_dropped_total{what="profile_change"} 3.0',
        'engage_refused_requests_total{reason="invalid_json"} 1.0',
        "engage_storage_wal_bytes 8192.0",
        "engage_storage_free_bytes 1e+09",
    ):
        assert line in lines


def test_the_metrics_of_a_log_are_exposed_if_there_is_one() -> None:
    """From the first reading of its gauges on; a server without a log does not have them."""
    metrics = PrometheusMetrics()
    assert not any("engage_log" in line for line in _lines(metrics))
    metrics.log({})
    assert "engage_log_errors_total 0.0" in _lines(metrics)
    metrics.append(0.004, 100)
    metrics.append(0.002, 1)
    metrics.log_error()
    metrics.log({"backlog_records": 5, "backlog_seconds": 1.5})
    metrics.log({"backlog_records": 6})
    lines = _lines(metrics)
    for line in (
        'engage_log_append_seconds_bucket{le="0.005"} 2.0',
        'engage_log_append_seconds_bucket{le="0.0025"} 1.0',
        "engage_log_append_events_sum 101.0",
        "engage_log_errors_total 1.0",
        "engage_log_backlog_records 6.0",
        "engage_log_backlog_seconds 1.5",
    ):
        assert line in lines


def test_the_metrics_of_a_loader_are_exposed_in_a_loader_only() -> None:
    metrics = PrometheusMetrics()
    assert not any("engage_loaded" in line for line in _lines(metrics))
    metrics.paused(0)
    assert 'engage_loaded_records_total{outcome="damaged"} 0.0' in _lines(metrics)
    metrics.loaded("stored", 3)
    metrics.loaded("stored")
    metrics.gap(7)
    metrics.paused(2)
    lines = _lines(metrics)
    for line in (
        'engage_loaded_records_total{outcome="stored"} 4.0',
        "engage_log_gap_records_total 7.0",
        "engage_log_paused_partitions 2.0",
    ):
        assert line in lines


def test_an_unknown_type_of_event_does_not_become_a_label() -> None:
    metrics = PrometheusMetrics()
    for number in range(100):
        metrics.event(f"invented-{number}", "invalid_payload")
    text = "\n".join(_lines(metrics))
    assert "invented" not in text
    assert 'engage_events_total{outcome="invalid_payload",type="other"} 100.0' in text
    for number in range(100):
        metrics.event(f"invented-{number}", "invalid_payload")
    assert len(metrics._new_events) == 1


@pytest.mark.parametrize("value", [0, 0.001, 0.0011, 0.3, 30, 31])
def test_histograms_are_as_if_each_value_was_observed(value: float) -> None:
    metrics, plain = PrometheusMetrics(), PrometheusMetrics()
    for count in (1, 2, 1000, 10_001):
        metrics.request("track", 200, value)
        metrics.write(value, count)
        plain._request_seconds.labels("track").observe(value)
        plain._requests.labels("track", "200").inc()
        plain._write_seconds.observe(value)
        plain._write_events.observe(count)

    def values(lines: list[str]) -> list[str]:
        return [line for line in lines if "_created" not in line]

    assert values(_lines(metrics)) == values(_lines(plain))
    # A second look counts nothing twice.
    assert values(_lines(metrics)) == values(_lines(plain))


def test_what_was_counted_is_passed_on_after_a_moment() -> None:
    waiting: list[tuple[float, Callable[[], None]]] = []
    metrics = PrometheusMetrics(later=lambda seconds, call: waiting.append((seconds, call)))
    for _ in range(3):
        metrics.request("track", 200, 0.003)
        metrics.event("track", "stored")
        metrics.write(0.004, 1)
        metrics.queue(1)
    ((seconds, flush),) = waiting
    assert seconds <= 0.1
    assert metrics._requests.labels("track", "200")._value.get() == 0
    flush()
    assert metrics._requests.labels("track", "200")._value.get() == 3
    assert metrics._queue._value.get() == 1
    metrics.event("track", "stored")
    assert len(waiting) == 2


def test_two_servers_in_one_process_count_separately() -> None:
    first, second = PrometheusMetrics(), PrometheusMetrics(CollectorRegistry())
    first.storage_error()
    assert "engage_storage_errors_total 0.0" in _lines(second)


def test_prometheus_metrics_override_every_method() -> None:
    for name, method in inspect.getmembers(Metrics, inspect.isfunction):
        if not name.startswith("_"):
            override = vars(PrometheusMetrics)[name]
            assert inspect.signature(override) == inspect.signature(method)


def test_metrics_that_count_nothing_accept_every_call() -> None:
    metrics = Metrics()
    metrics.request("track", 200, 0.1)
    metrics.event("track", "stored", 2)
    metrics.write(0.1, 1)
    metrics.queue(1)
    metrics.storage_error()
    metrics.dead_letter("x")
    metrics.webhook("x", "y")
    metrics.dropped("x")
    metrics.refused(Refusal(reason="x", status=400, route="track"))
    metrics.storage({})
