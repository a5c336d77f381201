"""The byte examples of the page on the binary protocol are real, and its tables match the code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from simplebus.client import reconnect
from simplebus.core import limits
from simplebus.core.broker.broker import Settings
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import RECEIVE_PADDING_BYTES, Limits
from simplebus.core.protocol import envelope, frames, requests
from simplebus.core.protocol.envelope import Envelope
from simplebus.core.protocol.frame_splitter import SplitterScratch, split_frames
from simplebus.core.session.version1 import Version1Decoder
from simplebus.core.session.version2 import Version2Decoder
from tests.behaviour.wire_peer import BrokerHarness, WirePeer
from tests.support.oracles import parse_frame

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "protocol" / "binary.md").read_text()
VECTORS = ROOT / "protocol" / "vectors"

FRAME = re.compile(
    r"^(?P<sender>[<>]) (?P<header>[0-9a-f]{2} [0-9a-f]{4} [0-9a-f]{8} [0-9a-f]{4}) "
    r"(?:(?P<json>\{.*?\}) |(?P<hex>[0-9a-f]+) )?3c0d0a3e(?:  (?P<comment>.*))?$"
)
JSON_BODIES: dict[tuple[str, int], type[requests._JsonBody]] = {
    (">", frames.CONNECT): requests.ConnectRequest,
    ("<", frames.CONNECT): requests.ConnectReply,
    (">", frames.SUBSCRIBE): requests.SubscribeRequest,
    ("<", frames.SUBSCRIBE): requests.SubscribeReply,
    ("<", frames.ERROR): requests.ErrorReply,
}
VARIABLE_KEYS = ("bus", "run", "message")
"""Keys of replies whose values differ at each run."""


# Reading the page --------------------------------------------------------------------------------


class Example(NamedTuple):
    """Frame, or a line such as `… 6 ticks`, in which `sender` is empty."""

    sender: str
    data: bytes
    comment: str
    tick_count: int = 0


def section(heading: str) -> str:
    """Return the text below a heading, with its subsections."""
    level = len(heading) - len(heading.lstrip("#"))
    assert f"\n{heading}\n" in PAGE, heading
    return re.split(rf"\n#{{1,{level}}} ", PAGE.split(f"\n{heading}\n", 1)[1])[0]


def read_examples(text: str) -> list[Example]:
    """Return the frames of all code blocks. A line that begins with a space continues a frame."""
    found = []
    for block in re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\n +", "", block).splitlines():
            if line[0] not in "<>…":
                continue
            if line[0] == "…":
                found.append(Example("", b"", line, int(line.split()[1])))
                continue
            match = FRAME.match(line)
            assert match, line
            content = match["json"].encode() if match["json"] else bytes.fromhex(match["hex"] or "")
            data = bytes.fromhex(match["header"]) + content + frames.DELIMITER
            found.append(Example(match["sender"], data, match["comment"] or ""))
    return found


def read_tables(text: str) -> Iterator[list[list[str]]]:
    """Yield the tables of a text as rows of cells, the heading first."""
    for is_table, group in groupby(text.splitlines(), lambda line: line.startswith("|")):
        if is_table:
            rows = [[cell.strip() for cell in row[1:-1].split("|")] for row in group]
            yield [rows[0], *rows[2:]]


def find_table(first_cell: str) -> list[list[str]]:
    """Return the rows of the table whose heading begins with this cell."""
    (found,) = [table[1:] for table in read_tables(PAGE) if table[0][0] == first_cell]
    return found


def first_code(cell: str) -> str:
    """Return the text of the first code span of a cell."""
    match = re.search(r"`([^`]+)`", cell)
    assert match, cell
    return match[1]


def to_number(cell: str) -> float:
    return float(cell.replace(",", ""))


EXAMPLES = [example for example in read_examples(PAGE) if example.sender]


# Examples ----------------------------------------------------------------------------------------


def test_every_type_of_example_is_found() -> None:
    assert {example.data[0] for example in EXAMPLES} == set(b"012346789UE")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.data[:9].hex())
def test_example_is_one_frame(example: Example) -> None:
    buffer = bytearray(example.data + bytes(RECEIVE_PADDING_BYTES))
    batch = split_frames(buffer, 0, len(example.data), SplitterScratch(len(buffer)))
    assert batch is not None
    assert (batch.count, batch.data.size) == (1, len(example.data))
    frame_type, a, b, c, content = parse_frame(example.data)
    encoded = frames.encode(frame_type, class_id=a, message_id=b, timer_index=c, content=content)
    assert encoded == example.data


@pytest.mark.parametrize(
    "example", [e for e in EXAMPLES if e.data[9:10] == b"{"], ids=lambda e: e.data[:9].hex()
)
def test_json_of_example_decodes(example: Example) -> None:
    content = parse_frame(example.data)[4]
    body = requests.decode(JSON_BODIES[example.sender, example.data[0]], content)
    for name, value in json.loads(content).items():
        assert msgspec.to_builtins(getattr(body, name)) == value


@pytest.mark.parametrize(
    "example", [e for e in EXAMPLES if e.data[0] in b"389"], ids=lambda e: e.comment
)
def test_range_of_example_is_the_one_in_its_comment(example: Example) -> None:
    content = parse_frame(example.data)[4]
    quoted = re.findall(r'"([^"]*)"( LF)?', example.comment)
    expected = "".join(text + ("\n" if line_feed else "") for text, line_feed in quoted)
    assert content.decode() == expected
    range_ = re.split(rb"[ \n]", content)[0]
    assert frames.parse_ack_range(range_) == tuple(map(int, range_.split(b"-")))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("006869", (Envelope(), b"hi")),
        ("0800066f72646572736869", (Envelope(channel="orders"), b"hi")),
        ("12000000000000753000026b316869", (Envelope(expires_ms=30_000, key=b"k1"), b"hi")),
        ("20000a000574726163650001376869", (Envelope(headers=(("trace", "7"),)), b"hi")),
        ("003c0d0a003e", (Envelope(), frames.DELIMITER)),
    ],
)
def test_envelope_examples(content: str, expected: tuple[Envelope, bytes]) -> None:
    assert content in [first_code(row[0]) for row in find_table("content on the wire")]
    assert envelope.decode(bytes.fromhex(content)) == expected
    assert envelope.encode(*expected).hex() == content


def test_all_envelope_examples_are_tested() -> None:
    assert len(find_table("content on the wire")) == 5


def test_stuffing_table() -> None:
    rows = find_table("before stuffing")
    assert len(rows) == 4
    for plain, stuffed in rows:
        before, after = bytes.fromhex(first_code(plain)), bytes.fromhex(first_code(stuffed))
        assert envelope.stuff(before) == after
        assert envelope.unstuff(after) == before


def test_fields_byte_of_the_envelope() -> None:
    rows = [row for row in find_table("bytes") if row[2].startswith("bit")]
    bits = [(int(row[2][4]), int(first_code(row[2]), 16)) for row in rows]
    assert bits == [(bit, 1 << bit) for bit in range(6)]
    names = [row[1].replace(" ", "_").upper() for row in rows]
    assert [getattr(envelope, name) for name in names] == [byte for _, byte in bits]


def without_variable_keys(data: bytes) -> tuple[Any, ...]:
    """Return the fields of a frame, JSON content as an object without keys that vary."""
    *header, content = parse_frame(data)
    if content[:1] != b"{":
        return (*header, content)
    body = json.loads(content)
    return (*header, {name: body[name] for name in body if name not in VARIABLE_KEYS})


def replay(examples: list[Example]) -> None:
    """Send the client's frames to a broker and compare all frames that it sends."""
    bus = BrokerHarness(Settings())
    broker = bus.broker
    peer = WirePeer(bus, broker.open_session())
    expected: list[tuple[Any, ...]] = []
    received: list[tuple[Any, ...]] = []
    for example in examples:
        if example.sender == "<":
            expected.append(without_variable_keys(example.data))
            continue
        assert received[: len(expected)] == expected
        for _ in range(example.tick_count):
            broker.clock.now += broker.settings.tick_seconds
            bus.tick()
        if example.sender == ">":
            try:
                peer.send(example.data)
            except RemoteProtocolError as error:
                broker.send_fatal_error(peer.session, error)
        while broker.end_turn().flush:
            pass
        received += map(without_variable_keys, peer.receive_frames())
    assert received == expected


