"""What bridges tell operators: alone, and as part of a server."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from programs import program, server


def ask(at: str, path: str) -> Any:
    try:
        with urllib.request.urlopen(f"http://{at}{path}", timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)


def lanes_of(at: str, *, are_up: bool) -> list[str]:
    """The names of its lanes, once they have reached both ends, or have tried to."""
    while True:
        facts = ask(at, "/facts")["facts"]
        rows = [
            row for table in facts["tables"] if table["key"] == "lanes" for row in table["rows"]
        ]
        if rows and all((row[1] == "up") is are_up for row in rows):
            return [row[0] for row in rows]
        time.sleep(0.05)  # Who asks much faster is not answered.


def test_a_bridge_tells_how_its_lanes_do() -> None:
    with (
        server("--no-nats", "--no-http") as (_, near),
        server("--no-nats", "--no-http") as (far, url),
        program("bridge", "--from", near, "--to", url, "--name", "b", "a", "--http", "0") as it,
    ):
        _, _, at = it.line().partition("simplebus bridge ready http=")
        (name,) = lanes_of(at, are_up=True)
        assert ask(at, "/healthz")["status"] == "ok"
        far.process.kill()
        assert lanes_of(at, are_up=False) == [name]
        said = ask(at, "/healthz")
        assert said["status"] == "unavailable"
        assert said["why"].startswith(f"{name}: ")
        assert any(note["is_bad"] for note in ask(at, "/facts")["facts"]["notes"])


def test_a_server_tells_of_the_bridges_that_are_part_of_it(tmp_path: Path) -> None:
    with server("--no-nats", "--no-http") as (_, far):
        file = tmp_path / "bus.toml"
        address = far.removeprefix("simplebus://")
        file.write_text(f'[[bridges]]\nname = "b"\nto = "{address}"\nclasses = ["a"]\n')
        with server("--no-nats", "--config", str(file)) as (it, _):
            assert len(lanes_of(it.http, are_up=True)) == 1
            facts = ask(it.http, "/facts")["facts"]
            assert facts["title"] == "simplebus"
            assert "copied" in facts["flows"]
