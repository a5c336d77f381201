"""What the classes of a cluster are called, as doors tell each other and streams say (trio).

Rule 1: a class has the name that it had first, at whichever door.
Rule 2: a name that is new at a door is told to all others at the end of the turn that it came in,
and written to the class's stream, if there is one: a stream's description is what is left when all
doors are gone. That is a job of the class: nothing else of its stream is changed meanwhile.
Rule 3: a door that comes, or was cut off, is told by the others what they know; one that comes
serves nobody before one of them has told it all, or has been silent for long.

    <prefix>.naming       {"orders": 7}               told to all
    <prefix>.door.names   sender asks        answered with the same, and {} behind the last
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

_UPDATE_SECONDS = 10.0
_RETRY_SECONDS, _RETRY_SECONDS_MAX = 0.25, 30.0
PEER_WAIT_SECONDS = 5.0
"""So long a door that comes waits for another one to tell it names."""
LEADER_WAIT_SECONDS = 20.0
"""So long it waits for streams that have no leader, to hear what their classes are called."""
_STREAM_UPDATES_PER_TURN = 64
_NAMES_PER_MESSAGE = 4
"""Names in a message: few, so that it is never too long."""
_END_OF_NAMES = b"{}"


class ClassNameExchange:
    """Of one door."""

    def __init__(
        self,
        core: NatsClientCore,
        subjects: JetStreamNames,
        server_id: str,
        names: Mapping[str, int],
        declare_classes: Callable[[list[Any]], object],
        *,
        enqueue_job: Callable[[int, Job], None],
    ) -> None:
        """`names` are those that are known here, and `declare_classes` makes them known; `do` is what
        `Jobs.do` does."""
        self._core = core
        self._subjects = subjects
        self._server_id = server_id.encode()
        self._names = names
        self._declare_classes = declare_classes
        self._enqueue_job = enqueue_job
        self._shared_names: dict[str, int] = {}
        """What all others were told, or have told."""
        self._conflicting_names: dict[int, str] = {}
        """Of classes that others call otherwise, what they called them last."""
        self._stream_descriptions: dict[int, str] = {}
        """What streams say that their classes are called, as far as that was seen."""
        self._classes_to_describe: dict[int, None] = {}
        """Classes whose streams may not say yet what they are called."""
        self._inbox = new_inbox()
        self._new_names_sid = core.subscribe(subjects.new_names_subject)
        self._answer_sid = core.subscribe(self._inbox)
        self._query_sid = 0
        """By which others ask; 0 as long as this door has not learnt what there is."""
        self._peer_answered = trio.Event()
        self._describe_at, self._retry_seconds = 0.0, _RETRY_SECONDS

    async def load(
        self, list_classes: Callable[[], Awaitable[tuple[list[tuple[int, str]], list[str]]]]
    ) -> None:
        """Ask the streams, and the other doors, until it is known. A stream without a leader is
        waited for a while: others are not to stay closed for that one."""
        until = trio.current_time() + LEADER_WAIT_SECONDS
        while True:
            try:
                found, without_leader = await list_classes()
                if not without_leader:
                    break
                is_over = trio.current_time() >= until
                shown, what = (
                    ", ".join(without_leader[:8]),
                    "going on without" if is_over else "trying on",
                )
                log.warning("what their classes are called, is not told by %s; %s", shown, what)
                if is_over:
                    break
                await trio.sleep(_RETRY_SECONDS)
            except (BusConnectionError, JetStreamError) as error:
                log.warning("the streams of the cluster: %s; trying on", error)
                await trio.sleep(_RETRY_SECONDS)
        for class_id, description in found:
            if not description:
                self._declare(class_id, "")
            self.record_description(class_id, description)
        with trio.move_on_after(PEER_WAIT_SECONDS):
            await self._peer_answered.wait()
        if not self._peer_answered.is_set():
            log.warning("no other door has said within %g s what it knows", PEER_WAIT_SECONDS)
        self._query_sid = self._core.subscribe(self._subjects.names_query_subject)

    def query_peers(self) -> None:
        """There is a connection. Nobody may have heard of any name, and this door not of theirs."""
        self._shared_names.clear()
        self._core.publish(self._subjects.names_query_subject, self._server_id, reply=self._inbox)

    # What is told --------------------------------------------------------------------------------

    def publish_new_names(self, link: NatsConnection, now: float) -> None:
        """At the end of a turn: have others know what is new here, and its streams say so."""
        if not (self._query_sid and self._core.is_ready):
            return
        if len(self._names) != len(self._shared_names):
            fresh = {
                name: id_ for name, id_ in self._names.items() if name not in self._shared_names
            }
            self._shared_names = dict(self._names)
            for payload in _encode_names(fresh):
                self._core.publish(self._subjects.new_names_subject, payload)
            for name, class_id in fresh.items():
                if self._stream_descriptions.get(class_id) != name:
                    self._classes_to_describe[class_id] = None
        if self._classes_to_describe and now >= self._describe_at:
            for class_id in list(islice(self._classes_to_describe, _STREAM_UPDATES_PER_TURN)):
                del self._classes_to_describe[class_id]
                self._enqueue_job(class_id, partial(self._describe_stream, link, class_id))

    def handle_messages(self, sid: int, messages: ReceivedMessages) -> bool:
        """What another door has said or asked. Returns False for what is none of this."""
        if sid == self._query_sid:
            for row, sender in enumerate(messages.all_payloads()):
                if (reply := messages.reply(row)) and sender != self._server_id:
                    for payload in (*_encode_names(self._names), _END_OF_NAMES):
                        self._core.publish(reply.decode("latin-1"), payload)
        elif sid in (self._new_names_sid, self._answer_sid):
            for payload in messages.all_payloads():
                self.merge_names(payload)
                # Nothing at all says a server where there is nobody else.
                if sid == self._answer_sid and payload in (_END_OF_NAMES, b""):
                    self._peer_answered.set()
        else:
            return False
        return True

    def merge_names(self, payload: bytes) -> None:
        """Another door has said something."""
        try:
            told = msgspec.json.decode(payload, type=dict[Name, ClassId])
        except (msgspec.MsgspecError, RecursionError):
            return
        for name, class_id in told.items():
            if self._names.get(name) != class_id:
                self._declare(class_id, name)
            if self._names.get(name) == class_id:
                self._shared_names[name] = class_id

    def _declare(self, class_id: int, name: str) -> None:
        try:
            self._declare_classes([NamedClass(id=class_id, name=name) if name else class_id])
        except RemoteProtocolError as error:
            if (
                self._conflicting_names.get(class_id) != name
            ):  # The others are to say it, too; once.
                self._conflicting_names[class_id] = name
                log.warning("class %d of the cluster: %s", class_id, error.sentence)
                self._shared_names.pop(name, None)
                self._shared_names.pop(self._name_of(class_id), None)

    def _name_of(self, class_id: int) -> str:
        return next((name for name, id_ in self._names.items() if id_ == class_id), "")

    # What streams say ----------------------------------------------------------------------------

    def record_description(self, class_id: int, description: str) -> None:
        """A class's stream was looked at, and says that the class is called so; or nothing."""
        if self._stream_descriptions.get(class_id) == description:
            return
        self._stream_descriptions[class_id] = description
        if description:
            self._declare(class_id, description)
        elif self._name_of(class_id):
            self._classes_to_describe[class_id] = None

    async def _describe_stream(self, link: NatsConnection, class_id: int) -> None:
        """Have a class's stream say its name, if there is a stream, and it says none."""
        stream, name = self._subjects.stream_name(class_id), self._name_of(class_id)
        try:
            config = (await link.api_request(f"STREAM.INFO.{stream}"))["config"]
            there = str(config.get("description") or "")
            if not there:
                body = {**config, "description": name}
                await link.api_request(f"STREAM.UPDATE.{stream}", body, seconds=_UPDATE_SECONDS)
                there = name
            self.record_description(class_id, there)
            self._retry_seconds = _RETRY_SECONDS
        except (BusConnectionError, JetStreamError) as error:
            if isinstance(error, JetStreamError) and error.code in jetstream_codec.NOT_FOUND:
                return  # It says so when it is made.
            log.warning("the name of class %d: %s; trying on", class_id, error)
            self._classes_to_describe[class_id] = None
            self._describe_at = trio.current_time() + self._retry_seconds
            self._retry_seconds = min(2 * self._retry_seconds, _RETRY_SECONDS_MAX)


def _encode_names(names: Mapping[str, int]) -> list[bytes]:
    """Names in messages that any server takes."""
    items = list(names.items())
    return [
        msgspec.json.encode(dict(items[at : at + _NAMES_PER_MESSAGE]))
        for at in range(0, len(items), _NAMES_PER_MESSAGE)
    ]