def test_session_of_version_2() -> None:
    complete = read_examples(section("### A complete session"))
    assert len(complete) == 11
    continued = read_examples(section("### Error"))
    assert len(continued) == 7
    replay(complete + continued)


def test_session_of_version_1() -> None:
    examples = read_examples(section("## Version 1"))
    assert [example.tick_count for example in examples if not example.sender] == [6]
    replay(examples)


# Tables ------------------------------------------------------------------------------------------


def read_frame_types() -> list[tuple[int, str, list[str]]]:
    """Return (type byte, frame name, other cells) of each row of the table of frame types."""
    found: list[tuple[int, str, list[str]]] = []
    for byte, name, *cells in find_table("byte"):
        if byte:
            character, number = byte.replace("`", "").split()
            assert ord(character.strip("'")) == int(number, 16)
            found.append((int(number, 16), re.sub(r"\[|\].*", "", name), cells))
        else:
            found.append((found[-1][0], found[-1][1], cells))
    return found


def test_frame_types() -> None:
    rows = read_frame_types()
    for number, name, _ in rows:
        assert getattr(frames, name.upper()) == number
    for version, decoder in (("1", Version1Decoder), ("2", Version2Decoder)):
        accepted = {n for n, _, cells in rows if cells[0] != "C" and version in cells[1]}
        assert accepted == set(decoder.HANDLERS)
    assert {n for n, _, cells in rows if cells[0] != "S" and "1" in cells[1]} <= set(b"014")


