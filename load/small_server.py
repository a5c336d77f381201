"""The server, but for its sizes: segments end soon, and all beside messages is written anew often.

Rule 1: what comes once an hour elsewhere comes many times in the life of one process here: the end
of a segment, its removal, a snapshot because of how much was written.
"""

from __future__ import annotations

from simplebus.cli import main
from simplebus.core import checkpoint
from simplebus.storage.journal import Journal

SEGMENT_BYTES = 256 * 1024
SNAPSHOT_BYTES = 64 * 1024
SNAPSHOT_FRAME_BYTES = 1024 * 1024


def shrink() -> None:
    """Have all of this process be so small."""
    defaults = Journal.__init__.__kwdefaults__
    assert defaults is not None
    assert "segment_bytes" in defaults
    defaults["segment_bytes"] = SEGMENT_BYTES
    for name, size in {
        "SNAPSHOT_CHANGE_BYTES_MIN": SNAPSHOT_BYTES,
        "SNAPSHOT_MESSAGE_BYTES": SNAPSHOT_FRAME_BYTES,
    }.items():
        assert hasattr(checkpoint, name)
        setattr(checkpoint, name, size)


if __name__ == "__main__":
    shrink()
    main()
