"""Scenario of the demo: a server, a publisher and two subscribers, one withholding acks, one
killed.

    seconds  0          3           4       5                                  8
    publish  ├─────────────────────────────────────────────────────────────────┤
    first    ├──────────┬ withholds ┴ gets redeliveries, acks again ──────────────── …
    second   ├──────────┬ killed            ┬ replaced by a new process ──────────── …

Workers record their deliveries in files; the server has statistics. Every wait has a deadline.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import trio

from simplebus.console.workers import Worker, WorkerError, Workers, error_texts, open_workers
from simplebus.core.broker.broker import Settings
from simplebus.core.broker.wait_reasons import format_count
from simplebus.core.statistics import BrokerStatistics, ClassStatistics, SubscriptionStatistics
from simplebus.demo import records
from simplebus.demo.display import DemoDisplay, compute_rates
from simplebus.demo.verdict import DemoVerdict, SubscriberRun, evaluate_runs
from simplebus.server.run import RunningServer, ServeOptions, serve

SHARED, OWN = 1, 2
"""Class 1 goes to both subscribers, class 2 to the second one only."""

PER_SECOND = 12_000
PUBLISH_SECONDS = 8.0
"""Duration of publishing."""

# Messages are redelivered after one second, so that the demo is short; the default is six.
SETTINGS = Settings(ack_timeout=2, tick_seconds=0.5)

DEADLINE_SECONDS = 60.0
"""Deadline of the whole demo; generous, for busy machines."""

_POLL_SECONDS = 0.02

T = TypeVar("T")


async def demo(display: DemoDisplay) -> DemoVerdict:
    """Run the demo. Raises KeyboardInterrupt if it is stopped before its end."""
    verdict: DemoVerdict | None = None
    with tempfile.TemporaryDirectory(prefix="simplebus-demo-") as folder:
        try:
            async with trio.open_nursery() as nursery:
                serving: RunningServer = await nursery.start(_serve)
                scenario = DemoScenario(serving, Path(folder), display)
                with trio.move_on_after(DEADLINE_SECONDS):
                    verdict = await scenario.run()
                if verdict is None:
                    raise WorkerError(
                        f"the demo did not end within {DEADLINE_SECONDS:g} seconds: "
                        f"it waited for {scenario.waiting_for}"
                    )
                nursery.cancel_scope.cancel()
        except* WorkerError as errors:
            verdict = DemoVerdict(sent={}, accounts=(), faults=tuple(error_texts(errors)))
    assert verdict is not None
    return verdict


async def _serve(*, task_status: trio.TaskStatus[RunningServer]) -> None:
    """Run the server, which handles signals itself: if it ends first, a signal stopped it."""
    options = ServeOptions(hosts=("127.0.0.1",), port=0, drain_seconds=0)
    await serve(SETTINGS, options, announce=lambda line: None, task_status=task_status)
    raise KeyboardInterrupt


@dataclass(slots=True)
class DemoSubscriber:
    """Subscriber process, with its first due messages."""

    name: str
    worker: Worker
    receipts_path: Path
    session_id: int
    first_due: dict[int, int]
    was_killed: bool = False

    def to_run(self) -> SubscriberRun:
        return SubscriberRun(
            self.name,
            self.first_due,
            records.read_receipts(self.receipts_path),
            was_killed=self.was_killed,
        )


class DemoScenario:
    """One run against a running server. `run` ends its processes."""

    def __init__(self, serving: RunningServer, folder: Path, display: DemoDisplay) -> None:
        self.waiting_for = "its processes to start"
        self._server = serving.server
        self._url = f"simplebus://{serving.addresses[0]}"
        self._folder = folder
        self._display = display
        self._began = trio.current_time()
        self._workers: Workers
        self._files = 0

    async def run(self) -> DemoVerdict:
        """Run all events. Raises WorkerError if a process fails."""
        async with open_workers(self._folder) as self._workers, trio.open_nursery() as nursery:
            nursery.start_soon(self._update_display)
            verdict = await self._run_events()
            nursery.cancel_scope.cancel()
        return verdict

    async def _run_events(self) -> DemoVerdict:
        publisher = await self._workers.start(
            "publisher",
            "simplebus.demo.publisher",
            self._url,
            PER_SECOND,
            PUBLISH_SECONDS,
            SHARED,
            OWN,
        )
        first = await self._subscribe("first", SHARED)
        second = await self._subscribe("second", SHARED, OWN)
        self._show_event("two subscribers are connected: first (class 1), second (classes 1 and 2)")
        publisher.is_exit_expected = True
        await publisher.send_line("go")
        self._show_event(f"the publisher starts: {PER_SECOND:,} messages a second to each class")
        await trio.sleep(3)

        await self._kill(second)
        self._show_event("the first subscriber stops acknowledging")
        before = _class_statistics(self._statistics(), SHARED).redelivered
        await first.worker.send_line("withhold")
        await self._wait_for(
            "redeliveries",
            lambda now: _class_statistics(now, SHARED).redelivered > before or None,
        )
        self._show_event(
            "the ack timeout has passed: the server redelivers, the first subscriber acknowledges"
        )
        await trio.sleep(0.5)
        replacement = await self._subscribe("second", SHARED, OWN)
        self._show_event(
            "the second subscriber is restarted; its unacknowledged messages are redelivered"
        )

        self.waiting_for = "the publisher to finish"
        sent = _parse_counts([line async for line in publisher.lines])
        self._show_event("the publisher has finished")
        await self._wait_for(
            "all messages to be acknowledged",
            lambda now: (
                all(_is_done(_class_statistics(now, c), count) for c, count in sent.items()) or None
            ),
        )
        self._show_event("all messages are acknowledged")
        self.waiting_for = "the subscribers to end"
        await first.worker.end_input()
        await replacement.worker.end_input()
        return evaluate_runs(
            sent=sent,
            runs=[subscriber.to_run() for subscriber in (first, second, replacement)],
            redelivered_by_server={
                c: _class_statistics(self._statistics(), c).redelivered for c in sent
            },
            withholding=["first"],
        )

    async def _kill(self, subscriber: DemoSubscriber) -> None:
        """Kill a subscriber by SIGKILL while messages are in flight."""
        await subscriber.worker.send_line("withhold")
        await trio.sleep(0.3)
        in_flight = sum(
            subscription.in_flight
            for class_id in subscriber.first_due
            if (subscription := _subscription(self._statistics(), class_id, subscriber.session_id))
        )
        subscriber.was_killed = True
        await subscriber.worker.kill()
        self._show_event(
            f"the {subscriber.name} subscriber is killed by SIGKILL with "
            f"{format_count(in_flight, 'message')} in flight"
        )
        await self._wait_for(
            "the server to notice that a subscriber is gone",
            lambda now: not _session_ids(now, OWN) or None,
        )

    async def _subscribe(self, name: str, *class_ids: int) -> DemoSubscriber:
        """Start a subscriber process and wait for its subscriptions."""
        before = self._statistics()
        self._files += 1
        receipts_path = self._folder / f"receipts-{self._files}"
        worker = await self._workers.start(
            f"{name} subscriber", "simplebus.demo.subscriber", self._url, receipts_path, *class_ids
        )

        def session(now: BrokerStatistics) -> int | None:
            in_all_classes = set.intersection(*(_session_ids(now, c) for c in class_ids))
            return next(iter(in_all_classes - _session_ids(before, *class_ids)), None)

        session_id = await self._wait_for(f"the {name} subscriber to subscribe", session)
        now = self._statistics()
        first_due = {}
        for class_id in class_ids:
            if _session_ids(before, class_id):
                subscription = _subscription(now, class_id, session_id)
                if subscription is None:
                    raise WorkerError(f"the {name} subscriber disconnected before it was started")
                first_due[class_id] = subscription.cursor - subscription.delivered
            else:  # It continues at the first message that is stored.
                first_due[class_id] = _floor(before, class_id)
        return DemoSubscriber(name, worker, receipts_path, session_id, first_due)

    async def _wait_for(self, event: str, query: Callable[[BrokerStatistics], T | None]) -> T:
        """Poll the server's statistics until `query` returns a result."""
        self.waiting_for = event
        while (answer := query(self._statistics())) is None:  # noqa: ASYNC110 - it has no events for us.
            await trio.sleep(_POLL_SECONDS)
        return answer

    async def _update_display(self) -> None:
        previous, previous_second = self._statistics(), trio.current_time()
        while True:
            await trio.sleep(self._display.interval)
            current, second = self._statistics(), trio.current_time()
            self._display.update(
                compute_rates(previous, current, second - previous_second),
                second=second - self._began,
            )
            previous, previous_second = current, second

    def _show_event(self, text: str) -> None:
        self._display.event(text, second=trio.current_time() - self._began)

    def _statistics(self) -> BrokerStatistics:
        return self._server.broker.statistics()


