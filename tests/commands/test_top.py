"""Tests of `simplebus top`."""

from __future__ import annotations

import io
import json
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import simplebus
from simplebus.commands.operate.top import (
    DashboardClient,
    escape_controls,
    fit_to_screen,
    format_value,
    sparkline,
)
from tests.support.programs import run_program, run_server

HOSTILE = "evil\x1b[31m[bold]name"


@pytest.fixture(scope="module")
def http_address() -> Iterator[str]:
    with (
        run_server("--no-nats", "--host", "127.0.0.1") as (program, url),
        simplebus.connect_blocking(url, name="till") as bus,
    ):
        bus.publish_many([b"x"] * 1500, class_id="orders")
        bus.publish(b"x", class_id=HOSTILE)
        bus.flush()
        yield program.http_address


def test_once_prints_readable_snapshot(http_address: str) -> None:
    status, output, errors = run_program("top", http_address, "--once")
    assert (status, errors) == (0, "")
    assert "● ready" in output
    assert "1,500" in output
    assert "\x1b" not in output
    assert "evil\\x1b[31m[bold]name" in output


def test_json_prints_facts_of_http_listener(http_address: str) -> None:
    status, output, _ = run_program("top", f"http://{http_address}/", "--json")
    assert status == 0
    with urllib.request.urlopen(f"http://{http_address}/facts", timeout=60) as answer:
        facts = json.load(answer)["facts"]
    printed_facts = json.loads(output)["facts"]
    assert [t["key"] for t in printed_facts["tables"]] == [t["key"] for t in facts["tables"]]
    assert printed_facts["tables"][0]["rows"] == facts["tables"][0]["rows"]


def test_address_is_an_argument_an_option_or_a_variable(http_address: str) -> None:
    """The option overrides the variable of the same meaning, and so does the argument."""
    url = f"http://{http_address}"
    for arguments, variable in (
        (("--url", url), "http://127.0.0.1:1"),
        ((url,), "http://127.0.0.1:1"),
        ((url, "--url", url), ""),
        ((), url),
    ):
        status, _, errors = run_program("top", *arguments, "--json", SIMPLEBUS_HTTP_URL=variable)
        assert (status, errors) == (0, ""), arguments
    assert run_program("top", "http://a:1", "--url", "http://b:1") == (
        2,
        "",
        "simplebus: expected one address, got http://a:1 and http://b:1\n",
    )


def test_top_authenticates_with_user(tmp_path: Path) -> None:
    users = tmp_path / "users.toml"
    users.write_text('[[users]]\nname = "eye"\npassword = "a long password"\n')
    with run_server("--no-nats", "--host", "127.0.0.1", "--users", str(users)) as (program, _):
        status, output, errors = run_program("top", program.http_address, "--once")
        assert (status, output) == (1, "")
        assert errors.startswith(
            f"simplebus: http://{program.http_address} replied 401 Unauthorized: this bus requires "
        )
        status, output, _ = run_program(
            *("top", program.http_address, "--once", "--user", "eye"),
            SIMPLEBUS_PASSWORD="a long password",
        )
        assert status == 0
        assert "● ready" in output


