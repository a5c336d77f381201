"""Server with small segments and frequent snapshots, for tests of their boundaries under load."""

from __future__ import annotations

from simplebus.cli import main
from simplebus.core import checkpoint
from simplebus.storage.journal import Journal

SEGMENT_BYTES = 256 * 1024
SNAPSHOT_BYTES = 64 * 1024
SNAPSHOT_FRAME_BYTES = 1024 * 1024


def use_small_sizes() -> None:
    """Set small sizes for this process."""
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
    use_small_sizes()
    main()
