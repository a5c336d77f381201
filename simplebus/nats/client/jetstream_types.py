"""Shapes of the JetStream API replies, limited to the fields in use.

Any client with permission may answer an API request, so every reply is checked before it is used.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class StreamState(TypedDict):
    """Messages of a stream. An empty stream has first_seq = last_seq + 1."""

    messages: NotRequired[Count]
    bytes: NotRequired[Count]
    first_seq: Count
    last_seq: Count
    consumer_count: NotRequired[Count]


class StreamConfig(TypedDict):
    """Configuration of a stream."""

    name: str
    description: NotRequired[str | None]
    retention: NotRequired[str]
    subjects: NotRequired[list[str] | None]
    storage: NotRequired[str]
    num_replicas: NotRequired[int]
    max_msgs: NotRequired[int]
    max_bytes: NotRequired[int]
    duplicate_window: NotRequired[int]
    no_ack: NotRequired[bool]
    metadata: NotRequired[dict[str, str] | None]


class StreamInfo(TypedDict):
    """Reply to STREAM.INFO, STREAM.CREATE and STREAM.UPDATE."""

    created: NotRequired[str]
    config: StreamConfig
    state: StreamState


class StreamList(TypedDict):
    """Reply to STREAM.LIST: one page of streams."""

    total: Count
    streams: list[StreamInfo] | None
    missing: NotRequired[list[str] | None]


class ConsumerConfig(TypedDict, total=False):
    """Configuration of a consumer."""

    opt_start_seq: Count
    ack_policy: str
    inactive_threshold: int
    max_ack_pending: int
    max_batch: int
    metadata: dict[str, str] | None


class SequencePair(TypedDict):
    """Stream and consumer sequence."""

    stream_seq: Count
    consumer_seq: NotRequired[Count]


class ConsumerInfo(TypedDict):
    """Reply to CONSUMER.INFO and CONSUMER.CREATE."""

    name: str
    config: ConsumerConfig
    delivered: SequencePair
    ack_floor: SequencePair
    num_pending: NotRequired[Count]
    num_waiting: NotRequired[Count]
    num_ack_pending: NotRequired[Count]


class ConsumerList(TypedDict):
    """Reply to CONSUMER.LIST: one page of consumers."""

    total: Count
    consumers: list[ConsumerInfo] | None
    missing: NotRequired[list[str] | None]


class StoredMessage(TypedDict):
    """Message of a stream."""

    seq: Count
    hdrs: NotRequired[str]


class MessageFound(TypedDict):
    """Reply to STREAM.MSG.GET."""

    message: StoredMessage


_REPLY_TYPES: dict[str, Any] = {
    "STREAM.INFO.": StreamInfo,
    "STREAM.CREATE.": StreamInfo,
    "STREAM.UPDATE.": StreamInfo,
    "STREAM.LIST": StreamList,
    "STREAM.MSG.GET.": MessageFound,
    "CONSUMER.INFO.": ConsumerInfo,
    "CONSUMER.CREATE.": ConsumerInfo,
    "CONSUMER.DURABLE.CREATE.": ConsumerInfo,
    "CONSUMER.LIST.": ConsumerList,
}


def check_reply(subject: str, reply: dict[str, Any]) -> None:
    """Raise ValueError if the reply to this request (without the API prefix) has a wrong shape."""
    shape = next(
        (kind for begins, kind in _REPLY_TYPES.items() if subject.startswith(begins)), None
    )
    if shape is None:
        return
    try:
        msgspec.convert(reply, shape)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
