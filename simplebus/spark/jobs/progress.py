"""Progress display, interruption and error texts of a running query.

The first Ctrl-C lets the current batch finish; the second one stops the query at once. SIGTERM, by
which a supervisor stops a service, lets the batch finish, too.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from simplebus.core.broker.wait_reasons import format_count
from simplebus.spark.read.progress import lag

T = TypeVar("T")

_POLL_SECONDS = 0.2
# Interval of progress lines if standard error is not a terminal.
_LOG_INTERVAL_SECONDS = 10.0
# Time for cancelled tasks to end.
_CANCEL_TIMEOUT_SECONDS = 10.0


# Errors ------------------------------------------------------------------------------------------

_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION_LINE = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
_SPARK_MODULES = ("py4j.", "pyspark.")
_CONDITION = re.compile(r"\[[A-Z0-9_.]+\] ")
_JAVA_CAUSE = re.compile(r"An error occurred while calling \S+\n: (?:[\w$.]+: )?(?P<cause>.+)")
_OWN_CAUSE = re.compile(r"(?:\bsimplebus(?:\.\w+)+|\bValueError): (?P<cause>.+)")
_QUERY = re.compile(r"Query \[id = .*?\] terminated with exception: ")
_SQLSTATE = re.compile(r" SQLSTATE: \w+$")


def error_sentence(error: BaseException | str) -> str:
    """Return the message of the Python exception inside an error of Spark, or the first line of the
    error, or of its cause in Java.
    """
    text = str(error)
    found = [raised for block in text.split(_TRACEBACK)[1:] if (raised := _parse_traceback(block))]
    user_errors = [raised for raised in found if not raised[0].startswith(_SPARK_MODULES)]
    for kind, sentence in reversed(user_errors or found):
        return sentence or kind
    if (cause := _OWN_CAUSE.search(text) or _JAVA_CAUSE.match(text)) is not None:
        text = cause["cause"]
    first = next((line for line in text.splitlines() if line.strip()), "")
    first = _QUERY.sub("", _CONDITION.sub("", first, count=1), count=1)
    return _SQLSTATE.sub("", first).strip() or type(error).__name__


def _parse_traceback(block: str) -> tuple[str, str] | None:
    """Return type and message of the exception at the end of a traceback; None if not found."""
    lines = iter(block.splitlines())
    next(lines, None)
    for line in lines:
        if line.startswith(" "):
            continue
        match = _EXCEPTION_LINE.match(line)
        if match is None:
            return None
        return match["kind"], (match["text"] or "").strip()
    return None


# Progress ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueryProgress:
    """Progress of a streaming query since its start."""

    batches: int = 0
    rows: int = 0
    """Rows of all batches."""
    rate: float = 0.0
    """Rows per second of the last batch that had rows."""
    lag: int | None = None
    """Messages not read yet after that batch; None if unknown."""

    def updated(self, progress: Mapping[str, Any]) -> QueryProgress:
        """Return the progress after a batch, from Spark's report of it."""
        rows = int(progress.get("numInputRows") or 0)
        waiting = count_waiting(progress)
        if not rows:
            return QueryProgress(
                self.batches, self.rows, self.rate, self.lag if waiting is None else waiting
            )
        rate = float(progress.get("processedRowsPerSecond") or 0.0)
        return QueryProgress(self.batches + 1, self.rows + rows, rate, waiting)

    def __str__(self) -> str:
        waiting = "" if self.lag is None else f", {self.lag:,} waiting"
        messages, batches = format_count(self.rows, "message"), format_count(self.batches, "batch")
        return f"{messages} in {batches}, {self.rate:,.0f}/s{waiting}"


def count_waiting(progress: Mapping[str, Any]) -> int | None:
    """Return the number of messages not read yet after a batch; None if the source does not report
    it.
    """
    found = lag({"sources": (), **progress})
    return sum(sum(classes.values()) for classes in found.values()) if found else None


# Display -----------------------------------------------------------------------------------------