@pytest.mark.parametrize(
    ("name", "body"),
    [
        *(
            (body.__name__, body)
            for body in requests._Request.__subclasses__()
            if body.__name__ not in ("Start", "Auth", "NamedClass")
        ),
        ("ConnectReply", requests.ConnectReply),
        ("SubscribeReply", requests.SubscribeReply),
        ("FetchReply", requests.FetchReply),
        ("PurgeReply", requests.PurgeReply),
        ("ErrorReply", requests.ErrorReply),
        ("entry of `classes`", requests.NamedClass),
        ("key of `auth`", requests.Auth),
    ],
)
def test_json_keys(name: str, body: type[msgspec.Struct]) -> None:
    (table,) = [table for table in read_tables(PAGE) if table[0][0] == name]
    fields = msgspec.structs.fields(body)
    assert [first_code(row[0]) for row in table[1:]] == [field.encode_name for field in fields]
    if "default" not in table[0]:
        return
    for row, field in zip(table[1:], fields, strict=True):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if default is msgspec.NODEFAULT:
            assert row[2] == ""
        elif default is None:
            assert row[2] == "none"
        else:
            assert json.loads(row[2].strip("`").replace(",", "")) == default


def boundary_values(cell: str) -> tuple[list[object], list[object]]:
    """Return values that a type cell allows, and some that it does not."""
    kind, *ranges = re.split(r",? (?=at most|above|\d|of )", cell.split(" or more")[0], maxsplit=1)
    bounds = ranges[0] if ranges else ""
    bounds = bounds.replace("2^63 - 1", str(limits.SEQUENCE_MAX))
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", bounds)]
    if not numbers:
        return [], []
    high, low = numbers[-1], numbers[0] if len(numbers) > 1 else 0
    match kind:
        case "string":
            return ["x" * low, "x" * high], ["x" * (high + 1), *([""] if low else [])]
        case "integer" if "or more" in cell:
            return [high], [high - 1]
        case "integer":
            return [low, high], [low - 1, high + 1]
        case "number":
            is_open = "above" in bounds
            return [high, *([] if is_open else [low])], [
                high + 1,
                low - 1,
                *([low] if is_open else []),
            ]
    return [], []


