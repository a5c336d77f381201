"""What JetStream is told of streams and consumers.

Rule 1: pure: bodies of requests, and what answers mean.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from simplebus.core.protocol.requests import Start
from simplebus.jetstream.names import BACKLOG_CONSUMER
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection


async def list_streams(link: NatsConnection) -> tuple[list[dict[str, Any]], list[str]]:
    """How each stream of a cluster is configured; and the names of those of which that was not
    told, as they have no leader now. Raises BusConnectionError and JetStreamError."""
    found: list[dict[str, Any]] = []
    untold: list[str] = []
    while True:
        said = await link.api_request("STREAM.LIST", {"offset": len(found) + len(untold)})
        some, missing = said.get("streams") or [], said.get("missing") or []
        found += some
        untold += missing
        if not (some or missing) or len(found) + len(untold) >= int(said.get("total", 0)):
            return [each.get("config", {}) for each in found], untold


async def list_consumers(link: NatsConnection, stream: str) -> list[dict[str, Any]]:
    """What is said of each consumer of a stream. Raises BusConnectionError; and JetStreamError,
    too where some servers did not tell theirs: who took what is left for all would remove what the
    others need."""
    found: dict[str, dict[str, Any]] = {}
    offset, total = 0, -1
    while True:
        said = await link.api_request(f"CONSUMER.LIST.{stream}", {"offset": offset})
        some = said.get("consumers") or []
        if said.get("missing") or total not in (-1, int(said.get("total", 0))):
            raise JetStreamError(0, f"not all consumers of the stream {stream} were told")
        total = int(said.get("total", 0))
        found |= {str(each["name"]): each for each in some}
        offset += len(some)
        if not some or offset >= total:
            break
    if len(found) != total:
        raise JetStreamError(0, f"{len(found)} of {total} consumers of {stream} were told")
    return list(found.values())


NAME_IN_USE, WRONG_CONFIG = 10058, 10148
CONSUMER_EXISTS = frozenset({10013, 10148, 10105})
"""A consumer of this name is there, and is another one."""
MESSAGE_NOT_FOUND = frozenset({404, 10037, 10043, 10057})
"""A stream has no such message."""
STORAGE_FULL = frozenset({10002, 10023, 10028, 10047, 10077})
"""A stream, or all that an account or a server may have, is full."""
_KIND, _SERVER_ID, _CHANNELS = "simplebus", "simplebus-door", "simplebus-channels"
_OWNER, _DELIVERY_POLICY = "simplebus-owner", "simplebus-terms"
_DELIVERED_BEFORE = "simplebus-sent"
_IDENTITY = "simplebus-identity"
PLAIN_CONSUMER_IDLE_SECONDS = 86_400.0
"""How long what a plain subscription has not acknowledged waits after its door has died."""
GROUP_CONSUMER_IDLE_SECONDS = 300.0
"""How long a group without a durable's name outlives its last member."""
DURABLE_IDLE_MIN_SECONDS = 5.0
"""No durable is kept for less when nobody uses it: its door does not ask all the time."""
ACK_PENDING_MAX = 500_000
CLAIM_SECONDS = 10.0
"""How long nobody else may take up what a door has claimed."""
READER_IDLE_SECONDS = 5.0
_CLAIM = "simplebus-claim"
START_TIME_MAX = 9e9
"""Seconds since 1970. Servers count nanoseconds in 63 bits: what is later means what is to come."""
SEQUENCE_MAX = (1 << 63) - 1


def stream_config(options: JetStreamOptions, class_id: int, name: str) -> dict[str, Any]:
    """The stream of a class. What everybody has acknowledged is removed by doors, many messages at
    once: to have JetStream see to it with every acknowledgement costs as much as to store them."""
    return {
        "name": options.names.stream_name(class_id),
        "subjects": [options.names.class_subject(class_id)],
        "description": name,
        "retention": "limits",
        "storage": options.storage,
        "num_replicas": options.replicas,
        "discard": "new",
        "max_bytes": options.max_bytes or -1,
        "duplicate_window": round(options.duplicate_seconds * 1e9),
        "metadata": {_KIND: "class"},
    }


