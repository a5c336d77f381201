"""A kept bus whose classes are larger than memory, read back as `serve` does, without a thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simplebus.core.broker import Settings
from simplebus.core.limits import Limits
from simplebus.core.settings import FullPolicy
from simplebus.core.spilling import Read
from simplebus.storage.readback import JournalReader
from storage.kept_bus import KeptBus


def small(messages: int = 64, **given: Any) -> Settings:
    """A class holds so many messages in memory."""
    return Settings(limits=Limits(class_messages=messages), full_policy=FullPolicy.SPILL, **given)


class SpilledBus(KeptBus):
    """See the module's law."""

    def __init__(self, path: Path, **given: Any) -> None:
        given.setdefault("settings", small())
        super().__init__(path, **given)
        self.reader = JournalReader(path)
        self.reads = 0
        self.trusting = True  # Each `sync` checks the bus.

    def bring(self) -> None:
        """Have everything read that is asked for, until nothing is."""
        spilling = self.broker.spilling
        assert spilling is not None
        while True:
            self.broker.take_ready()
            reads = spilling.take_reads()
            if not reads:
                break
            for read in reads:
                self.answer(read)

    def answer(self, read: Read) -> None:
        """Read what is asked for."""
        assert self.broker.spilling is not None
        self.reads += 1
        try:
            found = self.reader.read(read)
        except OSError:
            self.broker.spilling.failed(read)
        else:
            self.broker.spilling.given(read, found)