@pytest.mark.parametrize(
    "body",
    [
        requests.ConnectRequest,
        requests.SubscribeRequest,
        requests.FetchRequest,
        requests.PurgeRequest,
        requests.NamedClass,
        requests.Auth,
    ],
)
def test_bounds_of_json_keys(body: type[requests._JsonBody]) -> None:
    names = {requests.NamedClass: "entry of `classes`", requests.Auth: "key of `auth`"}
    checked = 0
    for row in find_table(names.get(body, body.__name__)):
        valid, invalid = boundary_values(row[1])
        for value in valid:
            requests.decode(body, json.dumps({first_code(row[0]): value}).encode())
        for value in invalid:
            with pytest.raises(RemoteProtocolError):
                requests.decode(body, json.dumps({first_code(row[0]): value}).encode())
        checked += bool(valid)
    assert checked


def error_rows() -> tuple[dict[str, str], set[str]]:
    """Return the C characters of codes with which a session continues, and the fatal codes."""
    continuing = {
        first_code(row[0]): first_code(row[1]) for row in find_table("code, session continues")
    }
    return continuing, {first_code(row[0]) for row in find_table("code, session ends")}


def test_every_reason_code_is_listed_once() -> None:
    """Reasons that only count messages and acks are on the page of errors."""
    continuing, ending = error_rows()
    errors_page = (ROOT / "protocol" / "reference" / "errors.md").read_text()
    counted_sections = errors_page.split("### Dropped messages", 1)[1].split("\n## ", 1)[0]
    counted = set(re.findall(r"^\| `(\w+)`", counted_sections, re.MULTILINE))
    codes = [*continuing, *ending]
    assert sorted(codes) == sorted(set(codes))
    assert {*codes, *counted} == set(Reason)


def errors_of_vectors() -> Iterator[tuple[str, bool, int, int]]:
    """Yield (code, is fatal, A, C) of the Errors in the vectors."""
    invalid = json.loads((VECTORS / "v2-invalid.json").read_text())
    for vector in [*invalid["connects"], *invalid["frames"]]:
        yield vector["code"], vector["fatal"], vector["a"], vector["c"]
    for session in json.loads((VECTORS / "v2-sessions.json").read_text())["sessions"]:
        for line in session["lines"]:
            if len(line) == 4 and line[1] == "gets" and line[2].startswith("45"):
                header = bytes.fromhex(line[2])
                _, a, _, c = frames.HEADER.unpack(header)
                yield line[3]["code"], line[3].get("fatal", False), a, c


def test_error_codes_agree_with_vectors() -> None:
    continuing, ending = error_rows()
    of_first_connect = set(
        re.findall(r"`(\w+)`", section("## Errors").split("**end**")[0].split("\n\n")[-1])
    )
    assert of_first_connect <= set(continuing)
    count = 0
    for code, is_fatal, a, c in errors_of_vectors():
        count += 1
        if is_fatal:
            assert code in ending | of_first_connect
            assert (a, c) == (0, 0)
        else:
            assert (chr(c) if c else "-") in continuing[code], (code, chr(c))
            assert bool(a) is (chr(c) in "125FP"), (code, chr(c))
    assert count > 100


CONSTANTS = {
    "heartbeat of the server, seconds": limits.HEARTBEAT_SECONDS,
    "messages in flight to a subscription": limits.IN_FLIGHT_MESSAGES,
    "messages in flight to a member of a group": limits.GROUP_IN_FLIGHT_MESSAGES,
    "bytes in flight to a subscription, roughly": limits.IN_FLIGHT_BYTES,
    "memory of one pattern, besides its text": limits.PATTERN_BYTES,
    "memory of each segment of a pattern with wildcards": limits.PATTERN_SEGMENT_BYTES,
    "bytes of a key; bytes of all headers": envelope.TEXT_BYTES_MAX,
    "error texts of Nacks": limits.FAILURE_REASONS_MAX,
    "messages of a key-ordered group, waiting or in flight": limits.KEY_ORDERED_MESSAGES_MAX,
    "purged ranges of one class": limits.PURGED_RANGES_MAX,
    "producer states": limits.PRODUCER_STATES_MAX,
    "refusals kept for one publisher": limits.PRODUCER_REFUSALS_MAX,
    "bitmaps of messages stored after `next`, bytes": limits.PRODUCER_BITMAPS_BYTES_MAX,
    "frame before authentication, bytes": limits.HANDSHAKE_FRAME_BYTES_MAX,
    "request JSON, bytes": limits.REQUEST_BYTES_MAX,
    "Heartbeats before authentication": limits.HANDSHAKE_HEARTBEATS_MAX,
}