# The server's statistics -------------------------------------------------------------------------


def _find(now: BrokerStatistics, class_id: int) -> ClassStatistics | None:
    return next((c for c in now.classes if c.class_id == class_id), None)


def _class_statistics(now: BrokerStatistics, class_id: int) -> ClassStatistics:
    found = _find(now, class_id)
    assert found is not None, f"class {class_id} does not exist yet"
    return found


def _floor(now: BrokerStatistics, class_id: int) -> int:
    found = _find(now, class_id)
    return found.ring.floor if found else 0


def _session_ids(now: BrokerStatistics, *class_ids: int) -> set[int]:
    """Return the sessions subscribed to any of these classes."""
    return {s.session_id for c in now.classes if c.class_id in class_ids for s in c.subscriptions}


def _subscription(
    now: BrokerStatistics, class_id: int, session_id: int
) -> SubscriptionStatistics | None:
    found = _find(now, class_id)
    subscriptions = found.subscriptions if found else ()
    return next((s for s in subscriptions if s.session_id == session_id), None)


def _is_done(cls: ClassStatistics, sent: int) -> bool:
    """Return True if all messages are published, delivered and acked."""
    return cls.published >= sent and not cls.ring.message_count


def _parse_counts(lines: list[str]) -> dict[int, int]:
    """Parse the publisher's output: lines of class id and count."""
    if not lines:
        raise WorkerError("the publisher printed no counts")
    return {int(class_id): int(count) for class_id, count in map(str.split, lines)}
