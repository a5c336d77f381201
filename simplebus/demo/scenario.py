"""The demo's plot: a server, a publisher, two subscribers, and what is done to them.

    seconds  0          3           4       5                                  8
    publish  ├─────────────────────────────────────────────────────────────────┤
    first    ├──────────┬ withholds ┴ is sent it again, acknowledges ───────────── …
    second   ├──────────┬ killed            ┬ back, as a new process ───────────── …

Rule 1: every wait ends: with the deadline, if nothing else ends it.
Rule 2: the workers say what they did in files; the server says what it did in its statistics.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import trio

from simplebus.console.workers import Worker, WorkerError, Workers, open_workers, error_texts
from simplebus.core.broker.broker import Settings
from simplebus.core.statistics import BrokerStatistics, ClassStatistics, SubscriptionStatistics
from simplebus.demo import records
from simplebus.demo.display import Display, rates
from simplebus.demo.verdict import Life, Verdict, judge
from simplebus.server.run import RunningServer, ServeOptions, serve

SHARED, OWN = 1, 2
"""Class 1 goes to both subscribers, class 2 to the second alone."""

PER_SECOND = 12_000
PUBLISH_SECONDS = 8.0
"""Of each class."""

# A message is sent again one second after it was sent; nobody would watch for six.
SETTINGS = Settings(ack_timeout=2, tick_seconds=0.5)

DEADLINE_SECONDS = 60.0
"""For everything up to the verdict: for what hangs, not for machines that have much else to do."""

_LOOK_SECONDS = 0.02

T = TypeVar("T")


async def demo(display: Display) -> Verdict:
    """The whole demo. Raises KeyboardInterrupt when it is told to stop before its end."""
    verdict: Verdict | None = None
    with tempfile.TemporaryDirectory(prefix="simplebus-demo-") as folder:
        try:
            async with trio.open_nursery() as nursery:
                serving: RunningServer = await nursery.start(_serve)
                drill = Drill(serving, Path(folder), display)
                with trio.move_on_after(DEADLINE_SECONDS):
                    verdict = await drill.run()
                if verdict is None:
                    raise WorkerError(
                        f"the demo did not end within {DEADLINE_SECONDS:g} seconds: "
                        f"it waited for {drill.waits_for}"
                    )
                nursery.cancel_scope.cancel()
        except* WorkerError as errors:
            verdict = Verdict(sent={}, accounts=(), faults=tuple(error_texts(errors)))
    assert verdict is not None
    return verdict


async def _serve(*, task_status: trio.TaskStatus[RunningServer]) -> None:
    """The server. It listens for signals itself; that it ends by itself means that one came."""
    options = ServeOptions(hosts=("127.0.0.1",), port=0, drain_seconds=0)
    await serve(SETTINGS, options, announce=lambda line: None, task_status=task_status)
    raise KeyboardInterrupt


@dataclass(slots=True)
class Subscriber:
    """A subscriber's process, and where the server let it in."""

    name: str
    worker: Worker
    notes: Path
    session_id: int
    due_from: dict[int, int]
    killed: bool = False

    def life(self) -> Life:
        return Life(self.name, self.due_from, records.read(self.notes), killed=self.killed)


