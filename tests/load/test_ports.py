"""Port allocation for programs that restart at the same address."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from load import ports
from load.ports import HOST, free_port, free_ports
from tests.support.programs import ROOT


@pytest.fixture(autouse=True)
def _own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_ports_are_unique_across_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from load.ports import free_ports; print(*free_ports(3))"]
    own_ports = free_ports(3)
    output = subprocess.run(
        command, cwd=ROOT, env={"TMPDIR": str(tmp_path)}, capture_output=True, check=True
    )
    own_ports += [*map(int, output.stdout.split()), free_port()]
    assert len(set(own_ports)) == 7


def test_ports_in_use_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HOST, 0)) as listener:
        used_port = listener.getsockname()[1]
        monkeypatch.setattr(ports, "_candidates", lambda: range(used_port, used_port + 1))
        with pytest.raises(OSError, match="0 of 1 ports were free"):
            free_port()


def test_ports_wrap_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_candidates", lambda: range(1, 5))
    monkeypatch.setattr(ports, "_is_free", lambda port: port != 2)
    assert [free_ports(2), free_ports(2)] == [[1, 3], [4, 1]]


@pytest.mark.parametrize(
    ("system", "first"),
    [("32768\t60999\n", 10_000), ("1024 40000", 40_001), ("1024 65535", 10_000)],
)
def test_ports_are_outside_ephemeral_range(
    system: str, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "range"
    file.write_text(system)
    monkeypatch.setattr(ports, "_RANGE", file)
    assert ports._candidates()[0] == first
