"""`LineReader` with chunks of any size."""

from __future__ import annotations

import trio
from hypothesis import given
from hypothesis import strategies as st

from simplebus.console.stdin_lines import LineReader

PIECES = st.lists(st.text("ab\n", min_size=1, max_size=5).map(str.encode), max_size=8)


def lines_of(pieces: list[bytes]) -> LineReader:
    remaining_pieces = [*pieces, b""]

    async def receive() -> bytes:
        await trio.lowlevel.checkpoint()
        return remaining_pieces.pop(0)

    return LineReader(receive)


def expected(pieces: list[bytes]) -> list[bytes]:
    *whole, last = b"".join(pieces).split(b"\n")
    return whole + [last] * bool(last)


@given(PIECES)
def test_lines_are_independent_of_chunk_sizes(pieces: list[bytes]) -> None:
    async def main() -> list[bytes]:
        return [line.encode() async for line in lines_of(pieces)]

    assert trio.run(main) == expected(pieces)


@given(PIECES)
def test_read_lines_returns_at_least_one_line_until_the_end(pieces: list[bytes]) -> None:
    async def main() -> list[bytes]:
        lines, found = lines_of(pieces), []
        while block := await lines.read_lines():
            found += block
        assert await lines.read_lines() == []
        return found

    assert trio.run(main) == expected(pieces)


async def test_a_line_is_there_before_the_next_piece_comes() -> None:
    send, receive = trio.open_memory_channel[bytes](1)
    lines = LineReader(receive.receive)
    await send.send(b"one\ntwo\nthr")
    assert await anext(lines) == "one"
    assert await anext(lines) == "two"
    await send.send(b"ee\n")
    assert await anext(lines) == "three"
