"""Metrics and monitoring page of bridges, as a separate program and in a server."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from load.ports import free_port
from simplebus import connect_blocking
from simplebus.bridge.transform import SkipReason
from tests.support.programs import run_server, running_program


def http_get(http_address: str, path: str) -> Any:
    try:
        with urllib.request.urlopen(f"http://{http_address}{path}", timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)


def wait_copier_names(http_address: str, *, are_up: bool) -> list[str]:
    """Return the names of the copiers, once all of them have the expected state."""
    while True:
        facts = http_get(http_address, "/facts")["facts"]
        rows = [
            row for table in facts["tables"] if table["key"] == "lanes" for row in table["rows"]
        ]
        if rows and all((row[1] == "up") is are_up for row in rows):
            return [row[0] for row in rows]
        time.sleep(0.05)  # The server limits the rate of requests.


def test_http_reports_copiers() -> None:
    with (
        run_server("--no-nats", "--no-http") as (_, source),
        run_server("--no-nats", "--no-http") as (target, url),
        running_program(
            "bridge", "--from", source, "--to", url, "--name", "b", "a", "--http", "0"
        ) as program,
    ):
        _, _, http_address = program.read_line().partition("simplebus bridge ready http=")
        (name,) = wait_copier_names(http_address, are_up=True)
        assert http_get(http_address, "/healthz")["status"] == "ok"
        with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
        assert metrics.count("simplebus_bridge_left_messages_total{") == len(SkipReason)
        assert re.search(r'^simplebus_bridge_left_\w+{.*reason="looped"} 0\.0$', metrics, re.M)
        target.process.kill()
        assert wait_copier_names(http_address, are_up=False) == [name]
        reply = http_get(http_address, "/healthz")
        assert reply["status"] == "unavailable"
        assert reply["why"].startswith(f"{name}: ")
        assert any(note["is_bad"] for note in http_get(http_address, "/facts")["facts"]["notes"])


def test_server_page_includes_its_bridges(tmp_path: Path) -> None:
    with run_server("--no-nats", "--no-http") as (_, target):
        file = tmp_path / "bus.toml"
        address = target.removeprefix("simplebus://")
        file.write_text(f'[[bridges]]\nname = "b"\nto = "{address}"\nclasses = ["a"]\n')
        with run_server("--no-nats", "--config", str(file)) as (program, _):
            assert len(wait_copier_names(program.http_address, are_up=True)) == 1
            facts = http_get(program.http_address, "/facts")["facts"]
            assert facts["title"] == "simplebus"
            assert "copied" in facts["flows"]


@contextmanager
def running_bridges(tmp_path: Path, port: int, *, is_part: bool) -> Iterator[tuple[str, str]]:
    """Run a bridge from a bus to `port`, in the bus or as a program. Yields the address of the bus
    and the HTTP address of the bridge.
    """
    options = ["--to", f"127.0.0.1:{port}", "--name", "b"]
    if is_part:
        file = tmp_path / "bus.toml"
        file.write_text(f'[[bridges]]\nname = "b"\nto = "127.0.0.1:{port}"\nclasses = ["a"]\n')
        with run_server("--no-nats", "--config", str(file)) as (program, source):
            yield source, program.http_address
        return
    with (
        run_server("--no-nats", "--no-http") as (_, source),
        running_program("bridge", "--from", source, *options, "a", "--http", "0") as program,
    ):
        yield source, program.read_line().partition("simplebus bridge ready http=")[2]


def wait_lag(lag: int, http_address: str) -> None:
    """Wait until the metric has this value, and check that the page and `top` agree."""
    while True:
        with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=60) as answer:
            top_lines = re.findall(
                r"^simplebus_bridge_lag_messages{.*} (.*)$", answer.read().decode(), re.M
            )
        if top_lines == [f"{lag}.0"]:
            break
        time.sleep(0.05)
    facts = http_get(http_address, "/facts")["facts"]
    (table,) = (table for table in facts["tables"] if table["key"] == "lanes")
    column = [column["title"] for column in table["columns"]].index("Lag")
    assert [row[column] for row in table["rows"]] == [lag]
    assert [tile["value"] for tile in facts["tiles"] if tile["title"] == "Lag"] == [lag]


@pytest.mark.parametrize("is_part", [True, False])
def test_reports_lag_while_target_is_away(is_part: bool, tmp_path: Path) -> None:
    port = free_port()
    with (
        running_bridges(tmp_path, port, is_part=is_part) as (source, http_address),
        connect_blocking(source) as bus,
    ):
        bus.publish_many([b"hello"] * 5, class_id="a")
        wait_lag(5, http_address)
        with run_server("--no-nats", "--no-http", "--port", str(port)):
            wait_lag(0, http_address)
        bus.publish_many([b"hello"] * 300, class_id="a")
        wait_lag(300, http_address)
        bus.publish_many([b"hello"] * 7, class_id="a")
        wait_lag(307, http_address)
        with run_server("--no-nats", "--no-http", "--port", str(port)):
            wait_lag(0, http_address)