class Drill:
    """One run against a server that is up. Resources: its processes, ended when `run` ends."""

    def __init__(self, serving: RunningServer, folder: Path, display: Display) -> None:
        self.waits_for = "its processes to start"
        self._engine = serving.server
        self._url = f"simplebus://{serving.addresses[0]}"
        self._folder = folder
        self._display = display
        self._began = trio.current_time()
        self._workers: Workers
        self._files = 0

    async def run(self) -> Verdict:
        """Carry it out. Raises WorkerError when a process does not do its part."""
        async with open_workers(self._folder) as self._workers, trio.open_nursery() as nursery:
            nursery.start_soon(self._show)
            verdict = await self._play()
            nursery.cancel_scope.cancel()
        return verdict

    async def _play(self) -> Verdict:
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
        self._event("two subscribers are up: the first for class 1, the second for classes 1 and 2")
        publisher.is_exit_expected = True
        await publisher.send_line("go")
        self._event(f"the publisher sends {PER_SECOND:,} messages a second of each class")
        await trio.sleep(3)

        await self._kill(second)
        self._event("meanwhile the first stops acknowledging, until its messages are sent again")
        before = _class(self._now(), SHARED).redelivered
        await first.worker.send_line("withhold")
        await self._until(
            "messages to be sent again",
            lambda now: _class(now, SHARED).redelivered > before or None,
        )
        self._event("the bus sends them again; the first acknowledges again")
        await trio.sleep(0.5)
        heir = await self._subscribe("second", SHARED, OWN)
        self._event("the second is back, as a new process; what it had left of class 2 comes again")

        self.waits_for = "the publisher to finish"
        sent = _counts([line async for line in publisher.lines])
        self._event("the publisher is done")
        await self._until(
            "everything to be acknowledged",
            lambda now: all(_is_done(_class(now, c), count) for c, count in sent.items()) or None,
        )
        self._event("everything is acknowledged")
        self.waits_for = "the subscribers to end"
        await first.worker.end_input()
        await heir.worker.end_input()
        return judge(
            sent=sent,
            lives=[subscriber.life() for subscriber in (first, second, heir)],
            resent={c: _class(self._now(), c).redelivered for c in sent},
            withheld=["first"],
        )

    async def _kill(self, subscriber: Subscriber) -> None:
        """SIGKILL, with messages surely in flight."""
        await subscriber.worker.send_line("withhold")
        await trio.sleep(0.3)
        in_flight = sum(
            subscription.in_flight
            for class_id in subscriber.due_from
            if (subscription := _subscription(self._now(), class_id, subscriber.session_id))
        )
        subscriber.killed = True
        await subscriber.worker.kill()
        self._event(f"the {subscriber.name} is killed, with {in_flight:,} messages in flight")
        await self._until(
            "the server to notice that a subscriber is gone",
            lambda now: not _sessions(now, OWN) or None,
        )

    async def _subscribe(self, name: str, *class_ids: int) -> Subscriber:
        """Start a subscriber's process and wait until the server has let it in."""
        before = self._now()
        self._files += 1
        notes = self._folder / f"notes-{self._files}"
        worker = await self._workers.start(
            f"{name} subscriber", "simplebus.demo.subscriber", self._url, notes, *class_ids
        )

        def session(now: BrokerStatistics) -> int | None:
            everywhere = set.intersection(*(_sessions(now, c) for c in class_ids))
            return next(iter(everywhere - _sessions(before, *class_ids)), None)

        session_id = await self._until(f"the {name} subscriber to subscribe", session)
        now = self._now()
        due_from = {}
        for class_id in class_ids:
            if _sessions(before, class_id):
                subscription = _subscription(now, class_id, session_id)
                if subscription is None:
                    raise WorkerError(f"the {name} subscriber left as soon as it had come")
                due_from[class_id] = subscription.cursor - subscription.delivered
            else:  # It takes over where the last one, or nobody, left the class.
                due_from[class_id] = _floor(before, class_id)
        return Subscriber(name, worker, notes, session_id, due_from)

    async def _until(self, what: str, look: Callable[[BrokerStatistics], T | None]) -> T:
        """Look at the server's statistics until there is an answer."""
        self.waits_for = what
        while (answer := look(self._now())) is None:  # noqa: ASYNC110 - it has no events for us.
            await trio.sleep(_LOOK_SECONDS)
        return answer

    async def _show(self) -> None:
        before, then = self._now(), trio.current_time()
        while True:
            await trio.sleep(self._display.interval)
            now, second = self._now(), trio.current_time()
            self._display.update(rates(before, now, second - then), second=second - self._began)
            before, then = now, second

    def _event(self, text: str) -> None:
        self._display.event(text, second=trio.current_time() - self._began)

    def _now(self) -> BrokerStatistics:
        return self._engine.broker.statistics()


# The server's statistics -------------------------------------------------------------------------


def _find(now: BrokerStatistics, class_id: int) -> ClassStatistics | None:
    return next((c for c in now.classes if c.class_id == class_id), None)


def _class(now: BrokerStatistics, class_id: int) -> ClassStatistics:
    found = _find(now, class_id)
    assert found is not None, f"class {class_id} is not there yet"
    return found


def _floor(now: BrokerStatistics, class_id: int) -> int:
    found = _find(now, class_id)
    return found.ring.floor if found else 0


def _sessions(now: BrokerStatistics, *class_ids: int) -> set[int]:
    """Who is subscribed to any of these classes."""
    return {s.session_id for c in now.classes if c.class_id in class_ids for s in c.subscriptions}


def _subscription(
    now: BrokerStatistics, class_id: int, session_id: int
) -> SubscriptionStatistics | None:
    found = _find(now, class_id)
    subscriptions = found.subscriptions if found else ()
    return next((s for s in subscriptions if s.session_id == session_id), None)


def _is_done(cls: ClassStatistics, sent: int) -> bool:
    """Whether all that was sent is published, delivered and acknowledged."""
    return cls.published >= sent and not cls.ring.message_count


def _counts(lines: list[str]) -> dict[int, int]:
    """What the publisher says it sent: lines of a class id and a number."""
    if not lines:
        raise WorkerError("the publisher did not say how much it sent")
    return {int(class_id): int(count) for class_id, count in map(str.split, lines)}
