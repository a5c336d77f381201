"""Tests of `simplebus deploy`: files for containers, Kubernetes, Prometheus and Grafana."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import simplebus
from simplebus.cli import app
from simplebus.commands.deploy.command import DeployedFile, render_file
from simplebus.commands.deploy.grafana_dashboard import CHARTS, TILES, build_dashboard
from simplebus.config.server_schema import SETTINGS
from tests.support.programs import PATIENCE_SECONDS, run_server
from tests.support.requirements import require_program

ALERTS = "simplebus-alerts.yml"
RULES: list[dict[str, Any]] = yaml.safe_load(render_file(ALERTS))["groups"][0]["rules"]
OPERATING = Path(__file__).parents[2] / "protocol" / "guide" / "operating.md"
GROWING, FLAT = "0+100x60", "5+0x60"
SERIES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "SimplebusDown": ([('up{job="simplebus"}', "0x60")], [('up{job="simplebus"}', "1x60")]),
    "SimplebusBacklogGrows": (
        [('simplebus_stored_messages{class="orders"}', "200000+100x60")],
        [('simplebus_stored_messages{class="orders"}', "200000+0x60")],
    ),
    "SimplebusPublishersBlocked": (
        [('simplebus_blocked_publishers{class="orders"}', "2x60")],
        [('simplebus_blocked_publishers{class="orders"}', "0x60")],
    ),
    "SimplebusDeadLetters": (
        [("simplebus_dead_letters", GROWING)],
        [("simplebus_dead_letters", FLAT)],
    ),
    "SimplebusManyRedeliveries": (
        [
            ("simplebus_bus_redelivered_messages_total", "0+20x60"),
            ("simplebus_bus_delivered_messages_total", GROWING),
        ],
        [
            ("simplebus_bus_redelivered_messages_total", "0+5x60"),
            ("simplebus_bus_delivered_messages_total", GROWING),
        ],
    ),
    "SimplebusMessagesDropped": (
        [('simplebus_bus_dropped_messages_total{reason="class_full"}', GROWING)],
        [('simplebus_bus_dropped_messages_total{reason="max_deliveries"}', GROWING)],
    ),
    "SimplebusClientsRefused": (
        [('simplebus_disconnected_total{reason="unauthorized"}', GROWING)],
        [('simplebus_disconnected_total{reason="unauthorized"}', FLAT)],
    ),
    "SimplebusJournalFailing": (
        [("simplebus_journal_failing", "1x60")],
        [("simplebus_journal_failing", "0x60")],
    ),
    "SimplebusJournalBehind": (
        [("simplebus_journal_lagging_sessions", "3x60")],
        [("simplebus_journal_lagging_sessions", "0x60")],
    ),
    "SimplebusEventLoopStalls": (
        [("simplebus_event_loop_stalls_total", GROWING)],
        [("simplebus_event_loop_stalls_total", FLAT)],
    ),
    "SimplebusMemoryNearlyUsed": (
        [("simplebus_memory_bytes", "95x60"), ("simplebus_memory_limit_bytes", "100x60")],
        [("simplebus_memory_bytes", "50x60"), ("simplebus_memory_limit_bytes", "100x60")],
    ),
    "SimplebusDescriptorsNearlyUsed": (
        [
            ('process_open_fds{job="simplebus"}', "95x60"),
            ('process_max_fds{job="simplebus"}', "100x60"),
        ],
        [
            ('process_open_fds{job="simplebus"}', "50x60"),
            ('process_max_fds{job="simplebus"}', "100x60"),
        ],
    ),
    "SimplebusDiskNearlyFull": (
        [("simplebus_journal_disk_free_bytes", "5x60"), ("simplebus_journal_disk_bytes", "100x60")],
        [
            ("simplebus_journal_disk_free_bytes", "50x60"),
            ("simplebus_journal_disk_bytes", "100x60"),
        ],
    ),
    "SimplebusBridgeDown": (
        [('simplebus_bridge_up{copier="backup"}', "0x60")],
        [('simplebus_bridge_up{copier="backup"}', "1x60")],
    ),
}
"""Series for which each alert fires, and for which it does not."""


def run_promtool(*arguments: str | Path, data: str = "") -> tuple[int, str]:
    """Return status and output of promtool."""
    process = subprocess.run(
        [require_program("promtool"), *map(str, arguments)],
        input=data,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return process.returncode, process.stdout + process.stderr


def metric_names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:simplebus|process)_\w+", expression))


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in build_dashboard()["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("file", DeployedFile)
def test_prints_each_file(file: DeployedFile) -> None:
    result = CliRunner().invoke(app, ["deploy", file.value])
    assert result.exit_code == 0, result.output
    assert "simplebus" in result.stdout
    if file is DeployedFile.GRAFANA:
        json.loads(result.stdout)
    elif file.value.endswith(("-unit", "container")):
        assert result.stdout.startswith("# ")
    else:
        assert list(yaml.safe_load_all(result.stdout))


def test_writes_all_files_that_the_compose_file_needs(tmp_path: Path) -> None:
    directory = tmp_path / "deploy"
    result = CliRunner().invoke(app, ["deploy", "compose", "--directory", str(directory)])
    assert result.exit_code == 0, result.output
    services = yaml.safe_load((directory / "compose.yaml").read_text())["services"]
    mounted = [
        volume.split(":")[0]
        for service in services.values()
        for volume in service["volumes"]
        if volume.startswith("./")
    ]
    assert len(mounted) == 5
    assert all((directory / name).is_file() for name in (*mounted, "Containerfile"))


def test_does_not_replace_files(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text("mine")
    result = CliRunner().invoke(app, ["deploy", "compose", "--directory", str(tmp_path)])
    assert result.exit_code == 1
    assert "already contains prometheus.yml" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["prometheus.yml"]


@pytest.mark.parametrize("name", ["Containerfile", "compose.yaml"])
def test_variables_are_options_of_the_server(name: str) -> None:
    variables = {setting.variable for setting in SETTINGS.values()}
    assert set(re.findall(r"SIMPLEBUS_[A-Z_]+", render_file(name))) <= variables


def test_pipeline_files_run_a_supervised_archive(tmp_path: Path) -> None:
    unit = render_file("simplebus-pipeline.service")
    (command,) = re.findall(r"^ExecStart=/opt/simplebus/bin/simplebus (.*)$", unit, re.MULTILINE)
    arguments = [*command.split(), "--help"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    (tmp_path / "simplebus-pipeline.service").write_text(
        unit.replace("/opt/simplebus/bin/simplebus", "/bin/true")
    )
    process = subprocess.run(
        [
            require_program("systemd-analyze"),
            "verify",
            str(tmp_path / "simplebus-pipeline.service"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (process.returncode, process.stderr) == (0, "")
    image = render_file("Containerfile.pipeline")
    assert "http://127.0.0.1:8230/healthz" in image
    assert "--http 0.0.0.0:8230" in image


def test_kubernetes_probes_ask_for_health() -> None:
    service, stateful_set = yaml.safe_load_all(render_file("kubernetes.yaml"))
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz/live"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_every_panel_has_its_own_place() -> None:
    cells = [
        (x, y)
        for panel in build_dashboard()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len(build_dashboard()["panels"]) == len(TILES) + len(CHARTS)


def test_operating_page_lists_the_alerts() -> None:
    page = OPERATING.read_text().replace("\\|", "|")
    for rule in RULES:
        assert f"| `{rule['alert']}` | `{rule['expr']}` |" in page, rule["alert"]


def test_rules_and_configuration_are_valid(tmp_path: Path) -> None:
    for name in ("prometheus.yml", ALERTS):
        (tmp_path / name).write_text(render_file(name))
    status, output = run_promtool("check", "config", tmp_path / "prometheus.yml")
    assert status == 0, output
    assert f"{len(RULES)} rules found" in output


@pytest.fixture(scope="module")
def alert_outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Output of promtool, which expects no alerts, for series with and without a problem."""
    folder = tmp_path_factory.mktemp("rules")
    (folder / ALERTS).write_text(render_file(ALERTS))
    outputs = []
    for index in range(2):
        cases = [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": each} for name, each in series[index]],
                "alert_rule_test": [{"eval_time": "50m", "alertname": alert, "exp_alerts": []}],
            }
            for alert, series in SERIES.items()
        ]
        test = {"rule_files": [ALERTS], "evaluation_interval": "1m", "tests": cases}
        (folder / "test.yml").write_text(yaml.safe_dump(test))
        outputs.append(run_promtool("test", "rules", folder / "test.yml")[1])
    return outputs[0], outputs[1]


