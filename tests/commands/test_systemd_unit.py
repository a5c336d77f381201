"""Tests of the systemd units, also by systemd-analyze."""

from __future__ import annotations

import grp
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import simplebus
from simplebus.cli import app
from simplebus.commands.systemd_unit import (
    find_closed_directory,
    find_hidden_directory,
    find_problems,
    installed_paths,
    quote_argument,
    render_service_unit,
    render_socket_unit,
)
from tests.support.programs import environment
from tests.support.requirements import require_program


def unit_settings(
    *arguments: str, installed_in: str = "/opt/x", port: int = 8888
) -> dict[str, str]:
    """Return the settings of a unit."""
    text = render_service_unit(
        arguments,
        ports=(port, 4222),
        drain_seconds=10.0,
        connections=500,
        installed_in=[Path(installed_in)],
    )
    settings = [line.split("=", 1) for line in text.splitlines() if not line.startswith("#")]
    return {words[0]: words[1] for words in settings if len(words) == 2}


def run_systemd_verify(text: str, folder: Path, *, kind: str = "service") -> str:
    """Run `systemd-analyze verify` on a unit. Return its output, and the exit status if not 0."""
    require_program("systemd-analyze")
    path = folder / f"simplebus.{kind}"
    path.write_text(text)
    process = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return (
        process.stdout
        + process.stderr
        + (f"status {process.returncode}" if process.returncode else "")
    )


@pytest.mark.parametrize(
    "arguments",
    [[], ["--host", "0.0.0.0"], ["--port", "80"], ["--host", "100%$HOME \"quoted\" 'too' \\n;"]],
)
def test_systemd_accepts_service_unit(tmp_path: Path, arguments: list[str]) -> None:
    for port in (8888, 80):
        text = render_service_unit(
            arguments,
            ports=(port, 4222),
            drain_seconds=10.0,
            connections=10_000,
            installed_in=installed_paths(),
        )
        assert run_systemd_verify(text, tmp_path) == ""


def test_systemd_accepts_socket_unit(tmp_path: Path) -> None:
    service = render_service_unit(
        [], ports=[8888], drain_seconds=1, connections=1, installed_in=installed_paths()
    )
    (tmp_path / "simplebus.service").write_text(service)
    text = render_socket_unit([("127.0.0.1", 8888), ("::1", 8888), ("127.0.0.1", 4222)])
    assert "\nListenStream=[::1]:8888\nListenStream=127.0.0.1:4222\n" in text
    assert run_systemd_verify(text, tmp_path, kind="socket") == ""


