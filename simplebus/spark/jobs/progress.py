"""A query at work: how far it is, how it is stopped, and what went wrong, in a sentence.

Rule 1: what is shown and what is said is worked out by pure functions of what Spark reports.
Rule 2: the first Ctrl-C lets the batch that is under way come to its end; the second does not.
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

from simplebus.spark.read.progress import lag

T = TypeVar("T")

_POLL_SECONDS = 0.2
# How often a log gets a line.
_LINE_SECONDS = 10.0
# For tasks that are cancelled to come to their end.
_GOODBYE_SECONDS = 10.0


# What went wrong ---------------------------------------------------------------------------------

_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
_THEIRS = ("py4j.", "pyspark.")
_CONDITION = re.compile(r"\[[A-Z0-9_.]+\] ")
_TAIL = re.compile(r" SQLSTATE: \w+$")


def reason(error: BaseException | str) -> str:
    """What an error of Spark's is about: the sentence of the Python exception inside it, or else
    its own first line."""
    text = str(error)
    found = [raised for block in text.split(_TRACEBACK)[1:] if (raised := _raised(block))]
    ours = [raised for raised in found if not raised[0].startswith(_THEIRS)]
    for kind, sentence in reversed(ours or found):
        return sentence or kind
    first = next((line for line in text.splitlines() if line.strip()), "")
    return _TAIL.sub("", _CONDITION.sub("", first, count=1)).strip() or type(error).__name__


def _raised(block: str) -> tuple[str, str] | None:
    """The exception at the end of a traceback: its kind, and what it says."""
    lines = iter(block.splitlines())
    next(lines, None)
    for line in lines:
        if line.startswith(" "):
            continue
        match = _RAISED.match(line)
        if match is None:
            return None
        return match["kind"], (match["text"] or "").strip()
    return None


# How far it is -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a query is."""

    batches: int = 0
    rows: int = 0
    """Of all its batches since it was started."""
    rate: float = 0.0
    """Rows per second of its last batch that had some."""
    lag: int | None = None
    """Messages that wait behind that batch; None when nobody knows."""

    def after(self, progress: Mapping[str, Any]) -> Standing:
        """And now, by what Spark reports of a batch."""
        rows = int(progress.get("numInputRows") or 0)
        behind = waiting(progress)
        if not rows:
            return Standing(
                self.batches, self.rows, self.rate, self.lag if behind is None else behind
            )
        rate = float(progress.get("processedRowsPerSecond") or 0.0)
        return Standing(self.batches + 1, self.rows + rows, rate, behind)

    def __str__(self) -> str:
        behind = "" if self.lag is None else f", {self.lag:,} waiting"
        batches = f"{self.batches:,} batch{'' if self.batches == 1 else 'es'}"
        return f"{self.rows:,} messages in {batches}, {self.rate:,.0f}/s{behind}"


def waiting(progress: Mapping[str, Any]) -> int | None:
    """Messages that wait behind a batch. None when the source does not say."""
    found = lag({"sources": (), **progress})
    return sum(sum(classes.values()) for classes in found.values()) if found else None


# Following ---------------------------------------------------------------------------------------


class Stopping:
    """What Ctrl-C asks for: once to stop when it fits, twice to stop at once."""

    def __init__(self) -> None:
        self.asked = 0

    @contextmanager
    def heard(self) -> Iterator[Stopping]:
        """For a block, Ctrl-C is counted instead of raised. Only the main thread hears it."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        former = signal.signal(signal.SIGINT, self._count)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, former)

    def _count(self, number: int, frame: object) -> None:
        self.asked += 1


@contextmanager
def display(title: str) -> Iterator[Callable[[Standing], None]]:
    """Shows how far a query is: a line that lives on a terminal, else a plain line now and then."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain(title)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title)
        yield lambda standing: bar.update(task, description=f"{title}: {standing}")


def _plain(title: str) -> Callable[[Standing], None]:
    shown, due = Standing(), monotonic()

    def show(standing: Standing) -> None:
        nonlocal shown, due
        if standing != shown and monotonic() >= due:
            print(f"{title}: {standing}", file=sys.stderr, flush=True)
            shown, due = standing, monotonic() + _LINE_SECONDS

    return show


def follow(query: Any, title: str) -> tuple[Standing, bool]:
    """Show a streaming query until it ends. Returns how far it came, and whether Ctrl-C ended it.

    Raises what the query died of.
    """
    standing, seen = Standing(), -1
    before = None
    with Stopping().heard() as stopping, display(title) as show:
        while not query.awaitTermination(_POLL_SECONDS):
            standing, seen = _caught_up(query, standing, seen)
            show(standing)
            if stopping.asked and before is None:
                before = seen
            if stopping.asked > 1 or (
                stopping.asked and (seen != before or not query.status["isTriggerActive"])
            ):
                query.stop()
                break
        standing, seen = _caught_up(query, standing, seen)
    return standing, stopping.asked > 0


def _caught_up(query: Any, standing: Standing, seen: int) -> tuple[Standing, int]:
    """How far it is now, by the reports of batches that are newer than batch `seen`."""
    for progress in query.recentProgress:
        if progress["batchId"] > seen and progress["numInputRows"]:
            standing, seen = standing.after(progress), progress["batchId"]
        elif progress["batchId"] >= seen:
            standing = standing.after({**progress, "numInputRows": 0})
    return standing, seen


@contextmanager
def _shown(spark: Any, title: str) -> Iterator[Callable[[], None]]:
    """Shows how many of its tasks a job has done."""
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
                done = sum(stage.numCompletedTasks for stage in live)
                bar.update(task, completed=done, total=sum(stage.numTasks for stage in live))

        yield show


def work(spark: Any, title: str, job: Callable[[], T]) -> T:
    """Do a job that is no stream, and show how many of its tasks are done. Ctrl-C cancels it.

    Raises what the job raises, and KeyboardInterrupt.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(job())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=title, daemon=True)
    with Stopping().heard() as stopping, _shown(spark, title) as show:
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            show()
            if stopping.asked:
                spark.sparkContext.cancelAllJobs()
                thread.join(_GOODBYE_SECONDS)
                raise KeyboardInterrupt
    if errors:
        raise errors[0]
    return answers[0]
