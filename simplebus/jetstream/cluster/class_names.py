"""Exchange of class names between the servers of a cluster.

A class keeps the first name that any server gave it. A new name is published to the other servers
at the end of the turn, and written to the description of the class's stream, which survives when no
server is running. A server that starts or was cut off asks the others, and accepts clients only
after an answer or a timeout.

    <prefix>.naming       {"orders": 7}        published to all servers
    <prefix>.door.names   query                answered in the same format; {} ends the answer
"""

from __future__ import annotations

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
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.client import NatsClientCore
from simplebus.nats.client.events import ReceivedMessages
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection, new_inbox

log = EventLogger("simplebus.engine")

_UPDATE_SECONDS = 10.0
_RETRY_SECONDS, _RETRY_SECONDS_MAX = 0.25, 30.0
PEER_WAIT_SECONDS = 5.0
"""Time for which a starting server waits for the answer of another server."""
LEADER_WAIT_SECONDS = 20.0
"""Time for which a starting server waits for streams without a leader."""
_STREAM_UPDATES_PER_TURN = 64
_NAMES_PER_MESSAGE = 4
"""Small enough that a message never exceeds `max_payload`."""
_END_OF_NAMES = b"{}"


class ClassNameExchange:
    """Class names of one server, shared with its peers."""

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
        """Subscribe to the names of other servers.

        Args:
            names: Class ids by name, from the broker.
            declare_classes: Adds classes to the broker.
            enqueue_job: `ClassJobs.enqueue`.
        """
        self._core = core
        self._subjects = subjects
        self._server_id = server_id.encode()
        self._names = names
        self._declare_classes = declare_classes
        self._enqueue_job = enqueue_job
        self._shared_names: dict[str, int] = {}
        """Names that the other servers have."""
        self._conflicting_names: dict[int, str] = {}
        """Last conflicting name that another server sent, by class."""
        self._stream_descriptions: dict[int, str] = {}
        """Last seen description of each stream, by class."""
        self._classes_to_describe: dict[int, None] = {}
        """Classes whose stream may have no description yet."""
        self._inbox = new_inbox()
        self._new_names_sid = core.subscribe(subjects.new_names_subject)
        self._answer_sid = core.subscribe(self._inbox)
        self._query_sid = 0
        """Subscription to queries of other servers; 0 until `load` has finished."""
        self._peer_answered = trio.Event()
        self._describe_at, self._retry_seconds = 0.0, _RETRY_SECONDS

    async def load(
        self, list_classes: Callable[[], Awaitable[tuple[list[tuple[int, str]], list[str]]]]
    ) -> None:
        """Load the names from the streams and the other servers.

        The wait for streams without a leader is limited, so that the server starts without them.
        """
        until = trio.current_time() + LEADER_WAIT_SECONDS
        while True:
            try:
                found, without_leader = await list_classes()
                if not without_leader:
                    break
                is_over = trio.current_time() >= until
                log.warning(
                    "class_names.incomplete",
                    "cannot read class names from streams without a leader ({streams}); {outcome}",
                    streams=", ".join(without_leader[:8]),
                    outcome="starting without them" if is_over else "retrying",
                )
                if is_over:
                    break
                await trio.sleep(_RETRY_SECONDS)
            except (BusConnectionError, JetStreamError) as error:
                log.warning(
                    "class_names.read_failed",
                    "cannot list the streams of the JetStream cluster: {error}; retrying",
                    error=error,
                )
                await trio.sleep(_RETRY_SECONDS)
        for class_id, description in found:
            if not description:
                self._declare(class_id, "")
            self.record_description(class_id, description)
        with trio.move_on_after(PEER_WAIT_SECONDS):
            await self._peer_answered.wait()
        if not self._peer_answered.is_set():
            log.warning(
                "class_names.unanswered",
                "no other server sent class names within {seconds:g} s",
                seconds=PEER_WAIT_SECONDS,
            )
        self._query_sid = self._core.subscribe(self._subjects.names_query_subject)

    def query_peers(self) -> None:
        """Ask the other servers for their names, and publish all own names again, after a
        reconnect.
        """
        self._shared_names.clear()
        self._core.publish(self._subjects.names_query_subject, self._server_id, reply=self._inbox)

    # Exchange with other servers -----------------------------------------------------------------

    def publish_new_names(self, link: NatsConnection, now: float) -> None:
        """Publish new names and enqueue updates of stream descriptions, at the end of a turn."""
        if not (self._query_sid and self._core.is_ready):
            return
        if len(self._names) != len(self._shared_names):
            new_names = {
                name: id_ for name, id_ in self._names.items() if name not in self._shared_names
            }
            self._shared_names = dict(self._names)
            for payload in _encode_names(new_names):
                self._core.publish(self._subjects.new_names_subject, payload)
            for name, class_id in new_names.items():
                if self._stream_descriptions.get(class_id) != name:
                    self._classes_to_describe[class_id] = None
        if self._classes_to_describe and now >= self._describe_at:
            for class_id in list(islice(self._classes_to_describe, _STREAM_UPDATES_PER_TURN)):
                del self._classes_to_describe[class_id]
                self._enqueue_job(class_id, partial(self._describe_stream, link, class_id))

    def handle_messages(self, sid: int, messages: ReceivedMessages) -> bool:
        """Handle names and queries from other servers. Returns False for other messages."""
        if sid == self._query_sid:
            for row, sender in enumerate(messages.all_payloads()):
                if (reply := messages.reply(row)) and sender != self._server_id:
                    for payload in (*_encode_names(self._names), _END_OF_NAMES):
                        self._core.publish(reply.decode("latin-1"), payload)
        elif sid in (self._new_names_sid, self._answer_sid):
            for payload in messages.all_payloads():
                self.merge_names(payload)
                # NATS answers with an empty message if there is no other server.
                if sid == self._answer_sid and payload in (_END_OF_NAMES, b""):
                    self._peer_answered.set()
        else:
            return False
        return True

    def merge_names(self, payload: bytes) -> None:
        """Declare the names that another server sent."""
        try:
            names = msgspec.json.decode(payload, type=dict[Name, ClassId])
        except (msgspec.MsgspecError, RecursionError):
            return
        for name, class_id in names.items():
            if self._names.get(name) != class_id:
                self._declare(class_id, name)
            if self._names.get(name) == class_id:
                self._shared_names[name] = class_id

    def _declare(self, class_id: int, name: str) -> None:
        try:
            self._declare_classes([NamedClass(id=class_id, name=name) if name else class_id])
        except RemoteProtocolError as error:
            if self._conflicting_names.get(class_id) != name:
                # Publish the own name again, once, so that the other server logs the conflict, too.
                self._conflicting_names[class_id] = name
                log.warning(
                    "class_name.conflicted",
                    "class {class_id} of the cluster: {error}",
                    class_id=class_id,
                    error=error.sentence,
                )
                self._shared_names.pop(name, None)
                self._shared_names.pop(self._name_of(class_id), None)

    def _name_of(self, class_id: int) -> str:
        return next((name for name, id_ in self._names.items() if id_ == class_id), "")

    # Stream descriptions -------------------------------------------------------------------------

    def record_description(self, class_id: int, description: str) -> None:
        """Record the description of a class's stream: the name of the class, or empty."""
        if self._stream_descriptions.get(class_id) == description:
            return
        self._stream_descriptions[class_id] = description
        if description:
            self._declare(class_id, description)
        elif self._name_of(class_id):
            self._classes_to_describe[class_id] = None

    async def _describe_stream(self, link: NatsConnection, class_id: int) -> None:
        """Write the name of a class to the description of its stream, if this is empty."""
        stream, name = self._subjects.stream_name(class_id), self._name_of(class_id)
        try:
            config = (await link.api_request(f"STREAM.INFO.{stream}"))["config"]
            description = str(config.get("description") or "")
            if not description:
                body = {**config, "description": name}
                await link.api_request(f"STREAM.UPDATE.{stream}", body, seconds=_UPDATE_SECONDS)
                description = name
            self.record_description(class_id, description)
            self._retry_seconds = _RETRY_SECONDS
        except (BusConnectionError, JetStreamError) as error:
            if isinstance(error, JetStreamError) and error.code in jetstream_codec.NOT_FOUND:
                return  # The stream is created with its description.
            log.warning(
                "class_name.write_failed",
                "cannot write the name of class {class_name} to its stream: {error}; retrying",
                class_name=name or str(class_id),
                error=error,
            )
            self._classes_to_describe[class_id] = None
            self._describe_at = trio.current_time() + self._retry_seconds
            self._retry_seconds = min(2 * self._retry_seconds, _RETRY_SECONDS_MAX)


def _encode_names(names: Mapping[str, int]) -> list[bytes]:
    """Encode names as messages that any NATS server accepts."""
    items = list(names.items())
    return [
        msgspec.json.encode(dict(items[at : at + _NAMES_PER_MESSAGE]))
        for at in range(0, len(items), _NAMES_PER_MESSAGE)
    ]
