"""Cost of TLS and of permissions, against the same flow without, and against nats-server with TLS.

    python load/run.py tls permissions

The generators use the servers' TLS library. Their own cost counts against TLS, above all on
machines with few cores. Each round measures everything once.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from load import permission_cost
from load.brokers import (
    HOST,
    START_S,
    RunningBroker,
    environment,
    find_program,
    is_available,
    running,
)
from load.certificates import Certificate, make_certificate
from load.generators import tls as preloaded
from load.measure import Flow, RunOptions, Sample, measure
from load.processes import Process
from load.report import Row

SECONDS = 2.0
QUICK_SECONDS = 1.0
SIZE_BYTES = 128
PIECE = 256 * 1024

PERMISSIONS = """
[[users]]
name = "load"
addresses = ["127.0.0.0/8"]
[users.permissions]
publish = {{ allow = [{allow}], deny = [{deny}] }}
subscribe = {{ allow = [{allow}], deny = [{deny}] }}
"""


# TLS ---------------------------------------------------------------------------------------------


def tls(run_options: RunOptions) -> list[Row]:
    """Return rates with TLS 1.3 against rates without."""
    flow = Flow(size_bytes=SIZE_BYTES)
    with tempfile.TemporaryDirectory(prefix="simplebus-load-") as folder, ExitStack() as stack:
        certificate = make_certificate(Path(folder))
        args = ("--tls-cert", str(certificate.cert), "--tls-key", str(certificate.key))
        plain = stack.enter_context(running("simplebus", server_args=run_options.server_args))
        encrypted = stack.enter_context(
            running("simplebus", server_args=(*run_options.server_args, *args))
        )
        brokers = {
            "plain": (plain, "simplebus"),
            "TLS": (encrypted, "simplebus"),
        }
        if is_available("nats"):
            brokers["nats"] = (stack.enter_context(running("nats")), "nats")
            nats_with_tls = stack.enter_context(_nats_with_tls(Path(folder), certificate))
            brokers["nats, TLS"] = (nats_with_tls, "nats")
        tls_environment = {"LD_PRELOAD": str(preloaded()), "LOAD_TLS_CA": str(certificate.cert)}
        found = _rounds(brokers, dict.fromkeys(brokers, flow), run_options, tls_environment)
    rows = [_row("tls", "128 B, TLS 1.3 against plain", found, "TLS", "plain", 0.35)]
    if "nats" in found:
        rows += [
            _row("tls", "128 B, TLS 1.3 against nats-server's", found, "TLS", "nats, TLS", 1.0),
            _row("tls", "nats-server, TLS 1.3 against plain", found, "nats, TLS", "nats", None),
        ]
    for name, samples in found.items():
        rates = [sample.rate / 1e6 for sample in samples]
        cpu = sorted(sample.cpu_us for sample in samples)[len(samples) // 2]
        rows.append(Row("tls", f"128 B, {name}", rates, "M/s", note=f"{cpu:.2f} us of the broker"))
    return rows


def _rounds(
    brokers: dict[str, tuple[RunningBroker, str]],
    flows: dict[str, Flow],
    run_options: RunOptions,
    tls_environment: dict[str, str] | None = None,
) -> dict[str, list[Sample]]:
    """Return samples by name and round. Names that end in TLS get the variables
    `tls_environment`.
    """
    seconds = QUICK_SECONDS if run_options.quick else SECONDS
    rates: dict[str, float] = {}

    def measure_one(name: str, count: int) -> Sample:
        broker, protocol = brokers[name]
        with environment(tls_environment if tls_environment and name.endswith("TLS") else {}):
            return measure(broker, protocol, flows[name], count=count)

    for name in brokers:
        rates[name] = measure_one(name, int(measure_one(name, 100_000).rate * 0.3)).rate
    found: dict[str, list[Sample]] = {name: [] for name in brokers}
    for _ in range(run_options.rounds):
        for name in brokers:
            sample = measure_one(name, int(rates[name] * seconds))
            found[name].append(sample)
            rates[name] = sample.rate
    return found


def _row(
    scenario: str,
    title: str,
    found: dict[str, list[Sample]],
    of: str,
    against: str,
    target: float | None,
) -> Row:
    pairs = zip(found[of], found[against], strict=True)
    return Row(scenario, title, [a.rate / b.rate for a, b in pairs], "x", target)


@contextmanager
def _nats_with_tls(folder: Path, certificate: Certificate) -> Iterator[RunningBroker]:
    config = folder / "tls.conf"
    config.write_text(
        f'tls {{ cert_file: "{certificate.cert}", key_file: "{certificate.key}", '
        "handshake_first: true }"
    )
    command = [find_program("nats-server"), "-a", HOST, "-p", "-1", "-c", config]
    with Process("nats-server", [str(word) for word in command]) as process:
        line = process.wait_for_line("Listening for client connections", timeout_s=START_S)
        found = re.search(rf"{re.escape(HOST)}:(\d+)", line)
        assert found is not None, line
        yield RunningBroker("nats", int(found[1]), process)


# Permissions -------------------------------------------------------------------------------------


def permissions(run_options: RunOptions) -> list[Row]:
    """Return rates with permissions against rates without, and the cost in the core."""
    plain, envelopes = Flow(size_bytes=SIZE_BYTES), Flow(size_bytes=SIZE_BYTES, channel="load.f.1")
    with tempfile.TemporaryDirectory(prefix="simplebus-load-") as folder, ExitStack() as stack:
        files = {}
        for name, allow, deny in (
            ("by class", ["1", "6*"], ["7", "secret*"]),
            ("by channel", ["1 #", "6*"], ["1 secret.#", "1 other.*"]),
        ):
            files[name] = Path(folder) / f"{name.replace(' ', '-')}.toml"
            files[name].write_text(PERMISSIONS.format(allow=_listed(allow), deny=_listed(deny)))
            files[name].chmod(0o600)
        unrestricted = stack.enter_context(
            running("simplebus", server_args=run_options.server_args)
        )
        restricted = {
            name: stack.enter_context(
                running("simplebus", server_args=(*run_options.server_args, "--users", str(path)))
            )
            for name, path in files.items()
        }
        brokers = {
            "no permissions": (unrestricted, "simplebus"),
            "by class": (restricted["by class"], "simplebus"),
            "no permissions, envelopes": (unrestricted, "simplebus-2"),
            "by class, envelopes": (restricted["by class"], "simplebus-2"),
            "by channel, envelopes": (restricted["by channel"], "simplebus-2"),
        }
        flows = {name: envelopes if "envelopes" in name else plain for name in brokers}
        found = _rounds(brokers, flows, run_options)
    rows = []
    for name in ("by class", "by class, envelopes", "by channel, envelopes"):
        against = "no permissions, envelopes" if "envelopes" in name else "no permissions"
        rows.append(_row("permissions", f"128 B, {name}, against none", found, name, against, 0.95))
        cpu = [a.cpu_us / b.cpu_us for a, b in zip(found[name], found[against], strict=True)]
        rows.append(
            Row("permissions", f"broker's CPU, {name}", cpu, "x", 1.05, less_is_better=True)
        )
    return rows + permission_cost.core_cost(run_options)


def _listed(rules: list[str]) -> str:
    return ", ".join(f'"{rule}"' for rule in rules)
