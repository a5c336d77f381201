"""Upgrade of existing streams to the options of a server.

A stream gets more replicas or a longer duplicate window if the options require it, and never fewer,
because other servers may rely on them. A stream in memory cannot be upgraded to file storage and is
refused.
"""

from __future__ import annotations

from typing import Any

from simplebus.core.errors import BusConnectionError
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.logs.event_logger import EventLogger
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = EventLogger("simplebus.engine")

_UPDATE_SECONDS = 10.0


def storage_problem(config: dict[str, Any], options: JetStreamOptions) -> str:
    """Return why a stream is less durable than the options promise; empty if it is not."""
    if options.storage == "file" and config.get("storage") == "memory":
        return (
            f"the stream {config.get('name')} stores messages in memory, but --engine-storage is "
            "file: start the servers with --engine-storage memory, or delete the stream after its "
            "messages were consumed"
        )
    return ""


def required_changes(config: dict[str, Any], options: JetStreamOptions) -> dict[str, Any]:
    """Return the changes that a stream's configuration needs to satisfy the options."""
    window = round(options.duplicate_seconds * 1e9)
    changes: dict[str, Any] = {}
    if int(config.get("num_replicas") or 1) < options.replicas:
        changes["num_replicas"] = options.replicas
    if int(config.get("duplicate_window") or 0) < window:
        changes["duplicate_window"] = window
    return changes


async def upgrade_stream(
    link: NatsConnection, config: dict[str, Any], options: JetStreamOptions
) -> None:
    """Apply the required changes to an existing stream."""
    if not (changes := required_changes(config, options)):
        return
    name = config.get("name")
    change_text = ", ".join(
        f"{key} from {config.get(key)} to {each}" for key, each in changes.items()
    )
    try:
        body = {**config, **changes}
        await link.api_request(f"STREAM.UPDATE.{name}", body, seconds=_UPDATE_SECONDS)
        log.info(
            "stream.upgraded",
            "upgraded the stream {stream}: {changes}",
            stream=name,
            changes=change_text,
        )
    except (BusConnectionError, JetStreamError) as error:
        log.warning(
            "stream.upgrade_failed",
            "cannot upgrade the stream {stream} ({changes}): {error}",
            stream=name,
            changes=change_text,
            error=error,
        )


async def check_and_upgrade_stream(
    link: NatsConnection, config: dict[str, Any], options: JetStreamOptions
) -> None:
    """Check and upgrade the stream of a class. Raises JetStreamError if it must not be used."""
    if problem := storage_problem(config, options):
        raise JetStreamError(0, problem)
    bytes_max = max(0, int(config.get("max_bytes") or 0))
    if bytes_max != options.max_bytes:
        log.warning(
            "stream_limit.differed",
            "the stream {stream} has the size limit {limit}, which stays in force; "
            "--engine-max-bytes is {wanted_limit}",
            stream=config.get("name"),
            limit=_format_limit(bytes_max),
            wanted_limit=_format_limit(options.max_bytes),
        )
    await upgrade_stream(link, config, options)


def _format_limit(size: int) -> str:
    return f"{size} bytes" if size else "unlimited"
