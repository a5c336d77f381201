"""What a gateway tells operators: seen from outside."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from programs import program
from prometheus_client.parser import text_string_to_metric_families

MODULES = """
[modules.clock]
module = "timer"
settings = { every = 0.05 }

[modules.log]
module = "logger"
hears = ["clock"]
"""


def test_a_gateway_tells_how_its_modules_do(tmp_path: Path) -> None:
    file = tmp_path / "modules.toml"
    file.write_text(MODULES)
    with program("gateway", str(file), "--http", "0") as it:
        ready, _, at = it.line().partition(" http=")
        assert ready == "simplebus gateway ready modules=2"

        def ask(path: str) -> bytes:
            with urllib.request.urlopen(f"http://{at}{path}", timeout=20) as answer:
                body = answer.read()
            assert isinstance(body, bytes)
            return body

        assert json.loads(ask("/healthz"))["status"] == "ok"
        facts = json.loads(ask("/facts"))["facts"]
        assert facts["title"] == "simplebus gateway"
        modules = next(table for table in facts["tables"] if table["key"] == "modules")
        assert [(row[0], row[2]) for row in modules["rows"]] == [
            ("clock", "running"),
            ("log", "running"),
        ]
        families = text_string_to_metric_families(ask("/metrics").decode())
        running = next(each for each in families if each.name == "simplebus_gateway_module_running")
        assert {s.labels["module"]: s.value for s in running.samples} == {"clock": 1, "log": 1}
