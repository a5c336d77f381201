"""Where a message has been: the header that says so, and keeps it from going in a circle.

Rule 1: the header names buses by the identities that they give themselves (`bus` in protocol
version 2), the one that accepted the message first in front, one space between two.
Rule 2: a bridge adds the bus that it reads from, and leaves out what has been on the bus that it
would write to. So a message comes to a bus once by each way that leads there without a circle.

    published on a            (no header)
    copied from a to b        bridge-path: a
    copied from b to c        bridge-path: a b
    c to a                    left out: a is in it
"""

from __future__ import annotations

from collections.abc import Collection

PATH = "bridge-path"
"""The header's name. Of several the last one counts."""
HOPS_MAX = 16
"""So many buses a message sees at most, whoever has written what into the header."""

Headers = tuple[tuple[str, str], ...]


def path_of(headers: Headers) -> list[str]:
    """The buses that a message was on before the one that it came from."""
    found = [value for name, value in headers if name == PATH]
    return found[-1].split() if found else []


def stamped(
    headers: Headers, *, here: str, there: Collection[str], hops: int = HOPS_MAX
) -> Headers | None:
    """The headers that a message has at the far end; None where it is not to go there.

    `here` is the near end's identity, `there` holds those that the far end goes by. With this step
    it has made at most so many `hops`.
    """
    path = path_of(headers)
    if here in path or len(path) >= hops or any(each in there for each in path):
        return None
    others = tuple(pair for pair in headers if pair[0] != PATH)
    return (*others, (PATH, " ".join([*path, here])))
