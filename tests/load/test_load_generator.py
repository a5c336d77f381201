"""The load generator detects defects of a broker, so that its figures can be trusted."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from load import broken_broker, broken_nats_server, generators, sdk
from load.brokers import running
from load.measure import RunOptions, measure
from load.processes import LoadError
from load.scenarios import SCENARIOS
from load.single_messages import NATS_PY
from simplebus.spark.jobs.report.traces import RUN_FILE
from tests.support.requirements import require_program

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> None:
    require_program("cc", "gcc", "clang")


@pytest.mark.parametrize("version", broken_broker.VERSIONS)
@pytest.mark.parametrize("acks", broken_broker.ACK_MODES)
def test_an_honest_broker_passes(acks: str, version: int) -> None:
    broken_broker.check_honest(acks, version)


@pytest.mark.parametrize("version", broken_broker.VERSIONS)
def test_a_repeated_message_is_counted(version: int) -> None:
    broken_broker.check_repeat(version)


# An extra message after the last one is detected only if it arrives before the generator ends.
@pytest.mark.parametrize(
    ("version", "fault"),
    [
        (v, fault)
        for v in broken_broker.VERSIONS
        for fault in broken_broker.faults(v)
        if fault != "invent"
    ],
)
def test_a_fault_is_named(version: int, fault: str) -> None:
    assert broken_broker.faults(version)[fault] in broken_broker.check_fault(fault, version)


@pytest.mark.parametrize("shape", broken_nats_server.SHAPES)
def test_an_honest_nats_server_passes(shape: str) -> None:
    broken_nats_server.run("", shape)


# Silence is detected by a timeout, which takes long.
@pytest.mark.parametrize("fault", sorted(broken_nats_server.FAULTS.keys() - {"invent", "silence"}))
def test_a_fault_of_a_nats_server_is_named(fault: str) -> None:
    assert broken_nats_server.FAULTS[fault] in broken_nats_server.check_fault(fault, "many")


def test_timed_programs_verify_messages() -> None:
    has_peer = sdk.is_peer_available()
    with sdk.open_environment(RunOptions(rounds=1), has_peer=has_peer) as bench:
        for measure in sdk.measures():
            is_shown_already = "1024 B" in measure.name or "asyncio" in measure.name
            if not is_shown_already and (has_peer or measure.kind == "simplebus"):
                assert measure.measure(bench, 100) > 0, measure.name


@pytest.mark.parametrize("name", ["requests", "confirmed", "one-way"])
def test_programs_of_single_messages_verify_them(name: str) -> None:
    (scenario,) = [scenario for scenario in SCENARIOS if scenario.name == name]
    has_peer = sdk.is_peer_available()
    chosen = [variant for variant in scenario.variants if has_peer or variant.protocol != NATS_PY]
    with ExitStack() as stack:
        kinds = dict.fromkeys(variant.kind for variant in chosen)
        brokers = {kind: stack.enter_context(running(kind)) for kind in kinds}
        for variant in chosen:
            sample = measure(brokers[variant.kind], variant.protocol, variant.work, count=100)
            assert sample.rate > 0, variant.name
            assert (sample.p99_us >= sample.p50_us > 0) == (name != "confirmed"), variant.name


def test_targets_name_variants_of_their_scenario() -> None:
    for scenario in SCENARIOS:
        names = {variant.name for variant in scenario.variants}
        assert len(names) == len(scenario.variants)
        for target in scenario.targets:
            assert {target.of, target.against} - {None} <= names, target.title


def test_a_short_run_against_the_real_server_reports_a_verified_rate(tmp_path: Path) -> None:
    report, traces = tmp_path / "figures.json", tmp_path / "traces"
    completed = subprocess.run(
        [
            *(sys.executable, "load/run.py", "angle", "--quick", "--rounds", "1"),
            *("--json", report, "--traces", traces),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert report.stat().st_size > 0
    assert "with '<'" in completed.stdout
    assert sorted(path.name for path in traces.iterdir()) == [
        RUN_FILE,
        "angle-plain-0.parquet",
        "angle-with-0.parquet",
    ]
    assert json.loads((traces / RUN_FILE).read_text()) == json.loads(report.read_text())


@pytest.mark.parametrize(
    ("source", "expected_error"),
    [
        ('#error "openssl/ssl.h: No such file or directory"\n', "tls cannot be compiled without "),
        ("x\n", "the load generator does not compile: "),
    ],
)
def test_missing_dependency_error_names_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected_error: str
) -> None:
    (tmp_path / "shim.c").write_text(source)
    monkeypatch.setattr(generators, "TLS", tmp_path)
    monkeypatch.setattr(generators, "BUILD", tmp_path / "build")
    with pytest.raises(LoadError, match=expected_error) as raised:
        generators.tls()
    assert ("apt-get install libssl-dev" in str(raised.value)) == ("openssl" in source)