def test_unreachable_http_port_prints_one_sentence() -> None:
    assert run_program("top", "127.0.0.1:1") == (
        1,
        "",
        "simplebus: http://127.0.0.1:1 does not answer: [Errno 111] Connection refused\n",
    )
    for url, sentence in {
        "nats://127.0.0.1:4222": "expected http://HOST:PORT, got 'nats://127.0.0.1:4222'",
        "127.0.0.1:99999": "expected a port from 1 to 65535, got 'http://127.0.0.1:99999'",
        "http://eye:geheim@127.0.0.1:1": "the URL must not contain credentials: use --user, "
        "SIMPLEBUS_USER and SIMPLEBUS_PASSWORD",
    }.items():
        with pytest.raises(ValueError, match="^" + re.escape(sentence)):
            DashboardClient(url)
    status, _, errors = run_program("top", "nats://127.0.0.1:4222")
    assert (status, errors.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"INFO {}\r\n",  # Of the NATS port.
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\n\r\n{}",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
        b"HTTP/1.1 500 \x1b[2J\r\n\r\n",
    ],
    ids=lambda answer: str(answer[:40]),
)
def test_response_of_another_program_prints_one_sentence(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def respond() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(answer)

        thread = threading.Thread(target=respond)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(
            OSError,
            match=f"^{url} (is not an HTTP port|does not answer|replied|closed the connection)",
        ) as raised:
            DashboardClient(url).fetch()
        thread.join()
    assert "\x1b" not in str(raised.value)


def test_figures_are_readable() -> None:
    assert format_value(1234567, "count") == "1,234,567"
    assert format_value(1536, "bytes") == "1.5 KiB"
    assert format_value(0.0123, "seconds") == "12.3 ms"
    assert format_value(0.00012, "seconds") == "120 µs"
    assert format_value(300, "seconds") == "5 min"
    assert (
        format_value(None, "seconds")
        == format_value("", "text")
        == format_value(0, "seconds")
        == "–"
    )
    assert escape_controls("a\nb\x1b") == "a\\nb\\x1b"


def test_sparkline_height_follows_values() -> None:
    assert sparkline([0, 1, 2]) == "▁▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""


def column(title: str, unit: str = "count", *, is_flow: bool = False) -> dict[str, object]:
    return {"title": title, "unit": unit, "is_flow": is_flow}


SAID = {
    "rates": {"flows": {"published": [0.0] * 100 + [7.0, 8.0]}},
    "facts": {
        "title": "simplebus",
        "subtitle": "bus x",
        "health": {"ready": True, "draining": False, "why": ""},
        "tiles": [{"title": f"Tile {n}", "value": n, "unit": ""} for n in range(8)],
        "notes": [{"about": "class 'orders'", "sentence": "it waits. " * 20, "is_bad": False}],
        "tables": [
            {
                "key": key,
                "title": key,
                "left_out": 0,
                "columns": [
                    column("Name", "text"),
                    *(column("Nothing") for _ in range(5)),
                    column("Published", is_flow=True),
                    column("Why", "text"),
                ],
                "rows": [[f"{key} {n}", 0, 0, 0, 0, 0, 123_456, "because " * 9] for n in range(50)],
            }
            for key in ("classes", "sessions")
        ],
    },
}


@pytest.mark.parametrize(
    ("width", "height"), [(40, 15), (60, 20), (80, 24), (120, 40), (200, 60), (20, 5)]
)
def test_screen_shows_what_fits_its_size(width: int, height: int) -> None:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True)
    facts = DashboardClient("127.0.0.1:1")
    facts.growth_rates(SAID)
    picture = fit_to_screen(console, SAID, facts.growth_rates(SAID))
    lines = ["".join(part.text for part in line) for line in console.render_lines(picture)]
    assert all(len(line) == width for line in lines)
    assert lines[0].startswith("╭─ ● ready")
    if width >= 60:
        (flow,) = (line for line in lines if "published" in line)
        assert flow.rstrip(" │").endswith("▇█")
    if height >= 20:
        assert len(lines) <= height
        assert lines[-1].startswith("╰")
        for key in ("classes", "sessions"):
            (row,) = (line for line in lines if f" {key} 0 " in line)
            assert "123,456" in row


def test_rates_are_growths_between_the_snapshots_of_the_server() -> None:
    def snapshot(taken_at: float, published: int, delivered: int) -> dict[str, Any]:
        row = ["orders", published, delivered]
        return {"facts": {"taken_at": taken_at, "tables": [{"key": "classes", "rows": [row]}]}}

    client = DashboardClient("127.0.0.1:1")
    assert client.growth_rates(snapshot(10.0, 0, 0)) == {"classes": {}}
    rates = {"classes": {"orders": [None, 100.0, 50.0]}}
    assert client.growth_rates(snapshot(10.5, 50, 25)) == rates
    assert client.growth_rates(snapshot(10.5, 50, 25)) == rates  # The server has reused it.
    assert client.growth_rates(snapshot(1.0, 5, 5)) == {"classes": {}}  # It has restarted.


def test_outdated_screen_shows_the_error() -> None:
    console = Console(width=80, height=24, file=io.StringIO())
    picture = fit_to_screen(console, SAID, {}, "it does not \x1banswer")
    assert str(picture.title) == "it does not \\x1banswer"
