# SPDX-License-Identifier: Apache-2.0
"""deploy/alerts.yml and deploy/grafana.json: Prometheus and Grafana's library read them, and what
they name is there."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engage.monitoring.metrics import Metrics
from engage.monitoring.prometheus import registry_of
from support.console import free_port
from support.memory_log import MemoryBroker
from support.server_inprocess import serving
from support.server_process import start_server
from support.venv import venv
from support.waiting import DEADLINE, eventually, wait_for

pytestmark = [pytest.mark.checkout, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy/alerts.yml"
DASHBOARD = ROOT / "deploy/grafana.json"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
PANELS = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if "targets" in panel]
#: The expressions of the dashboard, with a job and a range as Grafana puts them in.
SHOWN = [
    target["expr"].replace("$job", "engage").replace("$__rate_interval", "1m")
    for panel in PANELS
    for target in panel["targets"]
]

#: A server that is well, over 200 minutes. Strangers with unknown keys are held up, and a
#: server that drains answers its health checks with 503.
WELL = {
    "up": "1x200",
    "engage_storage_errors_total": "0x200",
    'engage_requests_total{route="track",status="200"}': "0+60x200",
    'engage_requests_total{route="track",status="500"}': "0x200",
    'engage_requests_total{route="track",status="503"}': "0x200",
    'engage_requests_total{route="readyz",status="503"}': "0+1x200",
    'engage_request_seconds_bucket{route="track",status="2xx",le="0.1"}': "0+60x200",
    'engage_request_seconds_bucket{route="track",status="2xx",le="2.5"}': "0+60x200",
    'engage_request_seconds_bucket{route="track",status="2xx",le="+Inf"}': "0+60x200",
    'engage_request_seconds_bucket{route="track",status="4xx",le="0.1"}': "0x200",
    'engage_request_seconds_bucket{route="track",status="4xx",le="+Inf"}': "0+60x200",
    "engage_storage_free_bytes": "50000000000x200",
    'engage_dead_letters_total{reason="invalid_payload"}': "0x200",
    'engage_refused_requests_total{reason="invalid_write_key"}': "0+60x200",
    'engage_refused_requests_total{reason="write_key_disabled"}': "0x200",
    'engage_dropped_total{what="conflict"}': "0x200",
    'engage_dead_letter_budget_used_ratio{budget="api"}': "0.1x200",
    'engage_webhook_deliveries_total{provider="stripe",outcome="accepted"}': "0+1x200",
    'engage_webhook_deliveries_total{provider="stripe",outcome="invalid_signature"}': "0x200",
    "engage_quota_used_ratio": "0.5x200",
    # The test begins in 1970: this is a backup of some hours ago.
    "engage_last_backup_timestamp_seconds": "0x200",
    'engage_process_restarts{process="worker"}': "3x200",
    "engage_log_backlog_seconds": "1x200",
    "engage_log_errors_total": "0x200",
    "engage_log_paused_partitions": "0x200",
    "engage_log_gap_records_total": "0x200",
}
#: Alert → the series that makes it fire, and nothing else.
ILL = {
    "EngageDown": {"up": "1x150 0x70"},
    "EngageStorageErrors": {"engage_storage_errors_total": "0x150 1+1x70"},
    "EngageRefuses": {'engage_requests_total{route="track",status="503"}': "0x140 1+1x80"},
    "EngageFails": {'engage_requests_total{route="track",status="500"}': "0x155 1x65"},
    "EngageSlow": {
        'engage_request_seconds_bucket{route="track",status="2xx",le="0.1"}': "0x200",
    },
    "EngageDiskFull": {"engage_storage_free_bytes": "1000000000x200"},
    "EngageRejectsMore": {'engage_dead_letters_total{reason="invalid_payload"}': "0x120 1+10x80"},
    "EngageRefusesKeys": {
        'engage_refused_requests_total{reason="write_key_disabled"}': "0x100 1+2x120",
    },
    "EngageDrops": {'engage_dropped_total{what="conflict"}': "0x155 1x65"},
    "EngageRejectedNotKept": {'engage_dead_letter_budget_used_ratio{budget="api"}': "0.9x200"},
    "EngageWebhooksFail": {
        'engage_webhook_deliveries_total{provider="stripe",outcome="invalid_signature"}': (
            "0x120 1+1x100"
        ),
    },
    "EngageQuota": {"engage_quota_used_ratio": "0.9x200"},
    "EngageBackupOld": {"engage_last_backup_timestamp_seconds": "-200000x200"},
    "EngageRestarts": {'engage_process_restarts{process="worker"}': "0x150 1+1x70"},
    "EngageLoadsLate": {"engage_log_backlog_seconds": "100x200"},
    "EngageLogErrors": {"engage_log_errors_total": "0x150 1+1x70"},
    "EngageLogPaused": {"engage_log_paused_partitions": "1x200"},
    "EngageLogGap": {"engage_log_gap_records_total": "0x150 5x70"},
}


def _program(name: str) -> str:
    """Return a program of Debian's package prometheus."""
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


