"""The `bridge-path` header, which lists the buses that a message has passed.

The header holds the identities of the buses (`bus` in protocol version 2), oldest first, separated
by a space. A bridge appends the identity of its source. It does not copy a message that has passed
its target, so a message reaches a bus once by every loop-free route.

    published on a            (no header)
    copied from a to b        bridge-path: a
    copied from b to c        bridge-path: a b
    c to a                    skipped: the path contains a
"""

from __future__ import annotations

from collections.abc import Collection

PATH_HEADER = "bridge-path"
"""Name of the header. If a message has several, the last one counts."""
HOPS_MAX = 16
"""Largest number of buses on a path, regardless of its content."""

Headers = tuple[tuple[str, str], ...]


def parse_path(headers: Headers) -> list[str]:
    """Return the buses that a message passed before it reached the source."""
    values = [value for name, value in headers if name == PATH_HEADER]
    return values[-1].split() if values else []


def extend_path(
    headers: Headers, *, source: str, targets: Collection[str], hops_max: int = HOPS_MAX
) -> Headers | None:
    """Return the headers of a message at the target, or None if it must not be copied there.

    Args:
        headers: Headers of the message at the source.
        source: Identity of the source.
        targets: Identities of the target.
        hops_max: Largest number of buses on the path, the source included.
    """
    path = parse_path(headers)
    if source in path or len(path) >= hops_max or any(identity in targets for identity in path):
        return None
    other_headers = tuple(pair for pair in headers if pair[0] != PATH_HEADER)
    return (*other_headers, (PATH_HEADER, " ".join([*path, source])))
