"""What there is in a cluster, all of a kind (trio).

Rule 1: servers tell so many at once, and are asked on until all are told.
"""

from __future__ import annotations

from typing import Any

from simplebus.engine.link import Link
from simplebus.nats.client.jetstream import JetStreamError


async def streams(link: Link) -> tuple[list[dict[str, Any]], list[str]]:
    """How each stream of a cluster is configured; and the names of those of which that was not
    told, as they have no leader now. Raises BusConnectionError and JetStreamError."""
    found: list[dict[str, Any]] = []
    untold: list[str] = []
    while True:
        said = await link.ask("STREAM.LIST", {"offset": len(found) + len(untold)})
        some, missing = said.get("streams") or [], said.get("missing") or []
        found += some
        untold += missing
        if not (some or missing) or len(found) + len(untold) >= int(said.get("total", 0)):
            return [each.get("config", {}) for each in found], untold


async def consumers_of(link: Link, stream: str) -> list[dict[str, Any]]:
    """What is said of each consumer of a stream. Raises BusConnectionError; and JetStreamError,
    too where some servers did not tell theirs: who took what is left for all would remove what the
    others need."""
    found: dict[str, dict[str, Any]] = {}
    offset, total = 0, -1
    while True:
        said = await link.ask(f"CONSUMER.LIST.{stream}", {"offset": offset})
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
