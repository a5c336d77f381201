"""Bodies of JetStream API requests, and accessors for the replies."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from simplebus.core.protocol.requests import Start
from simplebus.jetstream.names import BACKLOG_CONSUMER
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection


async def list_streams(link: NatsConnection) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the configurations of all streams, and the names of streams without a leader.

    Raises:
        BusConnectionError, JetStreamError: The request failed.
    """
    found: list[dict[str, Any]] = []
    leaderless: list[str] = []
    while True:
        reply = await link.api_request("STREAM.LIST", {"offset": len(found) + len(leaderless)})
        page, missing = reply.get("streams") or [], reply.get("missing") or []
        found += page
        leaderless += missing
        if not (page or missing) or len(found) + len(leaderless) >= int(reply.get("total", 0)):
            return [info.get("config", {}) for info in found], leaderless


async def list_consumers(link: NatsConnection, stream: str) -> list[dict[str, Any]]:
    """Return the info of every consumer of a stream.

    Raises:
        BusConnectionError: The request failed.
        JetStreamError: The request failed or the list is incomplete. An incomplete list must not be
            used: messages that a missing consumer needs would be removed.
    """
    found: dict[str, dict[str, Any]] = {}
    offset, total = 0, -1
    while True:
        reply = await link.api_request(f"CONSUMER.LIST.{stream}", {"offset": offset})
        page = reply.get("consumers") or []
        if reply.get("missing") or total not in (-1, int(reply.get("total", 0))):
            raise JetStreamError(0, f"the list of consumers of the stream {stream} is incomplete")
        total = int(reply.get("total", 0))
        found |= {str(entry["name"]): entry for entry in page}
        offset += len(page)
        if not page or offset >= total:
            break
    if len(found) != total:
        raise JetStreamError(
            0, f"received {len(found)} of {total} consumers of the stream {stream}"
        )
    return list(found.values())


NAME_IN_USE, WRONG_CONFIG = 10058, 10148
CONSUMER_EXISTS = frozenset({10013, 10148, 10105})
"""Error codes: a consumer of this name exists with another configuration."""
MESSAGE_NOT_FOUND = frozenset({404, 10037, 10043, 10057})
"""Error codes: the stream does not contain the message."""
STORAGE_FULL = frozenset({10002, 10023, 10028, 10047, 10077})
"""Error codes: the stream, the account or the server has reached its storage limit."""
_KIND, _SERVER_ID, _CHANNELS = "simplebus", "simplebus-door", "simplebus-channels"
_OWNER, _DELIVERY_POLICY = "simplebus-owner", "simplebus-terms"
_DELIVERED_BEFORE = "simplebus-sent"
_IDENTITY = "simplebus-identity"
PLAIN_CONSUMER_IDLE_SECONDS = 86_400.0
"""Time for which the unacknowledged messages of a plain subscription are kept after its server
died.
"""
GROUP_CONSUMER_IDLE_SECONDS = 300.0
"""Time for which a group without a durable outlives its last member."""
DURABLE_IDLE_MIN_SECONDS = 5.0
"""Lower limit of a durable's idle time. Its server may request no messages for a while."""
ACK_PENDING_MAX = 500_000
CLAIM_SECONDS = 10.0
"""Time for which a claim excludes other servers."""
READER_IDLE_SECONDS = 5.0
_CLAIM = "simplebus-claim"
START_TIME_MAX = 9e9
"""Latest start time, in seconds since 1970. Servers count nanoseconds in 63 bits, so a later start
time is treated as "new messages only".
"""
SEQUENCE_MAX = (1 << 63) - 1


def stream_config(options: JetStreamOptions, class_id: int, name: str) -> dict[str, Any]:
    """Return the configuration of a class's stream.

    The stream keeps acknowledged messages until a server purges them in bulk. Letting JetStream
    remove them with every ack (retention `interest`) costs as much as storing them.
    """
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
    """Return the configuration of the stream that contains the bus id."""
    return {
        "name": options.names.identity_stream_name,
        "subjects": [options.names.identity_subject],
        "description": "identity of the bus",
        "storage": options.storage,
        "num_replicas": options.replicas,
        "duplicate_window": round(options.duplicate_seconds * 1e9),
        "max_msgs": 1,
        "metadata": {_KIND: "identity", _IDENTITY: identity},
    }


def cluster_id_of(info: dict[str, Any]) -> str:
    """Return the identity in a stream's metadata; empty if the metadata has none."""
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
    """Return the configuration of a position's consumer.

    Args:
        kind: "durable", "group", "plain", or "hold" for a consumer that keeps messages while
            another consumer is recreated.
        server_id: Server that uses a plain consumer; empty if none does.
        delivery_policy: Encoded delivery policy, see `DurableCheck`.
        idle_seconds: Time for which an unused durable is kept; None for no limit.
        is_ack_all: The consumer belongs to one server, which acknowledges all messages up to
            one. An ack per message costs a NATS server as much as everything else together.
        delivered_before: Last stream sequence that the consumer's predecessor delivered.
    """
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
    """Return `config` with an idle time; None leaves the configuration unchanged."""
    if seconds is None:
        return config
    return {**config, "inactive_threshold": round(max(seconds, DURABLE_IDLE_MIN_SECONDS) * 1e9)}


