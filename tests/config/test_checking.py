"""What only a look at a whole file finds: `simplebus check-config`."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from certificates import Authority
from typer.testing import CliRunner

from simplebus import cli


def checked(file: Path) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["check-config", str(file)])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[serve]\nport = 4222", "2: serve.port: nats.port is 4222 already"),
        ("[nats]\nport = 8888", "2: nats.port: serve.port is 8888 already"),
        ("[serve]\nport = 9\nhttp-port = 9", "3: serve.http-port: serve.port is 9 already"),
        (
            "[serve]\nport = 9\nhost = '10.0.0.1'\nhttp-port = 9\nhttp-host = '0.0.0.0'",
            "4: serve.http-port: serve.port is 9 already",
        ),
    ],
)
def test_two_doors_have_two_ports(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "bus.toml"
    file.write_text(text)
    assert checked(file) == (78, f"simplebus: {file}:{told}\n")


@pytest.mark.parametrize(
    "text",
    [
        "[serve]\nport = 4222\n[nats]\nport = 9",
        "[serve]\nport = 9\nhost = '10.0.0.1'\nhttp-port = 9\nhttp-host = '10.0.0.2'",
        "[serve]\nport = 0\nhttp-port = 0\n[nats]\nport = 0",
    ],
)
def test_or_one_at_two_addresses(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bus.toml"
    file.write_text(text)
    assert checked(file) == (0, f"{file} is fine\n")


def test_a_certificate_whose_time_is_over_is_a_warning(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("old", later=datetime.timedelta(days=-3))
    pair.key.chmod(0o600)
    file = tmp_path / "bus.toml"
    file.write_text("[tls]\ncert = 'old.pem'\nkey = 'old.key'")
    status, said = checked(file)
    assert status == 0
    assert f"the certificate {pair.cert} has expired: clients that check it stay away" in said


def test_a_data_directory_that_cannot_be_is_told_also_to_root(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text("[serve]\ndata-dir = '/proc/nope'")
    status, said = checked(file)
    assert status == 78
    assert said.startswith(f"simplebus: {file}:2: serve.data-dir: /proc/nope cannot be made: ")
