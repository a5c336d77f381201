"""The load generator notices what a broker does wrong; else its figures would prove nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from load import canary, canary_nats, generators, sdk
from load.measure import Manner
from load.processes import LoadError
from simplebus.spark.jobs.report.traces import RUN_FILE
from tests.support.requirements import require_program

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> None:
    require_program("cc", "gcc", "clang")


@pytest.mark.parametrize("version", canary.VERSIONS)
@pytest.mark.parametrize("acks", canary.ACK_MODES)
def test_an_honest_broker_passes(acks: str, version: int) -> None:
    canary.check_honest(acks, version)


@pytest.mark.parametrize("version", canary.VERSIONS)
def test_a_repeated_message_is_counted(version: int) -> None:
    canary.check_repeat(version)


# An invented message behind the last one is noticed only if it comes before the generator leaves.
@pytest.mark.parametrize(
    ("version", "fault"),
    [(v, fault) for v in canary.VERSIONS for fault in canary.faults(v) if fault != "invent"],
)
def test_a_fault_is_named(version: int, fault: str) -> None:
    assert canary.faults(version)[fault] in canary.check_fault(fault, version)


@pytest.mark.parametrize("shape", canary_nats.SHAPES)
def test_an_honest_nats_server_passes(shape: str) -> None:
    canary_nats.run("", shape)


# Silence is noticed by the clock, as above, which takes its time.
@pytest.mark.parametrize("fault", sorted(canary_nats.FAULTS.keys() - {"invent", "silence"}))
def test_a_fault_of_a_nats_server_is_named(fault: str) -> None:
    assert canary_nats.FAULTS[fault] in canary_nats.check_fault(fault, "many")


@pytest.mark.long
def test_every_program_that_is_timed_verifies_what_comes() -> None:
    has_peer = sdk.peer_is_there()
    with sdk.open_bench(Manner(rounds=1), has_peer=has_peer) as bench:
        for measure in sdk.measures():
            is_shown_already = "1024 B" in measure.name or "asyncio" in measure.name
            if not is_shown_already and (has_peer or measure.kind == "simplebus"):
                assert measure.take(bench, 500) > 0, measure.name


@pytest.mark.long
def test_a_short_run_against_the_real_server_reports_a_verified_rate(tmp_path: Path) -> None:
    figures, traces = tmp_path / "figures.json", tmp_path / "traces"
    done = subprocess.run(
        [
            *(sys.executable, "load/run.py", "angle", "--quick", "--rounds", "1"),
            *("--json", figures, "--traces", traces),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures.stat().st_size > 0
    assert "with '<'" in done.stdout
    assert sorted(path.name for path in traces.iterdir()) == [
        RUN_FILE,
        "angle-plain-0.parquet",
        "angle-with-0.parquet",
    ]
    assert json.loads((traces / RUN_FILE).read_text()) == json.loads(figures.read_text())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('#error "openssl/ssl.h: No such file or directory"\n', "tls cannot be compiled without "),
        ("x\n", "the load generator does not compile: "),
    ],
)
def test_what_is_lacking_is_said_with_where_it_is_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    (tmp_path / "shim.c").write_text(source)
    monkeypatch.setattr(generators, "TLS", tmp_path)
    monkeypatch.setattr(generators, "BUILD", tmp_path / "build")
    with pytest.raises(LoadError, match=said) as caught:
        generators.tls()
    assert ("apt-get install libssl-dev" in str(caught.value)) == ("openssl" in source)
