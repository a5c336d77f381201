"""Operations of the API, run as a client with the permissions of the user.

Each request opens a session inside the server, so the broker checks permissions, limits and quotas
as for any other client.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import trio

from simplebus.client import dead_letters
from simplebus.client.aio import durables
from simplebus.client.aio.bus import Bus
from simplebus.client.aio.connect import open_bus
from simplebus.client.core.messages import Message
from simplebus.client.dead_letters import DeadLetter, DeadLetterFilter, DeadLetterReader
from simplebus.core.protocol.inquiry import ClassInfo
from simplebus.core.users.permissions import Grants
from simplebus.core.users.users import User
from simplebus.server.http.api_routes import ApiRoutes
from simplebus.server.http.api_types import (
    HANDLED_LETTERS_MAX,
    ActionResult,
    ApiError,
    ClassList,
    CountResult,
    DisconnectParameters,
    ForgetParameters,
    LetterList,
    LetterSelection,
    LettersParameters,
    LettersResult,
    MessageList,
    NoParameters,
    PayloadFormat,
    PeekedLetter,
    PeekedMessage,
    PeekParameters,
    PurgeParameters,
    RefusedLetter,
    parse_class_reference,
)
from simplebus.server.local_client import UserEndpoint
from simplebus.server.server import LifecycleCommands, Server

ROUTES = ApiRoutes()

_ALL_RIGHTS = "no permissions table"
_PUBLISHER_NAME = "simplebus HTTP API"
_FETCH_COUNT = 16
_REPLY_BYTES_MAX = 1024 * 1024
"""Approximate size of payloads and headers in a reply."""
_READ_LETTERS_MAX = 10_000
"""Dead letters that one request reads."""
_DRAIN_DELAY_SECONDS = 0.1
"""Time for sending the response before the server shuts down."""


class AdminOperations:
    """Operations for one request of a user. All methods raise BusError."""

    def __init__(self, server: Server, user: User | None, grants: Grants | None, peer: str) -> None:
        """`user` is None on a server without users; `grants` is None for all permissions."""
        self._server = server
        self._grants = grants
        self._endpoint = UserEndpoint(server, user, f"HTTP API, {peer}")

    @asynccontextmanager
    async def _open_bus(self) -> AsyncIterator[Bus]:
        limits = self._server.broker.settings.limits
        async with open_bus(
            [self._endpoint],
            name=_PUBLISHER_NAME,
            heartbeat=0.0,
            reconnect=None,
            frame_bytes=limits.frame_bytes,
        ) as bus:
            yield bus

    @ROUTES.add("classes", "inquire", changes=False, needs_user=False)
    async def list_classes(self, parameters: NoParameters) -> ClassList:
        """List classes."""
        async with self._open_bus() as bus:
            info = await bus.explain()
        return ClassList(info.classes, info.classes_left_out)

    @ROUTES.add("messages", "fetch, or subscribe to the class", changes=False)
    async def peek_messages(self, parameters: PeekParameters) -> MessageList:
        """Show stored messages."""
        class_id, name = self._find_class(parameters.class_)
        messages: list[PeekedMessage] = []
        reply_bytes, sequence, is_end = 0, parameters.first, False
        async with self._open_bus() as bus:
            while len(messages) < parameters.count and reply_bytes < _REPLY_BYTES_MAX:
                await self._server.slow_request_turns.wait_turn()
                missing_count = min(parameters.count - len(messages), _FETCH_COUNT)
                fetched = await bus.fetch(class_id, sequence, missing_count)
                for message in fetched:
                    peeked = _peek_message(message, parameters)
                    messages.append(peeked)
                    reply_bytes += _estimate_bytes(peeked)
                if len(fetched) < missing_count:
                    is_end = True
                    break
                sequence = fetched[-1].sequence + 1
        return MessageList(class_id, name, messages, None if is_end else sequence)

    @ROUTES.add("dead-letters", "inquire, and as for messages", changes=False)
    async def list_letters(self, parameters: LettersParameters) -> LetterList:
        """Show dead letters."""
        letter_filter = DeadLetterFilter(None, parameters.reason, parameters.subscription)
        letters: list[PeekedLetter] = []
        reply_bytes = read_count = 0
        async with self._open_bus() as bus:
            dead_class = await _find_dead_class(bus, parameters.class_, parameters.first)
            class_id, name = dead_class.class_id, dead_class.name
            async for batch in DeadLetterReader(bus, dead_class, DeadLetterFilter()):
                for letter in batch:
                    is_full = len(letters) == parameters.count or reply_bytes >= _REPLY_BYTES_MAX
                    if is_full or read_count == _READ_LETTERS_MAX:
                        return LetterList(class_id, name, letters, letter.sequence)
                    read_count += 1
                    if letter_filter.matches(letter):
                        letters.append(_peek_letter(letter, parameters))
                        reply_bytes += _estimate_bytes(letters[-1])
                await self._server.slow_request_turns.wait_turn()
        return LetterList(class_id, name, letters, None)

    @ROUTES.add(
        "dead-letters/requeue",
        "as for dead letters, purge, and publish to their original class",
    )
    async def requeue_letters(self, parameters: LetterSelection) -> LettersResult:
        """Publish dead letters again."""
        return await self._change_letters(parameters, is_requeue=True)

    @ROUTES.add("dead-letters/drop", "as for dead letters, and purge")
    async def drop_letters(self, parameters: LetterSelection) -> LettersResult:
        """Discard dead letters."""
        return await self._change_letters(parameters, is_requeue=False)

    async def _change_letters(
        self, selection: LetterSelection, *, is_requeue: bool
    ) -> LettersResult:
        letter_filter = _build_filter(selection)
        count = read_count = selected_count = 0
        refused: list[RefusedLetter] = []
        next_sequence: int | None = None
        async with self._open_bus() as bus:
            dead_class = await _find_dead_class(bus, selection.class_, selection.first)
            async for batch in DeadLetterReader(bus, dead_class, DeadLetterFilter()):
                selected: list[DeadLetter] = []
                for letter in batch:
                    if selected_count == HANDLED_LETTERS_MAX or read_count == _READ_LETTERS_MAX:
                        next_sequence = letter.sequence
                        break
                    read_count += 1
                    if letter_filter.matches(letter):
                        selected.append(letter)
                        selected_count += 1
                if is_requeue:
                    requeued, errors = await dead_letters.requeue_letters(bus, dead_class, selected)
                    count += len(requeued)
                    refused += [RefusedLetter(each.sequence, str(error)) for each, error in errors]
                else:
                    count += await dead_letters.purge_letters(bus, dead_class, selected)
                if next_sequence is not None:
                    break
                await self._server.slow_request_turns.wait_turn()
        return LettersResult(count, refused, next_sequence)

    @ROUTES.add("purge", "purge")
    async def purge_messages(self, parameters: PurgeParameters) -> CountResult:
        """Discard stored messages."""
        class_id, _ = self._find_class(parameters.class_)
        async with self._open_bus() as bus:
            return CountResult(await bus.purge(class_id, parameters.first, parameters.last))

    @ROUTES.add(
        "forget",
        "inquire, subscribe, and configure for a durable of another user",
    )
    async def forget_durable(self, parameters: ForgetParameters) -> ActionResult:
        """Remove an idle durable."""
        class_ = parse_class_reference(parameters.class_)
        async with self._open_bus() as bus:
            try:
                position = await durables.find_idle_durable(bus, class_, parameters.durable)
            except durables.NoIdleDurableError as error:
                raise ApiError(409, str(error)) from None
            await durables.forget_durable(bus, class_, position)
        return ActionResult(f"removed the durable {parameters.durable!r}")

    @ROUTES.add("disconnect", _ALL_RIGHTS, needs_all_rights=True)
    async def disconnect_session(self, parameters: DisconnectParameters) -> ActionResult:
        """Close the connection of a session."""
        if not self._server.disconnect_session(parameters.session):
            raise ApiError(404, f"no session {parameters.session} is connected")
        return ActionResult(f"disconnected session {parameters.session}")

    @ROUTES.add("reload", _ALL_RIGHTS, needs_all_rights=True)
    async def start_reload(self, parameters: NoParameters) -> ActionResult:
        """Read the configuration again, as SIGHUP."""
        if not self._get_lifecycle().start_reload():
            raise ApiError(409, "the server has no configuration file, users file or certificate")
        return ActionResult("reload started; the log has its result")

    @ROUTES.add("drain", _ALL_RIGHTS, needs_all_rights=True)
    async def start_drain(self, parameters: NoParameters) -> ActionResult:
        """Shut the server down, as SIGTERM."""
        lifecycle = self._get_lifecycle()

        async def drain_soon() -> None:
            await trio.sleep(_DRAIN_DELAY_SECONDS)
            lifecycle.start_drain()

        self._server.start_soon(drain_soon)
        return ActionResult("draining")

    def _get_lifecycle(self) -> LifecycleCommands:
        if self._server.lifecycle is None:
            raise ApiError(409, "the server shuts down")
        return self._server.lifecycle

    def _find_class(self, text: str) -> tuple[int, str]:
        """Return id and name of a class that the user may see. Raises ApiError."""
        registry = self._server.broker.store.class_registry
        reference = parse_class_reference(text)
        class_id = (
            reference
            if isinstance(reference, int)
            else registry.class_id_by_name.get(reference, -1)
        )
        cls = registry.classes.get(class_id)
        if cls is None or (
            self._grants is not None and not self._grants.has_any_access(class_id, cls.name)
        ):
            raise ApiError(404, f"there is no class {text!r}")
        return class_id, cls.name


async def _find_dead_class(bus: Bus, text: str, first: int) -> ClassInfo:
    """Return the class of dead letters, from a sequence on. Raises ApiError."""
    dead_class = await dead_letters.find_dead_letter_class(bus, parse_class_reference(text))
    if dead_class is None:
        raise ApiError(404, f"there is no class {text!r} with dead letters")
    return msgspec.structs.replace(dead_class, floor=max(dead_class.floor, first))


def _build_filter(selection: LetterSelection) -> DeadLetterFilter:
    """Return the filter. Raises ApiError if it selects all without `all`, or both are given."""
    has_criterion = (
        bool(selection.sequences)
        or selection.reason is not None
        or selection.subscription is not None
    )
    if has_criterion == selection.all:
        raise ApiError(400, "expected all, or sequences, reason or subscription")
    sequences = frozenset(selection.sequences) if selection.sequences else None
    return DeadLetterFilter(sequences, selection.reason, selection.subscription)


def _peek_message(message: Message[bytes], parameters: PeekParameters) -> PeekedMessage:
    payload, payload_format = format_payload(message.payload, parameters.format, parameters.bytes)
    return PeekedMessage(
        sequence=message.sequence,
        channel=message.channel,
        key=_format_key(message.key),
        headers=list(message.headers),
        payload=payload,
        format=payload_format,
        payload_bytes=len(message.payload),
        is_truncated=len(message.payload) > parameters.bytes,
    )


def _peek_letter(letter: DeadLetter, parameters: PeekParameters) -> PeekedLetter:
    payload, payload_format = format_payload(letter.payload, parameters.format, parameters.bytes)
    return PeekedLetter(
        sequence=letter.sequence,
        channel=letter.channel,
        key=_format_key(letter.key),
        headers=list(letter.headers),
        payload=payload,
        format=payload_format,
        payload_bytes=len(letter.payload),
        is_truncated=len(letter.payload) > parameters.bytes,
        reason=letter.reason,
        source_class=letter.source_class,
        source_sequence=letter.source_sequence,
        attempts=letter.attempts,
        subscription=letter.subscription,
        time=letter.time,
        error=letter.error,
    )


def format_payload(
    payload: bytes, preferred: PayloadFormat, bytes_max: int
) -> tuple[object, PayloadFormat]:
    """Return the beginning of a payload in the first format that fits, and this format."""
    part, is_truncated = payload[:bytes_max], len(payload) > bytes_max
    if preferred == "json" and not is_truncated:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            msgspec.json.decode(part)
            return msgspec.Raw(part), "json"
    if preferred != "hex":
        with suppress(UnicodeDecodeError):
            # A truncated last character is left out.
            text = codecs.getincrementaldecoder("utf-8")().decode(part, final=not is_truncated)
            return text, "text"
    return part.hex(), "hex"


def _format_key(key: bytes) -> str:
    return key.decode("utf-8", "backslashreplace")


def _estimate_bytes(message: PeekedMessage) -> int:
    payload = message.payload
    payload_bytes = len(payload) if isinstance(payload, str) else message.payload_bytes
    return payload_bytes + sum(len(name) + len(value) for name, value in message.headers)