def with_delivery_policy(config: dict[str, Any], delivery_policy: str) -> dict[str, Any]:
    """Return `config` with an encoded delivery policy in its metadata."""
    return {
        **config,
        "metadata": {**(config.get("metadata") or {}), _DELIVERY_POLICY: delivery_policy},
    }


def delivery_policy_of(info: dict[str, Any]) -> str:
    """Return the encoded delivery policy of a durable or group; empty without a policy."""
    return _metadata(info, _DELIVERY_POLICY)


def idle_seconds_of(info: dict[str, Any]) -> float | None:
    """Return the time in seconds for which an unused durable is kept; None for no limit."""
    return int(info.get("config", {}).get("inactive_threshold") or 0) / 1e9 or None


def released_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a plain consumer that waits for the next subscription."""
    metadata = {**(config.get("metadata") or {}), _SERVER_ID: ""}
    return {**config, "metadata": metadata, "inactive_threshold": 0}


def taken_over_config(config: dict[str, Any], server_id: str) -> dict[str, Any]:
    """Return the configuration of a plain consumer that a server has taken over."""
    metadata = {**(config.get("metadata") or {}), _SERVER_ID: server_id}
    threshold = round(PLAIN_CONSUMER_IDLE_SECONDS * 1e9)
    return {**config, "metadata": metadata, "inactive_threshold": threshold}


def claim_config(name: str, server_id: str) -> dict[str, Any]:
    """Return the configuration of a claim: a consumer that only one server can create.

    The server that creates it may take over the consumer `name`.
    """
    return {
        "name": f"claim-{name}",
        "durable_name": f"claim-{name}",
        "ack_policy": "none",
        "deliver_policy": "new",
        "inactive_threshold": round(CLAIM_SECONDS * 1e9),
        "metadata": {_CLAIM: server_id},
    }


def reader_config(name: str, start: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a temporary consumer without acknowledgements."""
    return {
        "name": name,
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": round(READER_IDLE_SECONDS * 1e9),
        **start,
    }


def start_config(start: str | Start, last: int = SEQUENCE_MAX - 1) -> dict[str, Any]:
    """Return the start of a new position in a stream that ends with sequence `last`.

    A start after the next message becomes a start at the next message.
    """
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
    """Return the start at a stream sequence, which counts from 1."""
    return {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, sequence)}


def ack_floor(info: dict[str, Any]) -> int:
    """Return the first stream sequence that the consumer may not have acknowledged."""
    acked = int(info.get("ack_floor", {}).get("stream_seq", 0))
    config = info.get("config", {})
    return max(acked + 1, int(config.get("opt_start_seq", 1)))


def is_ack_all(info: dict[str, Any]) -> bool:
    """Return True if an ack includes all earlier messages."""
    return str(info.get("config", {}).get("ack_policy", "")) == "all"


def last_delivered(info: dict[str, Any]) -> int:
    """Return the last stream sequence that the consumer delivered."""
    return int(info.get("delivered", {}).get("stream_seq", 0))


def last_delivered_with_predecessors(info: dict[str, Any]) -> int:
    """Return the last stream sequence that the consumer or its predecessors delivered."""
    recorded = str(info.get("config", {}).get("metadata", {}).get(_DELIVERED_BEFORE, ""))
    return max(
        last_delivered(info), int(recorded) if recorded.isdecimal() and len(recorded) < 20 else 0
    )


def delivery_count(info: dict[str, Any]) -> int:
    """Return the number of deliveries, including redeliveries."""
    return int(info.get("delivered", {}).get("consumer_seq", 0))


def backlog_count(info: dict[str, Any]) -> int:
    """Return the number of messages that are undelivered or unacknowledged."""
    return int(info.get("num_pending") or 0) + int(info.get("num_ack_pending") or 0)


def kind_of(info: dict[str, Any]) -> str:
    return _metadata(info, _KIND)


def server_id_of(info: dict[str, Any]) -> str:
    """Return the server that uses a plain consumer; empty if none does."""
    return _metadata(info, _SERVER_ID)


def owner_of(info: dict[str, Any]) -> str:
    """Return the user that created a durable or group; empty if unknown."""
    return _metadata(info, _OWNER)


def channels_of(info: dict[str, Any]) -> set[str]:
    channels = _metadata(info, _CHANNELS)
    return set(channels.split("\n")) if channels else set()


def _metadata(info: dict[str, Any], key: str) -> str:
    """Return a metadata value of a stream or consumer; empty if it is missing."""
    return str((info.get("config", {}).get("metadata") or {}).get(key, ""))
