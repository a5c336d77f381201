"""Command line of the load programs: `python load/run.py [SCENARIO ...] [--quick] [--json FILE]`.

Each round measures every variant of a scenario once, in turn, so that a machine that slows down
slows all of them. A failed scenario is reported, and the run exits with status 1. The JSON file is
written after each scenario.
"""

from __future__ import annotations

import fnmatch
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # For `python load/run.py`.

from load.brokers import SIMPLEBUS_KINDS, RunningBroker, is_available, running, versions
from load.generators import program
from load.measure import WARM_UP_S, RunOptions, Sample, measure
from load.processes import LoadError
from load.report import Report, Row, core_warning, ratios
from load.scenarios import SCENARIOS, Scenario, Variant
from load.sdk import is_peer_available
from load.single_messages import NATS_PY
from load.traces import Tracer, prepare, write_run, write_table

QUICK_PART = 0.2
ROUNDS = 5
QUICK_ROUNDS = 2
COUNT_MAX = 60_000_000
WIDTH = 110  # Width of the tables if the output is not a terminal.


class Runner:
    """Runs the rounds of each scenario in order."""

    def __init__(
        self, report: Report, progress: Progress, run_options: RunOptions, traces: Path | None
    ) -> None:
        self.traces = traces
        self.report = report
        self.progress = progress
        self.run_options = run_options
        self.rounds = run_options.rounds
        self.part = QUICK_PART if run_options.quick else 1.0

    def run(self, scenario: Scenario) -> None:
        if scenario.special:
            task = self.progress.add_task(scenario.title, total=1)
            self.report.rows += scenario.special(self.run_options)
            self.progress.advance(task)
        else:
            self._run_variants(scenario)

    def _run_variants(self, scenario: Scenario) -> None:
        variants = [variant for variant in scenario.variants if self._is_available(variant)]
        task = self.progress.add_task(scenario.title, total=(self.rounds + 1) * len(variants))
        samples: dict[str, list[Sample]] = {variant.name: [] for variant in variants}
        with ExitStack() as stack:
            brokers = {
                kind: stack.enter_context(running(kind, server_args=self._args_for(kind)))
                for kind in dict.fromkeys(variant.kind for variant in variants)
            }
            rates = {}
            for variant in variants:
                rates[variant.name] = self._warm_up(brokers[variant.kind], variant)
                self.progress.advance(task)
            for turn in range(self.rounds):
                for variant in variants:
                    count = int(rates[variant.name] * variant.seconds * self.part)
                    with self._tracing(scenario.name, variant.name, turn) as tracer:
                        sample = _measured(brokers[variant.kind], variant, count, tracer)
                    samples[variant.name].append(sample)
                    rates[variant.name] = sample.rate
                    self.progress.advance(task)
        self.report.samples[scenario.name] = samples
        self.report.titles[scenario.name] = scenario.title
        self.report.rows += _rows(scenario, samples)

    @contextmanager
    def _tracing(self, scenario: str, variant: str, turn: int) -> Iterator[Tracer | None]:
        """Write the traces of the measurement in the block, if `--traces` is given."""
        if self.traces is None:
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="simplebus-load-") as directory:
            tracer = Tracer(Path(directory))
            yield tracer
            if tracer.processes:  # Python programs write no traces.
                table = tracer.table(scenario, variant, turn)
                write_table(self.traces, table, scenario, variant, turn)

    def _args_for(self, kind: str) -> tuple[str, ...]:
        return self.run_options.server_args if kind in SIMPLEBUS_KINDS else ()

    def _is_available(self, variant: Variant) -> bool:
        needed = NATS_PY if variant.protocol == NATS_PY else variant.kind
        if is_peer_available() if needed == NATS_PY else is_available(needed):
            return True
        note = f"{needed} is not installed: comparisons with it are skipped"
        if note not in self.report.notes:
            self.report.notes.append(note)
        return False

    def _warm_up(self, broker: RunningBroker, variant: Variant) -> float:
        """Run two short measurements, the second sized by the first. Return the rate."""
        first = _measured(broker, variant, variant.work.first_count)
        return _measured(broker, variant, int(first.rate * WARM_UP_S)).rate


def _measured(
    broker: RunningBroker, variant: Variant, count: int, tracer: Tracer | None = None
) -> Sample:
    count = max(min(count, COUNT_MAX), 1_000)
    try:
        return measure(broker, variant.protocol, variant.work, count=count, tracer=tracer)
    except LoadError as error:
        last = broker.process.errors().strip()[-400:] if broker.kind in SIMPLEBUS_KINDS else ""
        server_error = f"; the server printed: {last}" if last else ""
        raise LoadError(f"{variant.name}: {error}{server_error}") from error


def _rows(scenario: Scenario, samples: dict[str, list[Sample]]) -> list[Row]:
    rows = []
    for target in scenario.targets:
        if target.of not in samples or (target.against and target.against not in samples):
            continue
        against = samples[target.against] if target.against else None
        rows.append(
            Row(
                scenario.name,
                target.title,
                ratios(samples[target.of], against, target.quantity),
                target.unit,
                target.at_least,
                target.reach,
                target.less_is_better,
            )
        )
    return rows


def _select(names: list[str]) -> list[Scenario]:
    scenarios = {scenario.name: scenario for scenario in SCENARIOS}
    chosen: dict[str, Scenario] = {}
    for name in names or [scenario.name for scenario in SCENARIOS if not scenario.is_long]:
        found = fnmatch.filter(scenarios, name)
        if not found:
            raise typer.BadParameter(f"no scenario {name!r}; there are {', '.join(scenarios)}")
        chosen |= {each: scenarios[each] for each in found}
    return list(chosen.values())


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Scenarios, or patterns of their names; by default, all except the long ones."
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds of each scenario; 5 by default, 2 with --quick."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short and imprecise.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the figures.")] = None,
    traces: Annotated[
        Path | None,
        typer.Option(
            help="Empty folder for the times at which messages were sent, delivered and acked."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a long scenario, to repeat it.")] = 0,
    minutes: Annotated[float, typer.Option(min=0, help="Duration of a soak; 5 by default.")] = 0.0,
    only: Annotated[str, typer.Option(help="Rows of `holds` with this text in their titles.")] = "",
    server_args: Annotated[str, typer.Option(help="More arguments of `simplebus serve`.")] = "",
) -> None:
    """Measure simplebus and its peers in turn, and compare the results with the targets."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    scenarios = _select(names or [])
    rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    run_options = RunOptions(rounds, quick, tuple(shlex.split(server_args)), seed, minutes, only)
    try:
        if traces:
            prepare(traces)
        program()
    except LoadError as error:
        sys.exit(str(error))
    report = Report(
        command=shlex.join(["python", "load/run.py", *sys.argv[1:]]),
        versions=versions(("simplebus", "nats", "redis")),
        rounds=rounds,
    )
    if warning := core_warning():
        report.notes.append(warning)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    failed = False
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        runner = Runner(report, progress, run_options, traces)
        for scenario in scenarios:
            try:
                runner.run(scenario)
            except Exception as error:  # Spark and other libraries raise their own errors.
                failed = True
                report.notes.append(f"{scenario.name} failed: {type(error).__name__}: {error}")
            if json_file:
                report.write(json_file)
    report.print(console)
    if traces:
        write_run(traces, report.as_dict())
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
