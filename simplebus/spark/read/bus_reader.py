"""Reader of a bus: resolves class names, gets extents, and reads ranges by fetch requests.

Requests change nothing at the bus except that new class names get ids. So they are repeated after
a lost connection, for up to `timeout` seconds.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from simplebus.client.blocking.bus import BlockingBus
from simplebus.client.blocking.connect import connect_blocking
from simplebus.client.core.open_requests import OpenRequest
from simplebus.core.dead_letters import is_dead_letter_class
from simplebus.core.errors import BusConnectionError, Reason, RefusedError
from simplebus.core.limits import FETCH_MESSAGES_MAX
from simplebus.core.protocol.requests import FetchReply
from simplebus.jetstream.names import CLUSTER_ID_PREFIX
from simplebus.logs.event_logger import EventLogger
from simplebus.spark.arrow_columns import FetchedFrames
from simplebus.spark.options import class_id
from simplebus.spark.read.offsets import SEQUENCE_MAX, BusExtent, ClassExtent, check_distinct
from simplebus.spark.read.planner import DataLossError, LostRange, MessageRange, describe_losses
from simplebus.spark.retry import connect_with_retry

log = EventLogger("simplebus.spark")


# Timeout of a first connection without retries.
_CONNECT_SECONDS = 5.0
_LOGGED_LOSSES_MAX = 20
"""Lost ranges of one batch that are logged one by one."""


_CLASS_HINTS: dict[str, str] = {
    Reason.UNKNOWN_CLASS: "expected a class that exists: check the option subscribe, or publish to "
    "the class first",
    Reason.UNAUTHORIZED: "expected a class that the user may subscribe to: check the option "
    "subscribe and the permissions of the user",
}
"""Advice for refused classes."""


class ClassMissingError(ValueError):
    """A subscribed class does not exist, or the user may not read it."""


class BusReader:
    """Connection that reads messages; used by one thread, as a context manager.

    Args:
        server: The bus, as host:port.
        timeout: Seconds for which a lost connection is retried.
        retries_connect: True to retry the first connection for `timeout`, too. Otherwise entering
            raises BusConnectionError within seconds, since the user who starts a query waits
            for it.
    """

    def __init__(self, server: str, *, timeout: float, retries_connect: bool = False) -> None:
        self.server = server
        self._timeout = timeout
        self._retries_connect = retries_connect
        self._stack = contextlib.ExitStack()
        self._ids: dict[str, int] = {}

    def __enter__(self) -> Self:
        connecting = (
            connect_with_retry(self.server, timeout=self._timeout)
            if self._retries_connect
            else connect_blocking(
                self.server,
                timeout=min(self._timeout, _CONNECT_SECONDS),
                reconnect=self._timeout,
            )
        )
        self.blocking_bus: BlockingBus = self._stack.enter_context(connecting)
        self._core = self.blocking_bus.connection.core
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(BusConnectionError):  # A reader has nothing to flush.
            self._stack.__exit__(kind, error, traceback)

    @property
    def memory_id(self) -> str:
        """Memory id of the bus, as of the last connection."""
        return self._core.bus_id

    def class_id(self, name: str) -> int:
        """Return the id of a class, given as digits or a name. A new name is assigned an id."""
        resolved_id = self._ids.get(name)
        if resolved_id is None:
            number = class_id(name)
            resolved_id = self.blocking_bus.resolve_class_id(name) if number is None else number
            self._ids[name] = resolved_id
        return resolved_id

    def check_classes(self, names: Sequence[str]) -> None:
        """Raise ClassMissingError if a class, given by its name, does not exist.

        Creates none, unlike `class_id`. A class of dead letters may be missing, since the first
        dead letter creates it. Checks nothing without the right `inquire`, or at a stateless
        server, which knows only the classes that it has used.
        """
        if self.memory_id.startswith(CLUSTER_ID_PREFIX):
            return
        for name in names:
            if class_id(name) is not None or is_dead_letter_class(name):
                continue
            try:
                self.blocking_bus.explain(name)
            except RefusedError as error:
                if error.code == Reason.UNAUTHORIZED:
                    return
                if error.code == Reason.UNKNOWN_CLASS:
                    raise self._missing_class_error(name) from None
                raise

    def class_names(self) -> list[str]:
        """Return the names of all classes. Needs the right `inquire`."""
        return [each.name for each in self.blocking_bus.explain().classes if each.name]

    def _missing_class_error(self, name: str) -> ClassMissingError:
        similar = difflib.get_close_matches(name, self.class_names(), n=3)
        hint = f"did you mean {' or '.join(similar)}?" if similar else "check the option subscribe"
        return ClassMissingError(
            f"cannot read from {self.server}: there is no class {name!r}; {hint}"
        )

    def get_extent(self, names: Sequence[str], *, make: bool = False) -> BusExtent:
        """Return the stored sequences of these classes, with the memory id.

        Args:
            names: Classes by id or name.
            make: True to create a class whose id is unused; otherwise it raises ClassMissingError.

        Raises:
            ClassMissingError: A class does not exist.
            OffsetError: Two names are the same class.
        """
        try:
            ids = [self.class_id(name) for name in names]
        except RefusedError as error:
            raise self._class_error(error) from error
        check_distinct(dict(zip(names, ids, strict=True)), f"class of {self.server}", "subscribe")
        while True:
            questions = [partial(self._request_extent, class_id, make=make) for class_id in ids]
            try:
                bus, replies = self._request_all(questions)
            except RefusedError as error:
                raise self._class_error(error) from error
            if bus == self.memory_id:
                extents = [ClassExtent(floor=reply.floor, head=reply.head) for reply in replies]
                return BusExtent(bus, dict(zip(names, extents, strict=True)))

    def find_first_since(self, times: Mapping[str, int]) -> dict[str, int | None]:
        """Return the first message of each class accepted at or after a time; None if no such
        message is stored.

        Messages accepted shortly before the time may be included. Raises ClassMissingError and
        BusConnectionError.

        Args:
            times: Milliseconds since 1970, by class.
        """
        questions = [
            partial(
                self._core.fetch,
                self.class_id(name),
                0,
                1,
                start_time=milliseconds / 1000,
                create_class=False,
            )
            for name, milliseconds in times.items()
        ]
        try:
            _, replies = self._request_all(questions)
        except RefusedError as error:
            raise self._class_error(error) from error
        return {
            name: reply.first if reply.first < reply.head else None
            for name, reply in zip(times, replies, strict=True)
        }

    def _request_extent(self, class_id: int, *, make: bool) -> OpenRequest:
        """Fetch a sequence that never exists: the reply has the floor and the head."""
        return self._core.fetch(class_id, SEQUENCE_MAX, 1, create_class=make)

    def _class_error(self, error: RefusedError) -> Exception:
        hint = _CLASS_HINTS.get(error.code)
        if hint is None:
            return error
        return ClassMissingError(f"cannot read from {self.server}: {error.sentence}; {hint}")

    def _request_all(
        self, questions: Sequence[Callable[[], OpenRequest]]
    ) -> tuple[str, list[FetchReply]]:
        """Send all requests at once. Return the memory id of the bus, and the replies."""
        wire = self.blocking_bus.connection
        while True:
            wire.wait_until(lambda: self._core.is_ready)
            bus, requests = self.memory_id, [question() for question in questions]
            try:
                replies = [wire.wait_answered(request).reply for request in requests]
            except BusConnectionError:
                wire.check_open()  # Raises if the connection is not retried any more.
                continue
            return bus, [reply for reply in replies if isinstance(reply, FetchReply)]

    def read(self, message_range: MessageRange, *, strict: bool) -> Iterator[FetchedFrames]:
        """Yield the messages of a range, in pieces of about 1 MB.

        The next piece is requested while the caller processes the current one.

        Args:
            message_range: The messages to read.
            strict: True to raise DataLossError for lost messages; False to log and skip them.

        Raises:
            BusConnectionError: The bus could not be reached within the timeout.
            DataLossError: Messages are lost, and `strict` is true.
        """
        class_id = self.class_id(message_range.class_)
        next_sequence, request = (
            message_range.first,
            self._request_messages(class_id, message_range.first, message_range.last),
        )
        while next_sequence < message_range.last:
            try:
                reply = self.blocking_bus.connection.wait_answered(request).reply
            except BusConnectionError:
                self.blocking_bus.connection.check_open()
                self.blocking_bus.connection.wait_until(lambda: self._core.is_ready)
                request = self._request_messages(class_id, next_sequence, message_range.last)
                continue
            except RefusedError as error:
                if self.memory_id == message_range.memory_id:
                    raise self._class_error(error) from error
                reply = None
            if self.memory_id != message_range.memory_id:
                reason = f"the bus was reset and has the memory id {self.memory_id} now"
                self._report_loss(
                    message_range, next_sequence, message_range.last, reason, strict=strict
                )
                return
            assert isinstance(reply, FetchReply)
            if reply.first > next_sequence:
                reason = f"the class holds messages from {reply.floor} on"
                self._report_loss(
                    message_range,
                    next_sequence,
                    min(reply.first, message_range.last),
                    reason,
                    strict=strict,
                )
            if reply.next <= next_sequence:
                reason = f"the next message of the class will be {reply.head}"
                self._report_loss(
                    message_range, next_sequence, message_range.last, reason, strict=strict
                )
                return
            batches, next_sequence = request.batches, reply.next
            if next_sequence < message_range.last:
                request = self._request_messages(class_id, next_sequence, message_range.last)
                self.blocking_bus.connection.write_now()
            frames = FetchedFrames.concatenate(
                [(b.data, b.bounds) for b in batches], reply.first, reply.times
            )
            frames = frames.slice_sequences(message_range.first, message_range.last)
            if frames.count:
                yield frames

    def _request_messages(self, class_id: int, first: int, last: int) -> OpenRequest:
        count = min(last - first, FETCH_MESSAGES_MAX)
        return self._core.fetch(class_id, first, count, with_times=True, create_class=False)

    def _report_loss(
        self, message_range: MessageRange, first: int, last: int, reason: str, *, strict: bool
    ) -> None:
        report_losses(
            [LostRange(message_range.server, message_range.class_, first, last, reason)],
            strict=strict,
        )


def report_losses(losses: Iterable[LostRange], *, strict: bool) -> None:
    """Raise DataLossError if `strict` and `losses` is not empty; otherwise log the losses."""
    losses = list(losses)
    if strict and losses:
        raise DataLossError(describe_losses(losses))
    for loss in losses[:_LOGGED_LOSSES_MAX]:
        log.warning(
            "messages.skipped", "skipped {count} messages: {range}", count=loss.count, range=loss
        )
    if unlogged_losses := losses[_LOGGED_LOSSES_MAX:]:
        log.warning(
            "ranges.skipped",
            "skipped {count} messages of {range_count} more ranges",
            count=sum(loss.count for loss in unlogged_losses),
            range_count=len(unlogged_losses),
        )
