"""What Spark's processes ask a bus: which class is which, what it holds, a range of its messages.

Rule 1: nothing here changes anything at the bus but the names of classes, so every question may be
asked again: after a lost connection it is, for as long as `timeout` says.
Rule 2: an error says where: which bus, which class, which messages.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from simplebus.client.blocking.bus import BlockingBus, connect_blocking
from simplebus.client.core.open_requests import OpenRequest
from simplebus.core.errors import BusConnectionError, RefusedError
from simplebus.core.limits import FETCH_MESSAGES_MAX
from simplebus.core.protocol.requests import FetchReply
from simplebus.spark.arrow_columns import Frames
from simplebus.spark.options import class_id
from simplebus.spark.read.offsets import SEQUENCE_MAX, ClassExtent, BusExtent, check_apart
from simplebus.spark.read.planner import DataLossError, Loss, Range, told
from simplebus.spark.retry import patient_bus

log = logging.getLogger("simplebus.spark")


# How long a first connection may take that nobody is patient about.
_CONNECT_SECONDS = 5.0


class ClassMissingError(ValueError):
    """A class that a job reads does not exist."""


class SourceBus:
    """A connection that reads. Used by one thread, as a block.

    Entering raises BusConnectionError when the bus is not reached within seconds: who starts
    something wants to know. With `patient` it is tried for `timeout`, as one that goes is.
    """

    def __init__(self, server: str, *, timeout: float, patient: bool = False) -> None:
        self.server = server
        self._timeout = timeout
        self._patient = patient
        self._stack = contextlib.ExitStack()
        self._ids: dict[str, int] = {}

    def __enter__(self) -> Self:
        connecting = (
            patient_bus(self.server, timeout=self._timeout)
            if self._patient
            else connect_blocking(
                self.server,
                timeout=min(self._timeout, _CONNECT_SECONDS),
                reconnect=self._timeout,
            )
        )
        self.blocking: BlockingBus = self._stack.enter_context(connecting)
        self._core = self.blocking.wire.core
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(BusConnectionError):  # There is nothing to be confirmed.
            self._stack.__exit__(kind, error, traceback)

    @property
    def memory_id(self) -> str:
        """The identity of the bus's memory, as of the last connection."""
        return self._core.bus_id

    def class_id(self, name: str) -> int:
        """The id of a class, given in digits or by name. A name that is new gets one."""
        known = self._ids.get(name)
        if known is None:
            number = class_id(name)
            known = self.blocking.class_of(name) if number is None else number
            self._ids[name] = known
        return known

    def memory(self, names: Sequence[str], *, make: bool = False) -> BusExtent:
        """What the bus holds of these classes, and in which memory.

        An id that nobody has named is made to be a class, or raises ClassMissingError. Raises
        OffsetError for two names of one class.
        """
        ids = [self.class_id(name) for name in names]
        check_apart(dict(zip(names, ids, strict=True)), f"class of {self.server}", "subscribe")
        while True:
            questions = [partial(self._look, class_id, make=make) for class_id in ids]
            try:
                bus, replies = self._ask(questions)
            except RefusedError as error:
                raise self._missing(error) from error
            if bus == self.memory_id:
                held = [ClassExtent(floor=reply.floor, head=reply.head) for reply in replies]
                return BusExtent(bus, dict(zip(names, held, strict=True)))

    def first_since(self, times: Mapping[str, int]) -> dict[str, int | None]:
        """The first message of each class that was accepted at or after a time, in milliseconds
        since 1970; a few accepted shortly before may come with it. None: there is none yet.

        Raises ClassMissingError, BusConnectionError.
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
            _, replies = self._ask(questions)
        except RefusedError as error:
            raise self._missing(error) from error
        return {
            name: reply.first if reply.first < reply.head else None
            for name, reply in zip(times, replies, strict=True)
        }

    def _look(self, class_id: int, *, make: bool) -> OpenRequest:
        """Ask for a message that cannot be: the answer tells what can."""
        return self._core.fetch(class_id, SEQUENCE_MAX, 1, create_class=make)

    def _missing(self, error: RefusedError) -> Exception:
        if error.code != "unknown_class":
            return error
        return ClassMissingError(f"at {self.server}: {error.sentence}, so there is nothing to read")

    def _ask(self, questions: Sequence[Callable[[], OpenRequest]]) -> tuple[str, list[FetchReply]]:
        """Ask all at once. Returns the answers, and whose they are."""
        wire = self.blocking.wire
        while True:
            wire.wait_until(lambda: self._core.is_ready)
            bus, asked = self.memory_id, [question() for question in questions]
            try:
                replies = [wire.answered(request).reply for request in asked]
            except BusConnectionError:
                wire.check()  # Raises unless there may be another connection.
                continue
            return bus, [reply for reply in replies if isinstance(reply, FetchReply)]

    def read(self, wanted: Range, *, strict: bool) -> Iterator[Frames]:
        """The messages of a range, in pieces of about a megabyte.

        The next piece is on its way while the caller is busy with one. What is gone raises
        DataLossError if `strict`; else it is logged and left out. Raises BusConnectionError.
        """
        class_id = self.class_id(wanted.class_)
        at, asked = wanted.first, self._piece(class_id, wanted.first, wanted.last)
        while at < wanted.last:
            try:
                reply = self.blocking.wire.answered(asked).reply
            except BusConnectionError:
                self.blocking.wire.check()
                self.blocking.wire.wait_until(lambda: self._core.is_ready)
                asked = self._piece(class_id, at, wanted.last)
                continue
            except RefusedError as error:
                if self.memory_id == wanted.bus:
                    raise self._missing(error) from error
                reply = None
            if self.memory_id != wanted.bus:
                why = f"the bus has begun anew, with the memory {self.memory_id}"
                self._lose(wanted, at, wanted.last, why, strict=strict)
                return
            assert isinstance(reply, FetchReply)
            if reply.first > at:
                why = f"the class holds messages from {reply.floor} on"
                self._lose(wanted, at, min(reply.first, wanted.last), why, strict=strict)
            if reply.next <= at:
                why = f"the next message of the class will be {reply.head}"
                self._lose(wanted, at, wanted.last, why, strict=strict)
                return
            batches, at = asked.batches, reply.next
            if at < wanted.last:
                asked = self._piece(class_id, at, wanted.last)
                self.blocking.wire.push()
            frames = Frames.joined([(b.data, b.bounds) for b in batches], reply.first, reply.times)
            frames = frames.between(wanted.first, wanted.last)
            if frames.count:
                yield frames

    def _piece(self, class_id: int, first: int, last: int) -> OpenRequest:
        count = min(last - first, FETCH_MESSAGES_MAX)
        return self._core.fetch(class_id, first, count, with_times=True, create_class=False)

    def _lose(self, wanted: Range, first: int, last: int, why: str, *, strict: bool) -> None:
        lose([Loss(wanted.server, wanted.class_, first, last, why)], strict=strict)


def lose(losses: Iterable[Loss], *, strict: bool) -> None:
    """Raise DataLossError if `strict`, and there are any; else log them."""
    losses = list(losses)
    if strict and losses:
        raise DataLossError(told(losses))
    for loss in losses:
        log.warning("%d messages: %s", loss.count, loss)
