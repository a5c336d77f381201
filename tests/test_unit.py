"""The systemd unit: its blanks, and systemd's own opinion of it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needed

from simplebus.unit import complaints, installation, quoted, unit, unreadable


def made(*arguments: str, installed_in: str = "/opt/x", port: int = 8888) -> dict[str, str]:
    """The settings of a unit."""
    text = unit(
        arguments,
        ports=(port, 4222),
        drain_seconds=10.0,
        connections=500,
        installed_in=[Path(installed_in)],
    )
    settings = [line.split("=", 1) for line in text.splitlines() if not line.startswith("#")]
    return {words[0]: words[1] for words in settings if len(words) == 2}


def verified(text: str, folder: Path) -> str:
    """What systemd has to say against a unit."""
    needed("systemd-analyze")
    path = folder / "simplebus.service"
    path.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout + done.stderr + (f"status {done.returncode}" if done.returncode else "")


@pytest.mark.parametrize(
    "arguments",
    [[], ["--host", "0.0.0.0"], ["--port", "80"], ["--host", "100%$HOME \"quoted\" 'too' \\n;"]],
)
def test_systemd_has_nothing_against_it(tmp_path: Path, arguments: list[str]) -> None:
    for port in (8888, 80):
        text = unit(
            arguments,
            ports=(port, 4222),
            drain_seconds=10.0,
            connections=10_000,
            installed_in=installation(),
        )
        assert verified(text, tmp_path) == ""


def test_systemd_would_say_so_if_it_had(tmp_path: Path) -> None:
    text = unit([], ports=[1], drain_seconds=1, connections=1, installed_in=[])
    assert "Unknown" in verified(text + "\nNonsense=yes\n", tmp_path)
    assert "no/such/python" in verified(text.replace(sys.executable, "/no/such/python"), tmp_path)


def test_it_runs_this_installation() -> None:
    settings = made("--host", "0.0.0.0")
    assert settings["ExecStart"] == f"{sys.executable} -m simplebus serve --host 0.0.0.0"
    assert settings["Type"] == "notify"
    assert settings["DynamicUser"] == "yes"
    assert settings["Restart"] == "on-failure"


def test_it_may_stop_for_longer_than_it_drains_and_open_more_than_its_connections() -> None:
    settings = made()
    assert int(settings["TimeoutStopSec"]) > 10
    assert int(settings["LimitNOFILE"]) > 500


@pytest.mark.parametrize(
    ("place", "protection"),
    [
        ("/opt/venv/bin/python", "yes"),
        ("/usr/bin/python3", "yes"),
        ("/homestead/bin/python", "yes"),
        ("/home/me/venv/bin/python", "read-only"),
        ("/root/.local/bin/python", "read-only"),
    ],
)
def test_homes_are_hidden_unless_it_is_installed_in_one(place: str, protection: str) -> None:
    assert made(installed_in=place)["ProtectHome"] == protection


@pytest.mark.parametrize(
    ("port", "capabilities"),
    [(0, ""), (1, "CAP_NET_BIND_SERVICE"), (1023, "CAP_NET_BIND_SERVICE"), (1024, "")],
)
def test_it_may_bind_a_privileged_port_only_if_it_is_told_to(port: int, capabilities: str) -> None:
    settings = made(port=port)
    assert settings["AmbientCapabilities"] == settings["CapabilityBoundingSet"] == capabilities


@pytest.mark.parametrize(
    "word", ["plain", "--flag=1", "/a/b", "with space", 'a"b', "a\\b", "", "'"]
)
def test_words_are_quoted_as_a_shell_would_unquote_them(word: str) -> None:
    """Where systemd's rules and the shell's agree: not for % and $, which are doubled."""
    assert shlex.split(quoted(word)) == [word]


def test_percent_and_dollar_are_doubled() -> None:
    assert quoted("100%") == "100%%"
    assert quoted("$HOME") == "$$HOME"


def test_a_folder_that_is_closed_to_the_service_is_complained_of(tmp_path: Path) -> None:
    inner = tmp_path / "closed" / "bin"
    inner.mkdir(parents=True)
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        if folder != Path("/tmp"):
            folder.chmod(0o755)
    assert unreadable(inner / "python") is None
    (tmp_path / "closed").chmod(0o700)
    assert unreadable(inner / "python") == tmp_path / "closed"
    assert f"{tmp_path / 'closed'} is closed to other users" in complaints([inner / "python"])[0]


def test_files_that_the_service_cannot_read_are_complained_of(tmp_path: Path) -> None:
    secret, public = tmp_path / "key.pem", tmp_path / "cert.pem"
    for file, mode in ((secret, 0o600), (public, 0o644)):
        file.touch()
        file.chmod(mode)
    assert not any(str(public) in complaint for complaint in complaints([], [public]))
    (closed, *_) = complaints([], [secret])
    assert closed.startswith(f"{secret} is closed to other users, and so to the service: give it")
    assert complaints([], [Path("a.toml")])[0].startswith("a.toml is not found by the service")
    assert complaints([], [tmp_path / "none"])[0] == f"{tmp_path / 'none'} does not exist"


def test_a_directory_that_the_service_may_not_write_into_is_told() -> None:
    assert complaints([], data_dir=Path("/srv/bus"))[0] == (
        "/srv/bus is closed to the service: it may write only in /var/lib/simplebus and below"
    )
    for path in ("/var/lib/simplebus", "/var/lib/simplebus/one"):
        assert not any("write only" in each for each in complaints([], data_dir=Path(path)))