def test_systemd_rates_service_as_protected(tmp_path: Path) -> None:
    """The exposure is at most 2.0 of 10; systemd-analyze calls up to 4.9 OK."""
    require_program("systemd-analyze")
    path = tmp_path / "simplebus.service"
    path.write_text(
        render_service_unit(
            [], ports=[8888], drain_seconds=1, connections=1, installed_in=[Path("/opt/x")]
        )
    )
    command = ["systemd-analyze", "security", "--no-pager", "--offline=true", "--threshold=20"]
    process = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize(
    ("address", "reason"), [(("bus", 8888), "the name 'bus'"), (("::1", 0), "fixed ports, got 0")]
)
def test_socket_unit_requires_addresses_and_ports(address: tuple[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        render_socket_unit([address])


def test_command_prints_both_units() -> None:
    def run_systemd_unit(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["systemd-unit", *arguments])
        return result.exit_code, result.stdout

    status, text = run_systemd_unit("--port", "9", "--max-connections", "77")
    assert status == 0
    assert "serve --port 9 --max-connections 77\n" in text
    status, text = run_systemd_unit(
        "--socket", "--port", "9", "--no-nats", "--host", "10.0.0.1", "--no-http"
    )
    assert (status, text.count("ListenStream")) == (0, 1)
    assert "\nListenStream=10.0.0.1:9\n" in text
    assert run_systemd_unit("--socket", "--port", "0")[0] == 2


def test_unit_sets_watchdog_and_start_timeout() -> None:
    settings = unit_settings()
    assert settings["WatchdogSec"] == "30"
    assert settings["TimeoutStartSec"] == "15min"
    assert settings["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert settings["RestartPreventExitStatus"] == "2 74 78"


def test_systemd_reports_errors_in_units(tmp_path: Path) -> None:
    text = render_service_unit([], ports=[1], drain_seconds=1, connections=1, installed_in=[])
    assert "Unknown" in run_systemd_verify(text + "\nNonsense=yes\n", tmp_path)
    assert "no/such/python" in run_systemd_verify(
        text.replace(sys.executable, "/no/such/python"), tmp_path
    )


def test_unit_runs_this_installation() -> None:
    settings = unit_settings("--host", "0.0.0.0")
    assert settings["ExecStart"] == f"{sys.executable} -m simplebus serve --host 0.0.0.0"
    assert settings["Type"] == "notify"
    assert settings["DynamicUser"] == "yes"
    assert settings["Restart"] == "on-failure"


def test_unit_limits_exceed_drain_timeout_and_connections() -> None:
    settings = unit_settings()
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
def test_home_is_hidden_unless_installed_there(place: str, protection: str) -> None:
    assert unit_settings(installed_in=place)["ProtectHome"] == protection


@pytest.mark.parametrize(
    ("port", "capabilities"),
    [(0, ""), (1, "CAP_NET_BIND_SERVICE"), (1023, "CAP_NET_BIND_SERVICE"), (1024, "")],
)
def test_privileged_port_needs_capability(port: int, capabilities: str) -> None:
    settings = unit_settings(port=port)
    assert settings["AmbientCapabilities"] == settings["CapabilityBoundingSet"] == capabilities


@pytest.mark.parametrize(
    "word", ["plain", "--flag=1", "/a/b", "with space", 'a"b', "a\\b", "", "'"]
)
def test_arguments_are_quoted(word: str) -> None:
    """Quote as systemd and a shell both unquote, so without % and $, which systemd doubles."""
    assert shlex.split(quote_argument(word)) == [word]


def test_percent_and_dollar_are_escaped() -> None:
    assert quote_argument("100%") == "100%%"
    assert quote_argument("$HOME") == "$$HOME"


def test_unreadable_installation_is_reported(tmp_path: Path) -> None:
    inner = tmp_path / "closed" / "bin"
    inner.mkdir(parents=True)
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        if folder != Path("/tmp"):
            folder.chmod(0o755)
    assert find_closed_directory(inner / "python") is None
    (tmp_path / "closed").chmod(0o700)
    assert find_closed_directory(inner / "python") == tmp_path / "closed"
    assert f"{tmp_path / 'closed'} is closed to other users" in find_problems([inner / "python"])[0]


@pytest.mark.parametrize(
    ("path", "sees_home", "hidden"),
    [
        ("/tmp/venv/bin/python", True, "/tmp"),
        ("/var/tmp/venv/bin/python", False, "/var/tmp"),
        ("/home/me/users.toml", False, "/home"),
        ("/root/users.toml", False, "/root"),
        ("/home/me/users.toml", True, None),
        ("/opt/tmp/venv/bin/python", False, None),
        ("/etc/simplebus/users.toml", False, None),
    ],
)
def test_directories_that_the_unit_hides(path: str, sees_home: bool, hidden: str | None) -> None:
    expected = None if hidden is None else Path(hidden)
    assert find_hidden_directory(Path(path), sees_home=sees_home) == expected


def test_installation_and_files_in_hidden_directories_are_reported() -> None:
    with tempfile.NamedTemporaryFile(dir="/tmp") as config:
        problems = "\n".join(find_problems([Path("/tmp/python")], [Path(config.name)]))
    assert (
        f"{config.name} is not visible to the service, which sees nothing below /tmp: move it"
        in problems
    )
    assert "installed below /tmp, which is not visible" in problems


def test_editable_installation_is_reported(tmp_path: Path) -> None:
    """Run the package from its tree, and from a copy as a wheel installs it."""

    def report(folder: Path) -> str:
        process = subprocess.run(
            [sys.executable, "-P", "-m", "simplebus", "systemd-unit"],
            env=environment(PYTHONPATH=str(folder)),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert process.returncode == 0, process.stderr
        return process.stderr

    tree, site = tmp_path / "tree", tmp_path / "site-packages"
    for folder in (tree, site):
        # With bytecode: compiling takes longer than everything else here.
        shutil.copytree(Path(simplebus.__file__).parent, folder / "simplebus")
    metadata = site / "simplebus_broker-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: simplebus-broker\nVersion: 0.1.0\n"
    )
    assert f"simplebus runs from its source tree {tree}: install it" in report(tree)
    assert "source tree" not in report(site)


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    secret, public = tmp_path / "key.pem", tmp_path / "cert.pem"
    for file, mode in ((secret, 0o600), (public, 0o644)):
        file.touch()
        file.chmod(mode)
    assert "not readable" not in "\n".join(find_problems([], [public]))
    assert (
        f"{secret} is not readable for the service: give it to a group other than root, "
        in (find_problems([], [secret])[0])
    )
    assert find_problems([], [Path("a.toml")])[0].startswith("a.toml is a relative path")
    assert find_problems([], [tmp_path / "none"])[0] == f"{tmp_path / 'none'} does not exist"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to any group")
def test_group_of_secret_files_becomes_a_group_of_the_service(tmp_path: Path) -> None:
    """The group has access to the secrets with mode 640, as in the guide."""
    secret, root_secret = tmp_path / "users.toml", tmp_path / "key.pem"
    group = next(each for each in grp.getgrall() if each.gr_gid)
    for file, gid in ((secret, group.gr_gid), (root_secret, 0)):
        file.touch()
        file.chmod(0o640)
        os.chown(file, -1, gid)
    assert "not readable" not in "\n".join(find_problems([], [secret]))
    assert f"{root_secret} is not readable for the service" in find_problems([], [root_secret])[0]
    text = render_service_unit(
        [],
        ports=[8888],
        drain_seconds=1,
        connections=1,
        installed_in=installed_paths(),
        files=[secret, secret, root_secret],
    )
    assert f"\nSupplementaryGroups={group.gr_name}\n" in text
    assert run_systemd_verify(text, tmp_path) == ""


def test_unwritable_data_directory_is_reported() -> None:
    assert find_problems([], data_dir=Path("/srv/bus"))[0] == (
        "/srv/bus is not writable for the service: it can write only below /var/lib/simplebus"
    )
    for path in ("/var/lib/simplebus", "/var/lib/simplebus/one"):
        assert not any(
            "write only" in problem for problem in find_problems([], data_dir=Path(path))
        )