def identity_stream_config(options: JetStreamOptions, identity: str) -> dict[str, Any]:
    """The stream that says which bus it is."""
    return {
        "name": options.names.identity_stream_name,
        "subjects": [options.names.identity_subject],
        "description": "which bus the doors are",
        "storage": options.storage,
        "num_replicas": options.replicas,
        "duplicate_window": round(options.duplicate_seconds * 1e9),
        "max_msgs": 1,
        "metadata": {_KIND: "identity", _IDENTITY: identity},
    }


def cluster_id_of(info: dict[str, Any]) -> str:
    """What such a stream says; empty for another one."""
    return _metadata(info, _IDENTITY)


def consumer_config(
    options: JetStreamOptions,
    name: str,
    *,
    kind: str,
    server_id: str,
    start: dict[str, Any],
    channels: tuple[str, ...] = (),
    owner: str = "",
    delivery_policy: str = "",
    idle_seconds: float | None = None,
    is_ack_all: bool = False,
    delivered_before: int = 0,
) -> dict[str, Any]:
    """The configuration of a position: a "durable", a "group", or a "plain" one; or of a "hold",
    which keeps what another one needs that is made anew. Messages of the stream up to `sent` were
    sent by one that it takes over from. A durable that nobody uses is kept for
    `idle_seconds`, None for ever. One that no other door can have acknowledges all up to a message
    at once: one word for each costs a server as much as all the rest."""
    config: dict[str, Any] = {
        "name": name,
        "durable_name": name,
        "ack_policy": "all" if is_ack_all else "explicit",
        "ack_wait": round(options.ack_wait_seconds * 1e9),
        "max_deliver": -1,
        "max_ack_pending": ACK_PENDING_MAX,
        "replay_policy": "instant",
        "metadata": {_KIND: kind, _SERVER_ID: server_id, _CHANNELS: "\n".join(sorted(channels))},
        **start,
    }
    if owner:
        config["metadata"][_OWNER] = owner
    if delivered_before:
        config["metadata"][_DELIVERED_BEFORE] = str(delivered_before)
    if delivery_policy:
        config["metadata"][_DELIVERY_POLICY] = delivery_policy
    if kind == "plain" and name != BACKLOG_CONSUMER:
        config["inactive_threshold"] = round(PLAIN_CONSUMER_IDLE_SECONDS * 1e9)
    elif kind == "hold":
        config["inactive_threshold"] = round(CLAIM_SECONDS * 1e9)
    elif kind == "group":
        config["inactive_threshold"] = round(GROUP_CONSUMER_IDLE_SECONDS * 1e9)
    return with_idle_seconds(config, idle_seconds) if kind == "durable" else config


def with_idle_seconds(config: dict[str, Any], seconds: float | None) -> dict[str, Any]:
    """A durable that is kept for so long when nobody uses it; None for as long as before."""
    if seconds is None:
        return config
    return {**config, "inactive_threshold": round(max(seconds, DURABLE_IDLE_MIN_SECONDS) * 1e9)}


def with_delivery_policy(config: dict[str, Any], delivery_policy: str) -> dict[str, Any]:
    """One that is served on such terms."""
    return {
        **config,
        "metadata": {**(config.get("metadata") or {}), _DELIVERY_POLICY: delivery_policy},
    }


def delivery_policy_of(info: dict[str, Any]) -> str:
    """On which terms a durable or a group is served; empty where it does not say."""
    return _metadata(info, _DELIVERY_POLICY)


def idle_seconds_of(info: dict[str, Any]) -> float | None:
    """For how long a durable is kept that nobody uses; None for ever."""
    return int(info.get("config", {}).get("inactive_threshold") or 0) / 1e9 or None


def released_config(config: dict[str, Any]) -> dict[str, Any]:
    """A plain one that waits for whoever comes."""
    metadata = {**(config.get("metadata") or {}), _SERVER_ID: ""}
    return {**config, "metadata": metadata, "inactive_threshold": 0}


