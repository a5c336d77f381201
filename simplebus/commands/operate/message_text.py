"""Messages as lines of text and as JSON objects."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable

_SHOWN_BYTES = 80


def format_key(key: bytes) -> str:
    """Return a key for the end of a line; empty without a key."""
    return f"  key={_decode(key)}" if key else ""


def format_content(headers: Iterable[tuple[str, str]], payload: bytes) -> list[str]:
    """Return headers and the beginning of the payload as indented lines."""
    omitted_bytes = len(payload) - _SHOWN_BYTES
    more = f"… and {omitted_bytes:,} bytes" if omitted_bytes > 0 else ""
    return [
        *(f"    {name}={value}" for name, value in headers),
        f"    {_decode(payload[:_SHOWN_BYTES])}{more}",
    ]


def encode_content(
    key: bytes, headers: Iterable[tuple[str, str]], payload: bytes
) -> dict[str, object]:
    """Return headers, key and payload for JSON; `…_base64` if bytes are not UTF-8."""
    record: dict[str, object] = {"headers": [list(pair) for pair in headers]}
    for name, data in (("key", key), ("payload", payload)):
        try:
            record[name] = data.decode()
        except UnicodeDecodeError:
            record[name + "_base64"] = b64encode(data).decode()
    return record


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
