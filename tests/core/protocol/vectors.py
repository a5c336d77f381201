"""Reads the test vectors of the binary protocol (protocol/vectors/*.json)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.cases import for_each

VECTORS = Path(__file__).parents[3] / "protocol" / "vectors"

Vector = dict[str, Any]


def vectors(file: str, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test for each vector in the list `name` of a vector file."""
    found = json.loads((VECTORS / f"{file}.json").read_text())[name]
    return for_each("vector", {vector["name"]: vector for vector in found})


def vector_bytes(vector: Vector, prefix: str = "") -> bytes:
    """Return the bytes of the field `hex` or `parts` with this prefix."""
    if f"{prefix}hex" in vector:
        return bytes.fromhex(vector[f"{prefix}hex"])
    return b"".join(bytes.fromhex(piece) * count for piece, count in vector[f"{prefix}parts"])