def taken_over_config(config: dict[str, Any], server_id: str) -> dict[str, Any]:
    """A plain one that a door has taken up."""
    metadata = {**(config.get("metadata") or {}), _SERVER_ID: server_id}
    threshold = round(PLAIN_CONSUMER_IDLE_SECONDS * 1e9)
    return {**config, "metadata": metadata, "inactive_threshold": threshold}


def claim_config(name: str, server_id: str) -> dict[str, Any]:
    """What only one door can make at a time: with it, it may take up the consumer of this name."""
    return {
        "name": f"claim-{name}",
        "durable_name": f"claim-{name}",
        "ack_policy": "none",
        "deliver_policy": "new",
        "inactive_threshold": round(CLAIM_SECONDS * 1e9),
        "metadata": {_CLAIM: server_id},
    }


def reader_config(name: str, start: dict[str, Any]) -> dict[str, Any]:
    """One that is looked through once, and remembers nothing."""
    return {
        "name": name,
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": round(READER_IDLE_SECONDS * 1e9),
        **start,
    }


def start_config(start: str | Start, last: int = SEQUENCE_MAX - 1) -> dict[str, Any]:
    """Where a position begins that takes over nothing, in a stream of which this is the last
    message: one that is to begin behind the next one begins with that."""
    match start:
        case Start(sequence=int(sequence)):
            return start_at_sequence(min(sequence, last) + 1)
        case Start(time=float(time)):
            if not time > 0.0:
                return {"deliver_policy": "all"}
            if time > START_TIME_MAX:
                return {"deliver_policy": "new"}
            at = datetime.fromtimestamp(time, UTC).isoformat().replace("+00:00", "Z")
            return {"deliver_policy": "by_start_time", "opt_start_time": at}
        case "earliest":
            return {"deliver_policy": "all"}
        case "last":
            return {"deliver_policy": "last"}
        case _:
            return {"deliver_policy": "new"}


def start_at_sequence(sequence: int) -> dict[str, Any]:
    """From this sequence of the stream on, which counts from 1."""
    return {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, sequence)}


def ack_floor(info: dict[str, Any]) -> int:
    """The first sequence of the stream that a consumer has not acknowledged, at the earliest."""
    acked = int(info.get("ack_floor", {}).get("stream_seq", 0))
    config = info.get("config", {})
    return max(acked + 1, int(config.get("opt_start_seq", 1)))


def is_ack_all(info: dict[str, Any]) -> bool:
    """Whether it acknowledges all up to a message at once."""
    return str(info.get("config", {}).get("ack_policy", "")) == "all"


def last_delivered(info: dict[str, Any]) -> int:
    """The last message of the stream that it has sent to anybody."""
    return int(info.get("delivered", {}).get("stream_seq", 0))


def last_delivered_with_predecessors(info: dict[str, Any]) -> int:
    """The same, those counted that it took over from."""
    noted = str(info.get("config", {}).get("metadata", {}).get(_DELIVERED_BEFORE, ""))
    return max(last_delivered(info), int(noted) if noted.isdecimal() and len(noted) < 20 else 0)


def delivery_count(info: dict[str, Any]) -> int:
    """How many messages it has sent, those counted that it sent again."""
    return int(info.get("delivered", {}).get("consumer_seq", 0))


def backlog_count(info: dict[str, Any]) -> int:
    """How many messages it has to send, or has sent and is to hear of."""
    return int(info.get("num_pending") or 0) + int(info.get("num_ack_pending") or 0)


def kind_of(info: dict[str, Any]) -> str:
    return _metadata(info, _KIND)


def server_id_of(info: dict[str, Any]) -> str:
    """Which door holds a plain one; empty for none."""
    return _metadata(info, _SERVER_ID)


def owner_of(info: dict[str, Any]) -> str:
    """Which user has made a durable or a group; empty for nobody."""
    return _metadata(info, _OWNER)


def channels_of(info: dict[str, Any]) -> set[str]:
    told = _metadata(info, _CHANNELS)
    return set(told.split("\n")) if told else set()


def _metadata(info: dict[str, Any], key: str) -> str:
    """One of the metadata of a stream or a consumer; empty where it says none."""
    return str((info.get("config", {}).get("metadata") or {}).get(key, ""))
