"""Streams that were made for less than a door is to promise now (trio).

Rule 1: what a door confirms is kept as its options say, or the class waits: a stream that keeps
messages in memory is none for a door that says that they are in files.
Rule 2: a stream grows to what a door's options say, and never shrinks, for others may count on it.
Where it cannot, or has a bound that the options do not know, the log says so.
"""

from __future__ import annotations

import logging
from typing import Any

from simplebus.core.errors import BusConnectionError
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

log = logging.getLogger("simplebus.engine")

_UPDATE_SECONDS = 10.0


def storage_problem(config: dict[str, Any], options: JetStreamOptions) -> str:
    """Why no door with these options may confirm what such a stream keeps; empty if it may."""
    if options.storage == "file" and config.get("storage") == "memory":
        return (
            f"the stream {config.get('name')} keeps messages in memory, and a door here says that "
            "they are in files: start doors with --engine-storage memory, or remove that stream "
            "when all that is in it has been read"
        )
    return ""


def required_changes(config: dict[str, Any], options: JetStreamOptions) -> dict[str, Any]:
    """What is to change in the configuration of a class's stream for it to keep as these options
    say."""
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
    """Have a stream that is there keep as these options say."""
    if not (changes := required_changes(config, options)):
        return
    name = config.get("name")
    change_text = ", ".join(
        f"{key} from {config.get(key)} to {each}" for key, each in changes.items()
    )
    try:
        body = {**config, **changes}
        await link.api_request(f"STREAM.UPDATE.{name}", body, seconds=_UPDATE_SECONDS)
        log.info("the stream %s grows as the options say: %s", name, change_text)
    except (BusConnectionError, JetStreamError) as error:
        log.warning(
            "the stream %s does not grow as the options say, %s: %s", name, change_text, error
        )


async def check_and_upgrade_stream(
    link: NatsConnection, config: dict[str, Any], options: JetStreamOptions
) -> None:
    """The same of a class's stream. Raises JetStreamError where a door must not use it."""
    if problem := storage_problem(config, options):
        raise JetStreamError(0, problem)
    bytes_max = max(0, int(config.get("max_bytes") or 0))
    if bytes_max != options.max_bytes:
        log.warning(
            "the stream %s has room for %s, which holds, and --engine-max-bytes says %s",
            config.get("name"),
            _format_limit(bytes_max),
            _format_limit(options.max_bytes),
        )
    await upgrade_stream(link, config, options)


def _format_limit(size: int) -> str:
    return f"{size} bytes" if size else "any number of bytes"
