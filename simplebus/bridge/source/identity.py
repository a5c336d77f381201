"""Detection of a source that was restored from an old copy.

After such a restore a sequence can belong to another message, so a target that recognizes
messages by their sequence would drop new ones as duplicates. The copier detects this by
the last message that it sent, which it keeps in memory. The target then uses new
message ids.
"""

from __future__ import annotations

import secrets

from simplebus.bridge.checkpoint import MessageFingerprint
from simplebus.bridge.interfaces import MessageSource, TargetBatch
from simplebus.client.core.client import ClientCore
from simplebus.core.protocol.durability import Durability
from simplebus.logs.event_logger import EventLogger

log = EventLogger("simplebus.bridge")


def sequence_scope(source: ClientCore) -> str:
    """Return the scope in which a sequence of the source identifies one message.

    A bus without disk durability can lose messages that it delivered, so its scope is one run
    of the server.
    """
    return (
        source.bus_id
        if source.durability is Durability.DISK
        else f"{source.bus_id} {source.run_id}"
    )


class SourceIdentity:
    """Detector of a restored source, kept by a copier from one connection to the next."""

    def __init__(self) -> None:
        self.era = ""
        """Suffix of message ids, which changes when the source was restored from an old copy."""
        self._storage_id = ""
        self._last_sent: tuple[int, MessageFingerprint] | None = None
        """Sequence and fingerprint of the last message that was sent."""

    def note_sent(self, source: MessageSource, batch: TargetBatch) -> None:
        """Note that `batch` was sent."""
        if batch.last_fingerprint is not None:
            self._storage_id = source.storage_id
            self._last_sent = int(batch.sequences[-1]), batch.last_fingerprint

    async def check_unchanged(self, source: MessageSource, name: str) -> int:
        """Compare the last message sent with the opened source.

        Returns:
            1 if the source was restored from an old copy, otherwise 0.
        """
        if self._last_sent is None or self._storage_id != source.storage_id:
            return 0
        sequence, fingerprint = self._last_sent
        if sequence < source.head:
            current = await source.read_fingerprint(sequence)
            # A removed message cannot be compared.
            if current is None or fingerprint.may_match(current):
                return 0
        log.warning(
            "source.restored",
            "{copier}: {source} was restored from an old copy; messages copied since then may"
            " be copied again",
            copier=name,
            source=source.identity,
        )
        self.era, self._last_sent = f" {secrets.token_hex(4)}", None
        return 1
