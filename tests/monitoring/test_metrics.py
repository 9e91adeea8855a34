# SPDX-License-Identifier: Apache-2.0
"""engage.monitoring.metrics: everything that is counted is in the answer to Prometheus."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as PlainHistogram
from prometheus_client.mmap_dict import MmapedDict, mmap_key

import engage
from engage.monitoring.metrics import DROPPED, WRITE_BUCKETS, Metrics
from engage.monitoring.prometheus import registry_of, shared_registry
from engage.monitoring.sampler import Refusal

ROOT = Path(__file__).resolve().parents[2]


def _lines(metrics: Metrics) -> list[str]:
    return generate_latest(registry_of(metrics)).decode().splitlines()


def test_every_metric_is_exposed() -> None:
    metrics = Metrics()
    for _ in range(2):
        metrics.request("track", 200, 0.003)
    metrics.request("track", 400, 0.003)
    metrics.event("track", "stored")
    metrics.event("track", "stored", 4)
    metrics.event("identify", "invalid_payload")
    metrics.write(0.004, 100, 7)
    metrics.count("storage_errors")
    metrics.count("dead_letters", "invalid_payload", by=2)
    metrics.count("webhook_deliveries", "sendgrid", "accepted")
    metrics.count("dropped", "profile_change", by=3)
    metrics.refused(Refusal(reason="invalid_json", status=400, route="track"))
    metrics.report("storage", {"wal_bytes": 4096, "free_bytes": 1e9}, {})
    metrics.report("storage", {"wal_bytes": 8192}, {})
    lines = _lines(metrics)
    for line in (
        'engage_requests_total{route="track",status="200"} 2.0',
        'engage_requests_total{route="track",status="400"} 1.0',
        'engage_request_seconds_count{route="track",status="2xx"} 2.0',
        'engage_request_seconds_count{route="track",status="4xx"} 1.0',
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
    metrics = Metrics()
    assert not any("engage_log" in line for line in _lines(metrics))
    metrics.report("log", {}, {})
    assert "engage_log_errors_total 0.0" in _lines(metrics)
    metrics.write(0.004, 100, 0, to="log_append")
    metrics.write(0.002, 1, 0, to="log_append")
    metrics.count("log_errors")
    metrics.report("log", {"backlog_records": 5, "backlog_seconds": 1.5}, {})
    metrics.report("log", {"backlog_records": 6}, {})
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
    metrics = Metrics()
    assert not any("engage_loaded" in line for line in _lines(metrics))
    metrics.paused(0)
    assert 'engage_loaded_records_total{outcome="damaged"} 0.0' in _lines(metrics)
    metrics.count("loaded_records", "stored", by=3)
    metrics.count("loaded_records", "stored")
    metrics.count("log_gap_records", by=7)
    metrics.paused(2)
    lines = _lines(metrics)
    for line in (
        'engage_loaded_records_total{outcome="stored"} 4.0',
        "engage_log_gap_records_total 7.0",
        "engage_log_paused_partitions 2.0",
    ):
        assert line in lines


def test_an_unknown_type_of_event_does_not_become_a_label() -> None:
    metrics = Metrics()
    for number in range(100):
        metrics.event(f"invented-{number}", "invalid_payload")
    text = "\n".join(_lines(metrics))
    assert "invented" not in text
    assert 'engage_events_total{outcome="invalid_payload",type="other"} 100.0' in text
    assert metrics.numbers["events"] == {("other", "invalid_payload"): 100}


@pytest.mark.parametrize("value", [0, 0.001, 0.0011, 0.3, 30, 31])
def test_histograms_are_as_prometheus_client_makes_them(value: float) -> None:
    metrics, registry = Metrics(), CollectorRegistry()
    seconds = PlainHistogram("engage_write_seconds", "", buckets=WRITE_BUCKETS, registry=registry)
    for count in (1, 2, 1000, 10_001):
        metrics.write(value, count, 0)
        seconds.observe(value)

    def values(registry: CollectorRegistry) -> list[str]:
        lines = generate_latest(registry).decode().splitlines()
        return [
            one for one in lines if one.startswith("engage_write_seconds_") and "created" not in one
        ]

    expected = sorted(values(registry))
    assert sorted(values(registry_of(metrics))) == expected
    # A second look counts nothing twice.
    assert sorted(values(registry_of(metrics))) == expected


def test_two_tables_in_one_process_count_separately() -> None:
    first, second = Metrics(), Metrics()
    first.count("storage_errors")
    assert "engage_storage_errors_total 1.0" in _lines(first)
    assert "engage_storage_errors_total 0.0" in _lines(second)


def test_a_counter_begins_at_0_and_a_text_says_what_it_is() -> None:
    """Without the 0, Prometheus would not see the first increase."""
    metrics = Metrics()
    metrics.begin_requests(["invalid_payload", "storage_unavailable"], ["stripe"])
    metrics.report("storage", {"wal_bytes": 1, "odd_things": 2}, {"wal_bytes": "Size of the log"})
    lines = _lines(metrics)
    for line in (
        'engage_requests_total{route="batch",status="503"} 0.0',
        'engage_events_total{outcome="stored",type="identify"} 0.0',
        'engage_dead_letters_total{reason="invalid_payload"} 0.0',
        'engage_refused_requests_total{reason="storage_unavailable"} 0.0',
        'engage_webhook_deliveries_total{outcome="invalid_signature",provider="stripe"} 0.0',
        'engage_webhook_deliveries_total{outcome="not_understood",provider="stripe"} 0.0',
        'engage_dropped_total{what="observer_batch"} 0.0',
        "engage_storage_errors_total 0.0",
        "# HELP engage_storage_wal_bytes Size of the log",
        "# HELP engage_storage_odd_things odd things",
        f'engage_build_info{{version="{engage.__version__}"}} 1.0',
    ):
        assert line in lines
    # Not known yet.
    assert not [line for line in lines if line.startswith(("engage_quota", "engage_last_backup"))]
    metrics.gauge("quota_used_ratio", 0.5)
    assert "engage_quota_used_ratio 0.5" in _lines(metrics)


def test_dropped_data_has_a_name_that_begins_at_0() -> None:
    """Every call in the code."""
    code = "".join(path.read_text("utf-8") for path in (ROOT / "engage").rglob("*.py"))
    called = set(
        re.findall(r"etrics\.count\(\s*\"dropped\",\s*\"(\w+)\"(?: if \w+ else \"(\w+)\")?", code)
    )
    names = {name for pair in called for name in pair if name}
    assert names == set(DROPPED)


def test_the_file_of_a_process_that_has_written_nothing_is_left_out(tmp_path: Path) -> None:
    """A new worker makes the file empty, and one that is killed there leaves it so."""
    key = mmap_key("engage_events", "engage_events_total", [], [], "Events.")
    file = MmapedDict(str(tmp_path / "counter_1.db"))  # type: ignore[no-untyped-call]
    file.write_value(key, 2.0, 0.0)  # type: ignore[no-untyped-call]
    file.close()  # type: ignore[no-untyped-call]
    (tmp_path / "counter_2.db").touch()
    text = generate_latest(shared_registry(str(tmp_path))).decode()
    assert "engage_events_total 2.0" in text
