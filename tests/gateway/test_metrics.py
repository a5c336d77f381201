"""Metrics and HTTP pages of a gateway."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.programs import PATIENCE_SECONDS, running_program

OWN = """
from simplebus.gateway import Module


class Tells(Module):
    def health(self):
        return {"level": 7, "mood": "fine"}


class Fails(Module):
    async def receive(self, message):
        raise ValueError("on purpose")
"""

MODULES = """
[modules.clock]
module = "timer"
settings = { every = 0.05 }

[modules.log]
module = "logger"
hears = ["clock"]
"""


def test_http_reports_modules(tmp_path: Path) -> None:
    file = tmp_path / "modules.toml"
    file.write_text(MODULES)
    with running_program("gateway", str(file), "--http", "0") as program:
        ready, _, http_address = program.read_line().partition(" http=")
        assert ready == "simplebus gateway ready modules=2"

        def http_get(path: str) -> bytes:
            with urllib.request.urlopen(f"http://{http_address}{path}", timeout=60) as answer:
                body = answer.read()
            assert isinstance(body, bytes)
            return body

        assert json.loads(http_get("/healthz"))["status"] == "ok"
        snapshot = json.loads(http_get("/facts"))["facts"]
        assert snapshot["title"] == "simplebus gateway"
        modules = next(table for table in snapshot["tables"] if table["key"] == "modules")
        assert [(row[0], row[2]) for row in modules["rows"]] == [
            ("clock", "running"),
            ("log", "running"),
        ]
        families = text_string_to_metric_families(http_get("/metrics").decode())
        running = next(
            family for family in families if family.name == "simplebus_gateway_module_running"
        )
        assert {s.labels["module"]: s.value for s in running.samples} == {"clock": 1, "log": 1}


def test_snapshot_shows_failures_and_health(tmp_path: Path) -> None:
    file = tmp_path / "modules.toml"
    (tmp_path / "own_of_test.py").write_text(OWN)
    file.write_text(
        '[modules.tells]\nmodule = "own_of_test:Tells"\n'
        '[modules.fails]\nmodule = "own_of_test:Fails"\nhears = ["clock"]\n' + MODULES
    )
    with running_program("gateway", str(file), "--http", "0") as program:
        http_address = program.read_line().partition(" http=")[2]
        deadline = time.monotonic() + PATIENCE_SECONDS
        metrics = health_lines = b""
        while b'_module_value{module="tells",what="level"} 7' not in metrics or not health_lines:
            assert time.monotonic() < deadline, (metrics, health_lines)
            with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=60) as answer:
                metrics = answer.read()
            try:
                with urllib.request.urlopen(f"http://{http_address}/healthz", timeout=60) as answer:
                    assert answer.status == 200
            except urllib.error.HTTPError as error:
                health_lines = error.read()
        assert b"failed: fails" in health_lines