@pytest.mark.parametrize("alert", [rule["alert"] for rule in RULES])
def test_alert_fires_when_it_should(alert: str, alert_outputs: tuple[str, str]) -> None:
    with_problem, without = alert_outputs
    assert f"alertname: {alert}," in with_problem
    assert f"alertname: {alert}," not in without
    assert "SUCCESS" in without


def test_a_live_server_has_the_metrics_of_alerts_and_dashboard(tmp_path: Path) -> None:
    with run_server("--data-dir", str(tmp_path / "data")) as (program, url):
        with simplebus.connect_blocking(url) as bus:
            bus.publish(b"x", class_id="orders")
        text, deadline = "", time.monotonic() + PATIENCE_SECONDS
        while "simplebus_stored_messages{" not in text:  # Collected once a second.
            assert time.monotonic() < deadline
            time.sleep(0.1)
            url = f"http://{program.http_address}/metrics"
            with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as reply:
                text = reply.read().decode()
    status, output = run_promtool("check", "metrics", data=text)
    assert (status, output) == (0, "")
    exported = set(re.findall(r"^(\w+)", text, re.MULTILINE))
    used = {
        name
        for expression in (*(rule["expr"] for rule in RULES), *dashboard_expressions())
        for name in metric_names(expression)
    }
    bridge_metrics = {name for name in used if name.startswith("simplebus_bridge_")}
    assert used - bridge_metrics <= exported
