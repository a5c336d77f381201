"""Detection of PyPI's unrelated package `simplebus`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from simplebus.console.installation import find_conflict, install_command, installed_version
from tests.support.programs import environment

ROOT = Path(__file__).resolve().parents[2]


def install_distribution(folder: Path, *, entry_point: str = "") -> None:
    """Write the metadata of an installed distribution called `simplebus`."""
    metadata = folder / "simplebus-1.0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: simplebus\nVersion: 1.0.1\n")
    (metadata / "entry_points.txt").write_text(f"[console_scripts]\nsimplebus = {entry_point}\n")


def test_install_command_is_the_one_of_the_guide() -> None:
    guide = (ROOT / "protocol" / "guide" / "spark.md").read_text()
    assert f"\n{install_command('spark')}\n" in guide
    assert install_command() in (ROOT / "protocol" / "guide" / "operating.md").read_text()


def test_no_text_installs_the_distribution_from_pypi() -> None:
    texts = [ROOT / "README.md", *ROOT.glob("protocol/**/*.md"), *ROOT.glob("simplebus/**/*.py")]
    pattern = re.compile(r"pip install [^`\n]*simplebus-broker")
    assert [path for path in texts if pattern.search(path.read_text())] == []


def test_the_tests_run_an_installed_distribution() -> None:
    assert installed_version() is not None


def test_reports_the_unrelated_package_and_how_to_remove_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_distribution(tmp_path, entry_point="other:main")
    monkeypatch.syspath_prepend(str(tmp_path))
    conflict = find_conflict()
    assert conflict is not None
    assert "'simplebus' 1.0.1" in conflict
    assert "pip uninstall -y simplebus && pip install . --force-reinstall" in conflict


def test_accepts_an_installation_under_the_former_distribution_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_distribution(tmp_path, entry_point="simplebus.cli:main")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_conflict() is None


def test_a_command_fails_when_the_unrelated_package_is_installed(tmp_path: Path) -> None:
    install_distribution(tmp_path, entry_point="other:main")
    command = subprocess.run(
        [sys.executable, "-m", "simplebus", "--version"],
        env=environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert command.returncode == 1
    assert "pip uninstall -y simplebus" in command.stderr