def test_limits() -> None:
    rows = find_table("limit")
    settings = {first_code(row[0]): row for row in rows if row[0].startswith("`")}
    assert set(settings) == set(Limits.__dataclass_fields__)
    quotas = {
        "classes_per_address": Limits().classes // limits.ADDRESS_QUOTA_DIVISOR,
        "classes_per_connection": Limits().classes // limits.CONNECTION_QUOTA_DIVISOR,
        "durables_per_address": Limits().durables // limits.ADDRESS_QUOTA_DIVISOR,
    }
    for name, row in settings.items():
        assert to_number(row[1]) == quotas.get(name, getattr(Limits(), name))
    constants = {row[0]: to_number(row[1]) for row in rows if not row[0].startswith("`")}
    assert constants == CONSTANTS
    for row in rows:
        assert set(re.findall(r"`(\w+)`", row[2])) <= {*Reason, *settings}


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("at most {:,} bytes of UTF-8 before", (limits.FAILURE_REASON_BYTES_MAX,)),
        ("A channel is 1 to {:,} bytes", (limits.CHANNEL_BYTES_MAX,)),
        ("length of at most {:,} pairs", (limits.HEADERS_MAX,)),
        ("then at most {} segments", (limits.PATTERN_SEGMENTS_MAX,)),
        ("more than {:,} in the server", (limits.SUBJECT_BINDINGS_MAX,)),
        ("{:,} ahead of `unconfirmed`", (limits.PRODUCER_TAKEOVER_STEP,)),
        ("is kept for {:,.0f} seconds", (limits.PRODUCER_STATE_SECONDS,)),
        ("{:,} `times` or {:,} purged", (limits.FETCH_TIMES_MAX, limits.FETCH_PURGED_MAX)),
        ("gets {} + CRC-32", (limits.ASSIGNED_CLASS_ID_MIN,)),
        ("after {} attempts any free id", (limits.ASSIGNED_CLASS_ID_PROBES,)),
        ("doubled, up to {} ticks", (limits.BACKOFF_TICKS_MAX,)),
        ("by default {} *ticks* of a second", (Settings().ack_timeout,)),
        ("(by default {})", (limits.DEFAULT_DELIVERIES_MAX,)),
        ("after {} seconds or {:,} messages", (limits.ACK_SECONDS, limits.ACK_BATCH_MESSAGES)),
        (
            "waits {} seconds, doubled after each failure up to {:.0f}",
            (reconnect.RETRY_DELAY_MIN_SECONDS, reconnect.RETRY_DELAY_MAX_SECONDS),
        ),
        ("A connection of {:.0f} seconds", (reconnect.STABLE_CONNECTION_SECONDS,)),
    ],
)
def test_numbers_in_sentences(words: str, values: tuple[object, ...]) -> None:
    assert words.format(*values) in " ".join(PAGE.split())


def test_retried_codes() -> None:
    text = " ".join(section("## Client behaviour").split())
    item = text.split("Retry after a lost connection,")[1].split(". ")[0]
    _, ending = error_rows()
    retried = {
        code
        for code in ending
        if reconnect.is_worth_retrying(RemoteProtocolError(Reason(code), ""))
    }
    assert set(re.findall(r"`(\w+)`", item)) == {*retried, "draining"}


def test_ticks_of_redelivery() -> None:
    (cells,) = find_table("delivery")
    delay, tick, ticks = Settings().ack_timeout, 0, [0]
    for _ in range(limits.DEFAULT_DELIVERIES_MAX):
        tick += delay
        ticks.append(tick)
        delay = min(2 * delay, limits.BACKOFF_TICKS_MAX)
    found = [int(cell.removeprefix("k").removeprefix(" + ") or 0) for cell in cells[1:]]
    assert found == [*ticks[:7], ticks[-1]]
