"""The load generator notices what a broker does wrong; else its figures would prove nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from needs import needed  # noqa: E402

from load import canary  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> None:
    needed("cc", "gcc", "clang")


@pytest.mark.parametrize("acks", canary.ACK_MODES)
def test_an_honest_broker_passes(acks: str) -> None:
    canary.check_honest(acks)


def test_a_repeated_message_is_counted() -> None:
    canary.check_repeat()


# An invented message behind the last one is noticed only if it comes before the generator leaves.
@pytest.mark.parametrize("fault", sorted(set(canary.FAULTS) - {"invent"}))
def test_a_fault_is_named(fault: str) -> None:
    assert str(canary.STRICKEN) in canary.check_fault(fault)


def test_a_short_run_against_the_real_server_reports_a_verified_rate(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "load/run.py", "angle", "--quick", "--rounds", "1", "--json", figures],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures.stat().st_size > 0
    assert "with '<'" in done.stdout
