"""What the classes of a cluster are called, as doors tell each other and streams say (trio).

Rule 1: a class has the name that it had first, at whichever door.
Rule 2: a name that is new at a door is told to all others at the end of the turn that it came in,
and written to the class's stream, if there is one: a stream's description is what is left when all
doors are gone. That is a job of the class: nothing else of its stream is changed meanwhile.
Rule 3: a door that comes, or was cut off, is told by the others what they know; one that comes
serves nobody before one of them has told it all, or has been silent for long.

    <prefix>.naming       {"orders": 7}               told to all
    <prefix>.door.names   who asks        answered with the same, and {} behind the last
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import trio

from simplebus.core.errors import BusConnectionError, RemoteProtocolError
from simplebus.core.protocol.requests import ClassId, Name, NamedClass
from simplebus.jetstream.class_jobs import Job
from simplebus.jetstream.names import JetStreamNames
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.client import NatsClientCore
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection, new_inbox

log = logging.getLogger("simplebus.engine")

_STREAM_SECONDS = 10.0
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.25, 30.0
PATIENCE_SECONDS = 5.0
"""So long a door that comes waits for another one to tell it names."""
UNTOLD_SECONDS = 20.0
"""So long it waits for streams that have no leader, to hear what their classes are called."""
_WRITTEN_AT_ONCE = 64
_TOLD_AT_ONCE = 4
"""Names in a message: few, so that it is never too long."""
_ALL_TOLD = b"{}"


class Naming:
    """Of one door."""

    def __init__(
        self,
        core: NatsClientCore,
        subjects: JetStreamNames,
        door: str,
        names: Mapping[str, int],
        name_classes: Callable[[list[Any]], object],
        *,
        do: Callable[[int, Job], None],
    ) -> None:
        """`names` are those that are known here, and `name_classes` makes them known; `do` is what
        `Jobs.do` does."""
        self._core = core
        self._subjects = subjects
        self._door = door.encode()
        self._names = names
        self._name_classes = name_classes
        self._do = do
        self._told: dict[str, int] = {}
        """What all others were told, or have told."""
        self._disputed: dict[int, str] = {}
        """Of classes that others call otherwise, what they called them last."""
        self._described: dict[int, str] = {}
        """What streams say that their classes are called, as far as that was seen."""
        self._unwritten: dict[int, None] = {}
        """Classes whose streams may not say yet what they are called."""
        self._inbox = new_inbox()
        self._told_sid = core.subscribe(subjects.new_names_subject)
        self._answer_sid = core.subscribe(self._inbox)
        self._ask_sid = 0
        """By which others ask; 0 as long as this door has not learnt what there is."""
        self._has_heard = trio.Event()
        self._write_at, self._pause = 0.0, _PAUSE_SECONDS

    async def learn(
        self, list_classes: Callable[[], Awaitable[tuple[list[tuple[int, str]], list[str]]]]
    ) -> None:
        """Ask the streams, and the other doors, until it is known. A stream without a leader is
        waited for a while: others are not to stay closed for that one."""
        until = trio.current_time() + UNTOLD_SECONDS
        while True:
            try:
                found, untold = await list_classes()
                if not untold:
                    break
                is_over = trio.current_time() >= until
                shown, what = ", ".join(untold[:8]), "going on without" if is_over else "trying on"
                log.warning("what their classes are called, is not told by %s; %s", shown, what)
                if is_over:
                    break
                await trio.sleep(_PAUSE_SECONDS)
            except (BusConnectionError, JetStreamError) as error:
                log.warning("the streams of the cluster: %s; trying on", error)
                await trio.sleep(_PAUSE_SECONDS)
        for class_id, description in found:
            if not description:
                self._name(class_id, "")
            self.see(class_id, description)
        with trio.move_on_after(PATIENCE_SECONDS):
            await self._has_heard.wait()
        if not self._has_heard.is_set():
            log.warning("no other door has said within %g s what it knows", PATIENCE_SECONDS)
        self._ask_sid = self._core.subscribe(self._subjects.names_query_subject)

    def begin_anew(self) -> None:
        """There is a connection. Nobody may have heard of any name, and this door not of theirs."""
        self._told.clear()
        self._core.publish(self._subjects.names_query_subject, self._door, reply=self._inbox)

    # What is told --------------------------------------------------------------------------------

    def tell(self, link: NatsConnection, now: float) -> None:
        """At the end of a turn: have others know what is new here, and its streams say so."""
        if not (self._ask_sid and self._core.is_ready):
            return
        if len(self._names) != len(self._told):
            fresh = {name: id_ for name, id_ in self._names.items() if name not in self._told}
            self._told = dict(self._names)
            for piece in _pieces(fresh):
                self._core.publish(self._subjects.new_names_subject, piece)
            for name, class_id in fresh.items():
                if self._described.get(class_id) != name:
                    self._unwritten[class_id] = None
        if self._unwritten and now >= self._write_at:
            for class_id in list(islice(self._unwritten, _WRITTEN_AT_ONCE)):
                del self._unwritten[class_id]
                self._do(class_id, partial(self._write, link, class_id))

    def take(self, sid: int, messages: ReceivedMessages) -> bool:
        """What another door has said or asked. Returns False for what is none of this."""
        if sid == self._ask_sid:
            for row, who in enumerate(messages.all_payloads()):
                if (reply := messages.reply(row)) and who != self._door:
                    for piece in (*_pieces(self._names), _ALL_TOLD):
                        self._core.publish(reply.decode("latin-1"), piece)
        elif sid in (self._told_sid, self._answer_sid):
            for payload in messages.all_payloads():
                self.hear(payload)
                # Nothing at all says a server where there is nobody else.
                if sid == self._answer_sid and payload in (_ALL_TOLD, b""):
                    self._has_heard.set()
        else:
            return False
        return True

    def hear(self, payload: bytes) -> None:
        """Another door has said something."""
        try:
            told = msgspec.json.decode(payload, type=dict[Name, ClassId])
        except (msgspec.MsgspecError, RecursionError):
            return
        for name, class_id in told.items():
            if self._names.get(name) != class_id:
                self._name(class_id, name)
            if self._names.get(name) == class_id:
                self._told[name] = class_id

    def _name(self, class_id: int, name: str) -> None:
        try:
            self._name_classes([NamedClass(id=class_id, name=name) if name else class_id])
        except RemoteProtocolError as error:
            if self._disputed.get(class_id) != name:  # The others are to say it, too; once.
                self._disputed[class_id] = name
                log.warning("class %d of the cluster: %s", class_id, error.sentence)
                self._told.pop(name, None)
                self._told.pop(self._name_of(class_id), None)

    def _name_of(self, class_id: int) -> str:
        return next((name for name, id_ in self._names.items() if id_ == class_id), "")

    # What streams say ----------------------------------------------------------------------------

    def see(self, class_id: int, description: str) -> None:
        """A class's stream was looked at, and says that the class is called so; or nothing."""
        if self._described.get(class_id) == description:
            return
        self._described[class_id] = description
        if description:
            self._name(class_id, description)
        elif self._name_of(class_id):
            self._unwritten[class_id] = None

    async def _write(self, link: NatsConnection, class_id: int) -> None:
        """Have a class's stream say its name, if there is a stream, and it says none."""
        stream, name = self._subjects.stream_name(class_id), self._name_of(class_id)
        try:
            config = (await link.api_request(f"STREAM.INFO.{stream}"))["config"]
            there = str(config.get("description") or "")
            if not there:
                body = {**config, "description": name}
                await link.api_request(f"STREAM.UPDATE.{stream}", body, seconds=_STREAM_SECONDS)
                there = name
            self.see(class_id, there)
            self._pause = _PAUSE_SECONDS
        except (BusConnectionError, JetStreamError) as error:
            if isinstance(error, JetStreamError) and error.code in jetstream_codec.NOT_FOUND:
                return  # It says so when it is made.
            log.warning("the name of class %d: %s; trying on", class_id, error)
            self._unwritten[class_id] = None
            self._write_at = trio.current_time() + self._pause
            self._pause = min(2 * self._pause, _PAUSE_SECONDS_MAX)


def _pieces(names: Mapping[str, int]) -> list[bytes]:
    """Names in messages that any server takes."""
    items = list(names.items())
    return [
        msgspec.json.encode(dict(items[at : at + _TOLD_AT_ONCE]))
        for at in range(0, len(items), _TOLD_AT_ONCE)
    ]