class InterruptCounter:
    """Counter of Ctrl-C and SIGTERM: one stops after the current batch, two stop at once."""

    def __init__(self) -> None:
        self.count = 0
        """Number of signals."""
        self.is_terminated = False
        """True after SIGTERM."""

    @contextmanager
    def counting(self) -> Iterator[InterruptCounter]:
        """Count Ctrl-C and SIGTERM, which then have no other effect, for the duration of a block.

        Does nothing outside the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        previous = [signal.signal(number, self._count) for number in signals]
        try:
            yield self
        finally:
            for number, handler in zip(signals, previous, strict=True):
                signal.signal(number, handler)

    def _count(self, number: int, frame: object) -> None:
        self.count += 1
        self.is_terminated |= number == signal.SIGTERM


@contextmanager
def show_progress(title: str) -> Iterator[Callable[[QueryProgress], None]]:
    """Yield a function that shows progress: one live line on a terminal, otherwise occasional
    lines.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _print_progress(title)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title)
        yield lambda progress: bar.update(task, description=f"{title}: {progress}")


def _print_progress(title: str) -> Callable[[QueryProgress], None]:
    shown, due = QueryProgress(), monotonic()

    def show(progress: QueryProgress) -> None:
        nonlocal shown, due
        if progress != shown and monotonic() >= due:
            print(f"{title}: {progress}", file=sys.stderr, flush=True)
            shown, due = progress, monotonic() + _LOG_INTERVAL_SECONDS

    return show


def follow(
    query: Any,
    title: str,
    on_report: Callable[[QueryProgress, Mapping[str, Any] | None], None] | None = None,
) -> tuple[QueryProgress, bool]:
    """Show a streaming query until it ends. SIGTERM ends it after the current batch.

    Args:
        query: The StreamingQuery.
        title: Title of the progress display.
        on_report: Called several times a second with the progress, and with Spark's report of the
            last trigger if there is one.

    Returns:
        The progress, and True if Ctrl-C stopped the query.

    Raises:
        Exception: The error that the query ended with.
    """
    progress, last_batch = QueryProgress(), -1
    before = None
    with InterruptCounter().counting() as interrupts, show_progress(title) as show:
        while not query.awaitTermination(_POLL_SECONDS):
            progress, last_batch = _apply_reports(query, progress, last_batch)
            show(progress)
            if on_report is not None:
                on_report(progress, query.lastProgress)
            if interrupts.count and before is None:
                before = last_batch
            if interrupts.count > 1 or (
                interrupts.count and (last_batch != before or not query.status["isTriggerActive"])
            ):
                query.stop()
                break
        progress, last_batch = _apply_reports(query, progress, last_batch)
    return progress, interrupts.count > 0 and not interrupts.is_terminated


def _apply_reports(
    query: Any, progress: QueryProgress, last_batch: int
) -> tuple[QueryProgress, int]:
    """Return progress and last batch, updated by reports of batches after `last_batch`."""
    for report in query.recentProgress:
        if report["batchId"] > last_batch and report["numInputRows"]:
            progress, last_batch = progress.updated(report), report["batchId"]
        elif report["batchId"] >= last_batch:
            progress = progress.updated({**report, "numInputRows": 0})
    return progress, last_batch


@contextmanager
def _show_tasks(spark: Any, title: str) -> Iterator[Callable[[], None]]:
    """Show how many tasks of a job are finished."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None)
        tracker = spark.sparkContext.statusTracker()

        def show() -> None:
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            live = [stage for stage in stages if stage is not None]
            if live:
                completed_count = sum(stage.numCompletedTasks for stage in live)
                bar.update(
                    task, completed=completed_count, total=sum(stage.numTasks for stage in live)
                )

        yield show


def run_job(spark: Any, title: str, job: Callable[[], T]) -> T:
    """Run a batch job and show how many of its tasks are finished.

    Ctrl-C or SIGTERM cancels the job.

    Args:
        spark: The session.
        title: Title of the progress display.
        job: Function that runs the job.

    Returns:
        The result of `job`.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM cancelled the job.
        Exception: The error that `job` raised.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(job())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=title, daemon=True)
    with InterruptCounter().counting() as interrupts, _show_tasks(spark, title) as show:
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            show()
            if interrupts.count:
                spark.sparkContext.cancelAllJobs()
                thread.join(_CANCEL_TIMEOUT_SECONDS)
                raise KeyboardInterrupt
    if errors:
        raise errors[0]
    return results[0]
