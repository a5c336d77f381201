"""The .NET client: its speed beside the Python SDK, and killed servers.

    python load/run.py dotnet dotnet-kills [--quick]

It needs the SDK that `.ci/install-dotnet` installs. The programs are in `tests/dotnet/client`. Each
round measures .NET and Python in turn, against the same server. Publisher and subscriber are
processes; a message counts when it is confirmed, verified, and its ack applied. Confirmed messages
that a killed server has lost or stored twice are counted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from time import monotonic, sleep

from load.brokers import REPOSITORY, SERVE, RunningBroker, disabled_listeners, running
from load.measure import RunOptions, probe_nothing_in_flight
from load.ports import HOST, free_port
from load.processes import LoadError, Process
from load.report import Row
from load.sdk import Program, write_payloads
from load.sdk_job import CLASS, Job

BATCH_COUNT, BATCH_QUICK = 3_000_000, 500_000
SINGLE_COUNT, SINGLE_QUICK = 10_000, 2_000
SIZE_BYTES = 16
KILLS, QUICK_KILLS = 50, 3
LIFE_S = 0.5  # Longest time from the first confirm of a server until it is killed.
POLL_S = 0.02
TIMEOUT_S = 120.0
PROJECT = REPOSITORY / "tests" / "dotnet" / "client" / "ClientTests.csproj"
BUILD = REPOSITORY / "load" / ".build" / "dotnet"


def find_sdk() -> Path:
    folder = Path(os.environ.get("TESTS_DOTNET") or REPOSITORY / ".dotnet").resolve()
    if not (folder / "dotnet").exists():
        raise LoadError(f"there is no .NET SDK in {folder}: run .ci/install-dotnet")
    return folder / "dotnet"


@cache
def build_programs() -> tuple[Path, Path]:
    """Build the programs; return the commands that run them."""
    sdk = find_sdk()
    shutil.rmtree(BUILD, ignore_errors=True)
    process = subprocess.run(
        [sdk, "build", PROJECT, "-c", "Release", "-o", BUILD, "-v", "quiet"],
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise LoadError(
            f"the .NET programs do not compile: {(process.stdout + process.stderr)[-600:]}"
        )
    return sdk, BUILD / "ClientTests.dll"


class DotnetProgram(Program):
    """.NET program under test."""

    def __init__(self, job: Job) -> None:
        command: list[str | Path] = [*build_programs(), "load", job.argument()]
        Process.__init__(self, f".NET, {job.role}", command, directory=REPOSITORY)


Start = Callable[[Job], Program]


def start_python(job: Job) -> Program:
    return Program("sdk_worker", job)


def start_blocking(job: Job) -> Program:
    return Program("sdk_worker", replace(job, role=f"{job.role}_blocking", backend="blocking"))


# Speed -------------------------------------------------------------------------------------------


def _flow(broker: RunningBroker, start: Start, job: Job) -> float:
    """Return messages per second, from the first published to all confirmed and acked."""
    with start(replace(job, role="receive_batches")) as subscriber:
        subscriber.wait_ready()
        role = "publish" if start is not start_python else "publish_batches"
        with start(replace(job, role=role)) as publisher:
            sent, found = publisher.result(), subscriber.result()
    probe_nothing_in_flight(broker, (CLASS,))
    return job.count / (max(found["settled"], sent["confirmed"]) - sent["started"])


def _confirms(broker: RunningBroker, start: Start, job: Job) -> float:
    """Return messages per second, each of which waits for its confirm."""
    with start(replace(job, role="publish_each")) as publisher:
        sent = publisher.result()
    with start_python(replace(job, role="receive_batches")) as subscriber:
        subscriber.result()
    return job.count / (sent["confirmed"] - sent["started"])


def _requests(start: Start, job: Job) -> float:
    """Return the median time of a request in microseconds."""
    with start(replace(job, role="answer")) as responder:
        responder.wait_ready()
        with start(replace(job, role="ask")) as requester:
            return requester.result()["p50_us"]


def speed(run_options: RunOptions) -> list[Row]:
    """Measure the client beside the Python SDK."""
    values: dict[str, list[float]] = {}
    with running("simplebus") as broker, tempfile.NamedTemporaryFile() as block:
        write_payloads(Path(block.name), SIZE_BYTES)
        quick = run_options.quick
        batches = Job(
            "",
            broker.port,
            BATCH_QUICK if quick else BATCH_COUNT,
            size_bytes=SIZE_BYTES,
            block=block.name,
        )
        singles = replace(batches, count=SINGLE_QUICK if quick else SINGLE_COUNT)
        for _ in range(run_options.rounds):
            for name, value in (
                ("batches, .NET", _flow(broker, DotnetProgram, batches)),
                ("batches, Python", _flow(broker, start_python, batches)),
                ("confirms, .NET", _confirms(broker, DotnetProgram, singles)),
                ("confirms, Python", _confirms(broker, start_blocking, singles)),
                ("request, .NET", _requests(DotnetProgram, singles)),
                ("request, Python", _requests(start_python, singles)),
            ):
                values.setdefault(name, []).append(value)

    def ratios(name: str) -> list[float]:
        pairs = zip(values[f"{name}, .NET"], values[f"{name}, Python"], strict=True)
        return [dotnet / python for dotnet, python in pairs]

    return [
        Row("dotnet", "16 B in batches, .NET", values["batches, .NET"], "msg/s", at_least=1.0e6),
        Row("dotnet", "16 B in batches, Python", values["batches, Python"], "msg/s"),
        Row("dotnet", "the same, ratio", ratios("batches"), "x"),
        Row("dotnet", "one confirm at a time, .NET", values["confirms, .NET"], "msg/s"),
        Row("dotnet", "one confirm at a time, blocking", values["confirms, Python"], "msg/s"),
        Row("dotnet", "the same, ratio", ratios("confirms"), "x", at_least=1.0),
        Row("dotnet", "request, median, .NET", values["request, .NET"], "µs"),
        Row("dotnet", "request, median, trio", values["request, Python"], "µs"),
    ]


# Killed servers ----------------------------------------------------------------------------------


def kills(run_options: RunOptions) -> list[Row]:
    """Kill servers while a program publishes and another one receives; verify every message."""
    rows = []
    for durability in ("os", "disk"):
        sent, missing, twice, resent = _kill_servers(durability, run_options)
        title = f"{QUICK_KILLS if run_options.quick else KILLS} kills, {durability}"
        rows += [
            Row("dotnet-kills", f"{title}: confirmed", [sent], "messages"),
            Row("dotnet-kills", f"{title}: sent again", [resent], "messages"),
            Row("dotnet-kills", f"{title}: missing", [missing], "messages", 0, less_is_better=True),
            Row("dotnet-kills", f"{title}: twice", [twice], "messages", 0, less_is_better=True),
        ]
    return rows


def _kill_servers(durability: str, run_options: RunOptions) -> tuple[float, float, float, float]:
    """Return the numbers of confirmed, missing, twice stored and resent messages."""
    chance = Random(f"{run_options.seed} {durability}")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="simplebus-load-") as name:
        folder = Path(name)
        stop = folder / "stop"
        server = [*SERVE, "--port", str(port), *disabled_listeners(), *run_options.server_args]
        server += ["--data-dir", str(folder / "data"), "--durability", durability]

        def start_server() -> Process:
            process = Process("simplebus", server, directory=REPOSITORY)
            process.wait_for_line("simplebus ready", timeout_s=TIMEOUT_S)
            return process

        def start_client(*words: object) -> Process:
            command: list[str | Path] = [*build_programs(), *(str(word) for word in words)]
            return Process(f".NET, {words[0]}", command, directory=REPOSITORY)

        url = f"simplebus://{HOST}:{port}"
        process = start_server()
        try:
            with (
                start_client("publish", url, "kills", 1 << 30, stop) as publisher,
                start_client("consume", url, "kills") as consumer,
            ):
                for client in (publisher, consumer):
                    client.wait_for_line("connected", timeout_s=TIMEOUT_S)
                for _ in range(QUICK_KILLS if run_options.quick else KILLS):
                    _wait_for_confirms(publisher)
                    sleep(chance.uniform(0, LIFE_S))
                    process.kill()
                    process.stop()
                    process = start_server()
                stop.touch()
                published = _read_report(publisher)
                # The consumer ends only when it has all messages.
                consumed = _read_report(consumer)
        finally:
            process.stop()
    sent = published["published"]
    return sent, sent - consumed["consumed"], consumed["twice"], published["resent"]


def _wait_for_confirms(publisher: Process) -> None:
    """Wait until the program has reported more confirmed messages."""
    before = publisher.output().count("\n")
    deadline = monotonic() + TIMEOUT_S
    while publisher.output().count("\n") <= before + 1:
        if not publisher.is_running() or monotonic() > deadline:
            raise LoadError(
                f"no message was confirmed within {TIMEOUT_S:g} s: {publisher.last_words()}"
            )
        sleep(POLL_S)


def _read_report(client: Process) -> dict[str, float]:
    """Return the figures that a program prints at its end."""
    lines = [line.split() for line in client.finish(timeout_s=TIMEOUT_S).splitlines()]
    return {words[0]: float(words[1]) for words in lines if len(words) == 2}