def _series(name: str) -> str:
    """Return a series as Prometheus has it, with the labels of the scraped server."""
    name, _, labels = name.rstrip("}").partition("{")
    return name + "{" + ",".join(filter(None, [labels, 'job="engage",instance="a:9464"'])) + "}"


def _case(name: str, series: dict[str, str], minutes: int, fires: list[str]) -> dict[str, Any]:
    """Return a test of promtool: which alerts fire after a number of minutes."""
    return {
        "name": name,
        "interval": "1m",
        "input_series": [
            {"series": _series(name), "values": values} for name, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minutes}m",
                "exp_samples": [
                    {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in fires
                ],
            }
        ],
    }


def test_each_alert_fires_for_its_cause_alone(tmp_path: Path) -> None:
    """Judged by promtool, which also checks each expression and template."""
    assert ILL.keys() == {rule["alert"] for rule in RULES}
    tests = [_case("all is well", WELL, 160, [])]
    for alert, changed in ILL.items():
        assert changed.keys() <= WELL.keys()
        tests.append(_case(alert, {**WELL, **changed}, 160, [alert]))
    # Rejected as often as on the day before.
    rejected = 'engage_dead_letters_total{reason="invalid_payload"}'
    tests.append(_case("as yesterday", {rejected: "0+10x1620"}, 1560, []))
    tests.append(
        _case("not as yesterday", {rejected: "0+1x1500 1500+10x120"}, 1560, ["EngageRejectsMore"])
    )
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": tests}))
    done = subprocess.run(
        [_program("promtool"), "test", "rules", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_say_what_to_do() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_grafana_knows_all_of_the_dashboard() -> None:
    """Its library reads the file into its own classes, and writes it again without a loss."""
    code = (
        "import json, sys;"
        "from grafana_foundation_sdk.cog.plugins import register_default_plugins;"
        "from grafana_foundation_sdk.cog.encoder import JSONEncoder;"
        "from grafana_foundation_sdk.models.dashboard import Dashboard;"
        "register_default_plugins();"
        "print(JSONEncoder().encode(Dashboard.from_json(json.load(sys.stdin))))"
    )
    text = DASHBOARD.read_text("utf-8")
    python = venv(Path(__file__).with_name("grafana.txt"))
    done = subprocess.run([python, "-c", code], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _is_within(json.loads(text), json.loads(done.stdout), "")
    places = [panel["gridPos"] for panel in json.loads(text)["panels"]]
    cells = [
        (x, y)
        for at in places
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) < 24


def _is_within(part: Any, whole: Any, path: str) -> None:
    """Check that a JSON value has nothing that another one lacks."""
    if isinstance(part, dict):
        assert part.keys() <= whole.keys(), f"{path}: {part.keys() - whole.keys()}"
        for key, value in part.items():
            _is_within(value, whole[key], f"{path}/{key}")
    elif isinstance(part, list):
        assert len(part) == len(whole), path
        for number, (one, other) in enumerate(zip(part, whole, strict=True)):
            _is_within(one, other, f"{path}/{number}")
    else:
        assert part == whole, path


# ------------------------------------------------------------------------- with a running server
CONFIG = """
[workspaces.webhooks.stripe]
secret = "whsec_test-secret-of-stripe"

[limits.quota]
events_per_day = 1000
"""


def _labels(text: str) -> dict[str, dict[str, set[str]]]:
    """Return name of a sample → name of a label → its values."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


async def _log_metrics(folder: Path) -> str:
    """Return the metrics of a server with a log, and of a loader."""
    from prometheus_client import generate_latest

    metrics = Metrics()
    async with serving(folder, broker=MemoryBroker(2), metrics=metrics):
        await eventually(lambda: "log_backlog_seconds" in metrics.numbers)
    metrics.paused(0)
    return generate_latest(registry_of(metrics)).decode()


@contextlib.contextmanager
def _prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """Run Prometheus as docs/running.md says, with a server that is scraped each second."""
    page = (ROOT / "docs/running.md").read_text("utf-8")
    (text,) = re.findall(r"^```yaml\n# prometheus.yml\n(.*?)^```$", page, re.M | re.S)
    for documented, actual in (
        ("/etc/prometheus/engage-alerts.yml", str(ALERTS)),
        ("127.0.0.1:9464", target),
    ):
        assert documented in text
        text = text.replace(documented, actual)
    config = yaml.safe_load(text)
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    process = subprocess.Popen(
        [
            *(_program("prometheus"), f"--config.file={folder}/prometheus.yml"),
            *(f"--storage.tsdb.path={folder}/data", "--log.level=warn"),
            f"--web.listen-address=127.0.0.1:{port}",
        ]
    )
    try:
        url = f"http://127.0.0.1:{port}/api/v1/"
        with httpx.Client(base_url=url, timeout=DEADLINE) as client:
            yield client
    finally:
        process.kill()
        process.wait()


async def test_prometheus_reads_the_rules_and_all_names_are_those_of_a_server(
    tmp_path: Path,
) -> None:
    (tmp_path / "log").mkdir()
    log = _labels(await _log_metrics(tmp_path / "log"))
    port = free_port()
    with start_server(tmp_path, server=f"metrics_port = {port}", config_extra=CONFIG) as server:
        server.track("m1")
        server.post("/v1/track", {"userId": "u"})
        text = server.metrics()
        assert "# HELP engage_storage_wal_bytes Size of" in text
        for line in text.splitlines():
            name, _, help_ = line.removeprefix("# HELP ").partition(" ")
            if line.startswith("# HELP engage_"):
                assert not name.endswith(help_.replace(" ", "_")), f"{name} has no text of its own"
        wait_for(lambda: "engage_quota_used_ratio" in server.metrics(), what="the quotas")
        names = {**log, **_labels(server.metrics())}
        for expression in [*SHOWN, *(rule["expr"] for rule in RULES)]:
            for name, matchers in re.findall(r"\b(engage_\w+)(?:\{([^}]*)\})?", expression):
                assert name in names, expression
                for label, operator, value in re.findall(r'(\w+)(!?=~?)"([^"]*)"', matchers):
                    if label == "job":
                        continue
                    assert label in names[name], expression
                    if operator in ("=", "=~"):
                        # Another value would be a typing error: counters begin at 0.
                        values = names[name][label]
                        assert {*value.split("|")} & values, expression

        with _prometheus(tmp_path, f"127.0.0.1:{port}") as prometheus:

            def query(expression: str) -> Any:
                answer = prometheus.get("query", params={"query": expression})
                assert answer.status_code == 200, answer.text
                return answer.json()["data"]["result"]

            def scraped() -> Any:
                # It answers 503 at first.
                with contextlib.suppress(httpx.TransportError, AssertionError):
                    return query("count_over_time(engage_build_info[1m]) > 3")
                return None

            wait_for(scraped, what="Prometheus")
            empty = [expression for expression in SHOWN if not query(expression)]
            rules = wait_for(lambda: _evaluated(prometheus.get("rules").json()), what="the rules")
    assert {rule["health"] for rule in rules} == {"ok"}
    assert {rule["name"] for rule in rules if rule["state"] == "firing"} == set()
    # What shows nothing here is of a log, or would show something if there were a fault.
    assert all("engage_log" in one or "engage_loaded" in one or "> 0" in one for one in empty), (
        empty
    )


def _evaluated(answer: Any) -> Any:
    """Return the rules once Prometheus has evaluated all."""
    rules = [rule for group in answer["data"]["groups"] for rule in group["rules"]]
    return rules if rules and all(rule["health"] != "unknown" for rule in rules) else None
