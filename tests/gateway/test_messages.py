"""Messages and their byte form."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.gateway import result_codes
from simplebus.gateway.errors import MalformedError, ModuleBusError, Result
from simplebus.gateway.messages import MESSAGE_BYTES_MAX, QUEUE_UNIT_BYTES, ModuleMessage

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=8)
MESSAGES = st.builds(
    ModuleMessage, st.binary(max_size=40), st.dictionaries(TEXTS, TEXTS, max_size=3)
)

EMPTY = bytes.fromhex("a160 01 0000000f 00000000 00000000")
ONE = b"\xa1\x60\x01\x00\x00\x00\x1c\x00\x00\x00\x01sensor\0roof\0\x00\x00\x00\x01!"


PROTOCOL = Path(__file__).parents[2] / "protocol"
PAGE = (PROTOCOL / "modules.md").read_text()
VECTORS: dict[str, Any] = json.loads((PROTOCOL / "vectors" / "modules.json").read_text())


def write_slowly(message: ModuleMessage, *, versioned: bool) -> bytes:
    """Encode a message byte by byte, as protocol/modules.md describes it."""
    body = bytearray(len(message.properties).to_bytes(4, "big"))
    for name, value in message.properties.items():
        for text in name, value:
            body.extend(text.encode())
            body.append(0)
    body.extend(len(message.content).to_bytes(4, "big"))
    body.extend(message.content)
    head = b"\xa1\x60\x01" if versioned else b"\xa1\x60"
    return head + (len(head) + 4 + len(body)).to_bytes(4, "big") + body


def test_byte_form_matches_documentation() -> None:
    assert ModuleMessage().to_bytes() == EMPTY
    assert len(EMPTY) == 15
    assert len(ModuleMessage().to_bytes(version=None)) == 14
    message = ModuleMessage(b"!", {"sensor": "roof"})
    encoded = message.to_bytes()
    assert encoded[:3] + encoded[7:] == ONE[:3] + ONE[7:]
    assert int.from_bytes(encoded[3:7], "big") == len(encoded) == message.size


def test_page_example_is_valid() -> None:
    (example,) = re.findall(r"^```\n(A1 60.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    message = ModuleMessage(b"21.5", {"sensor": "roof"})
    assert bytes.fromhex(example) == message.to_bytes() == write_slowly(message, versioned=True)
    assert f"has {len(EMPTY)} bytes" in PAGE
    assert f"the longest has {MESSAGE_BYTES_MAX:,}" in PAGE


def test_page_names_existing_tests_and_calls() -> None:
    test_code = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name in re.findall(r"\*(test_\w+)\*", PAGE):
        assert f"def {name}(" in test_code, name
    (calls,) = re.findall(r"`simplebus\.gateway\.result_codes`: (.*?)\. The last", PAGE, re.DOTALL)
    for name in re.findall(r"`(\w+)`", calls):
        assert callable(getattr(result_codes, name)), name
    assert re.findall(r"^\| `([A-Z]+)` \|", PAGE, re.MULTILINE) == [each.name for each in Result]


def test_vectors_match() -> None:
    names = [each["name"] for key in ("messages", "invalid") for each in VECTORS[key]]
    assert len(set(names)) == len(names)
    for each in VECTORS["messages"]:
        message = ModuleMessage(bytes.fromhex(each["content_hex"]), dict(each["properties"]))
        data, is_versioned = bytes.fromhex(each["hex"]), bool(each["version"])
        assert data == write_slowly(message, versioned=is_versioned), each["name"]
        assert data == message.to_bytes(version=each["version"] or None), each["name"]
        assert ModuleMessage.from_bytes(data) == message, each["name"]
    for each in VECTORS["invalid"]:
        with pytest.raises(MalformedError):
            ModuleMessage.from_bytes(bytes.fromhex(each["hex"]))


@given(MESSAGES, st.booleans())
def test_byte_form_round_trips(message: ModuleMessage, versioned: bool) -> None:
    data = message.to_bytes() if versioned else message.to_bytes(version=None)
    assert data == write_slowly(message, versioned=versioned)
    decoded = ModuleMessage.from_bytes(data)
    assert decoded == message
    assert decoded.size == message.size
    assert list(decoded.properties) == list(message.properties)
    assert ModuleMessage.from_bytes(memoryview(data)) == message


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_parse_or_raise_malformed_error(data: bytes, begins_well: bool) -> None:
    if begins_well:
        data = b"\xa1\x60\x01" + struct.pack(">I", len(data) + 7) + data
    with contextlib.suppress(MalformedError):
        message = ModuleMessage.from_bytes(data)
        assert data in (message.to_bytes(), message.to_bytes(version=None))


@given(MESSAGES, st.data())
def test_mutated_bytes_raise_only_malformed_error(
    message: ModuleMessage, data: st.DataObject
) -> None:
    encoded = message.to_bytes()
    index = data.draw(st.integers(0, len(encoded) - 1))
    for broken in (encoded[:index], encoded + b"\0"):
        with pytest.raises(MalformedError):
            ModuleMessage.from_bytes(broken)
    changed = (
        encoded[:index]
        + bytes([encoded[index] ^ data.draw(st.integers(1, 255))])
        + encoded[index + 1 :]
    )
    with contextlib.suppress(MalformedError):
        ModuleMessage.from_bytes(changed)


@pytest.mark.parametrize(
    ("data", "expected_error"),
    [
        (b"", "begins with a1 60, got no bytes"),
        (b"\xa1\x61" + EMPTY[2:], "begins with a1 60, got a1 61"),
        (EMPTY[:-1], "at least 15 bytes, got 14"),
        (b"\xa1\x60\0\0\0", "at least 14 bytes, got 5"),
        (EMPTY + b"x", "the total size is 15 bytes, but there are 16"),
        (bytes.fromhex("a160 01 0000000f ffffffff 00000000"), "4,294,967,295 properties"),
        (bytes.fromhex("a160 01 0000000f 00000000 00000001"), "expected 0 for the content's size"),
        (bytes.fromhex("a160 01 00000011 00000001 4100 42424200"), "expected the size"),
        (bytes.fromhex("a160 01 00000011 00000001 414141414141"), "end with a NUL"),
        (bytes.fromhex("a160 01 00000012 00000001 ff00 00 00000000"), "not valid UTF-8"),
        (
            bytes.fromhex("a160 01 00000015 00000002 00 00 00 00 00000000 0000"),
            "have the same name",
        ),
    ],
)
def test_malformed_error_names_expectation(data: bytes, expected_error: str) -> None:
    with pytest.raises(MalformedError, match=expected_error):
        ModuleMessage.from_bytes(data)


def test_message_is_immutable() -> None:
    names = {"a": "1"}
    content = bytearray(b"one")
    message = ModuleMessage(content, names)
    names["a"] = "2"
    content[0] = 0
    assert message == ModuleMessage(b"one", {"a": "1"})
    assert hash(message) == hash(ModuleMessage(b"one", {"a": "1"}))
    for attribute in "content", "properties", "size", "other":
        with pytest.raises(AttributeError, match="immutable"):
            setattr(message, attribute, b"")
        with pytest.raises(AttributeError, match="immutable"):
            delattr(message, attribute)
    with pytest.raises(TypeError):
        message.properties["a"] = "3"  # type: ignore[index]


def test_replace_returns_new_message() -> None:
    message = ModuleMessage(b"one", {"a": "1"})
    assert message.replace(b"two") == ModuleMessage(b"two", {"a": "1"})
    assert message.replace(properties={}) == ModuleMessage(b"one")
    assert message != "one"
    assert repr(message) == "ModuleMessage(b'one', {'a': '1'})"
    assert repr(ModuleMessage(b"x" * 65)) == f"ModuleMessage({b'x' * 64 + b'...'!r}, {{}})"
    assert pickle.loads(pickle.dumps(message)) == copy.copy(message) == message


@given(st.integers(0, 3), st.integers(-2, 2), st.integers(-1, 9), st.booleans())
def test_long_message_uses_several_queue_units(
    times: int, extra_bytes: int, places: int, in_properties: bool
) -> None:
    """Tests lengths around each limit. The argument `places` is ignored."""
    minimum_size = 15 + 3 * in_properties  # The name `a`, and two NULs.
    length = max(0, times * QUEUE_UNIT_BYTES - minimum_size + extra_bytes)
    text = "x" * length
    message = (
        ModuleMessage(b"", {"a": text}, places)  # type: ignore[call-arg]
        if in_properties
        else ModuleMessage(text.encode(), {}, places)  # type: ignore[call-arg]
    )
    assert message.size == len(message.to_bytes()) == minimum_size + length
    assert message.places == max(1, -(-message.size // QUEUE_UNIT_BYTES))
    assert ModuleMessage(message.content, message.properties) == message
    assert ModuleMessage(text.encode()).places == ModuleMessage(bytearray(text.encode())).places


@pytest.mark.parametrize(
    ("content", "properties", "expected_error"),
    [
        ("text", {}, "content must be bytes, got 'text'"),
        (b"", {"a": 1}, "got 'a': 1"),
        (b"", 0, "texts by their names, got 0"),
        (b"", [("a", "1")], "texts by their names, got \\["),
        (b"", {1: "a"}, "got 1: 'a'"),
        (b"", {"a\0": "1"}, "NUL"),
        (b"", {"a": "\0"}, "NUL"),
        (b"", {"a": "\ud800"}, "UTF-8"),
    ],
)
def test_rejects_invalid_message(
    content: bytes, properties: dict[str, str], expected_error: str
) -> None:
    with pytest.raises(ModuleBusError, match=expected_error) as caught:
        ModuleMessage(content, properties)
    assert caught.value.result is Result.INVALIDARG


def test_longest_message_has_byte_form() -> None:
    longest = ModuleMessage(bytes(MESSAGE_BYTES_MAX - 15))
    assert ModuleMessage.from_bytes(longest.to_bytes()) == longest
    with pytest.raises(ModuleBusError, match="at most 16,777,215 bytes, got 16,777,216"):
        ModuleMessage(bytes(MESSAGE_BYTES_MAX - 14))
    with pytest.raises(ModuleBusError, match="version must be 1 or None, got 2"):
        longest.to_bytes(version=2)
    with pytest.raises(ModuleBusError, match="must be bytes, got 'a'"):
        ModuleMessage.from_bytes("a")  # type: ignore[arg-type]
