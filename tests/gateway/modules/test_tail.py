"""Following a file: nothing is left out, nothing is said twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from gateway import parts
from simplebus.gateway.gateway import open_gateway
from simplebus.gateway.modules.tail import LINE_BYTES_MAX, Follower, Line
from simplebus.gateway.plan import GatewayPlan, ModulePlan


def said(follower: Follower) -> list[bytes]:
    """All that is new."""
    found: list[bytes] = []
    while lines := follower.lines():
        found += [line.content for line in lines]
    return found


def add(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.log"


def test_lines_are_said_once_they_have_an_end(path: Path) -> None:
    add(path, b"one\ntwo\r\nthr")
    follower = Follower(path, at_end=False)
    assert follower.lines() == [Line(b"one", 0), Line(b"two", 4)]
    add(path, b"ee\n\n")
    assert follower.lines() == [Line(b"three", 9), Line(b"", 15)]
    assert follower.lines() == []
    follower.close()


def test_it_begins_at_the_end_of_a_file_that_was_there(path: Path) -> None:
    add(path, b"old\n")
    follower = Follower(path, at_end=True)
    assert said(follower) == []
    add(path, b"new\n")
    assert said(follower) == [b"new"]
    follower.close()


def test_a_file_that_comes_later_is_read_from_its_beginning(path: Path) -> None:
    follower = Follower(path, at_end=True)
    assert said(follower) == []
    add(path, b"first\n")
    assert said(follower) == [b"first"]
    follower.close()


def test_a_file_that_is_moved_away_is_read_to_its_end(path: Path) -> None:
    add(path, b"one\n")
    follower = Follower(path, at_end=False)
    assert said(follower) == [b"one"]
    path.rename(path.with_suffix(".1"))
    add(path.with_suffix(".1"), b"late\nwithout an end")
    assert said(follower) == [b"late"]
    add(path, b"new\n")
    assert said(follower) == [b"without an end", b"new"]
    follower.close()


def test_a_file_that_is_cut_off_is_read_from_its_beginning(path: Path) -> None:
    add(path, b"one\ntwo\nthr")
    follower = Follower(path, at_end=False)
    assert said(follower) == [b"one", b"two"]
    path.write_bytes(b"new\n")
    assert said(follower) == [b"new"]
    follower.close()


def test_a_line_without_end_is_said_in_pieces(path: Path) -> None:
    add(path, b"x" * (2 * LINE_BYTES_MAX + 5))
    follower = Follower(path, at_end=False)
    assert [len(piece) for piece in said(follower)] == [LINE_BYTES_MAX] * 2
    add(path, b"y\n")
    assert said(follower) == [b"xxxxxy"]
    follower.close()


@given(
    st.lists(
        st.one_of(st.binary(max_size=8), st.sampled_from(["rotate", "again", "say"])), max_size=12
    )
)
def test_whatever_happens_lines_are_said_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, steps: list[bytes | str]
) -> None:
    """Against the bytes that were written: as lines, of one file after the other. With `again` the
    follower is lost and another goes on at its place."""
    path = tmp_path_factory.mktemp("tail") / "app.log"
    path.touch()
    follower = Follower(path, at_end=False)
    files: list[bytearray] = [bytearray()]
    found: list[bytes] = said(follower)
    for number, step in enumerate(steps):
        if isinstance(step, bytes):
            add(path, step)
            files[-1] += step
        elif step == "rotate":
            found += said(follower)
            path.rename(path.with_suffix(f".{number}"))
            path.touch()
            files.append(bytearray())
            found += said(follower)
        elif step == "again":
            found += said(follower)
            follower.close()
            follower = Follower(path, at_end=True, place=follower.place)
        else:
            found += said(follower)
    found += said(follower)
    follower.close()
    expected: list[bytes] = []
    for file in files:
        *whole, last = bytes(file).split(b"\n")
        expected += [line.removesuffix(b"\r") for line in whole]
        if file is not files[-1] and last:
            expected.append(last)
    assert found == expected


def test_a_place_in_another_file_is_not_believed(path: Path) -> None:
    add(path, b"one\ntwo\n")
    follower = Follower(path, at_end=False)
    said(follower)
    place = follower.place
    follower.close()
    path.rename(path.with_suffix(".1"))
    add(path, b"new\nnewer\nnewest\n")
    again = Follower(path, at_end=True, place=place)
    assert said(again) == [b"new", b"newer", b"newest"]
    again.close()
    broken = Follower(path, at_end=False, place=b"{not json")
    assert said(broken) == [b"new", b"newer", b"newest"]
    broken.close()


async def test_the_module_says_lines_and_remembers_its_place(path: Path, tmp_path: Path) -> None:
    add(path, b"one\n")
    settings = {
        "path": str(path),
        "start": "begin",
        "remember": str(tmp_path / "place"),
        "poll_seconds": 0.001,
    }
    plan = GatewayPlan(
        (
            ModulePlan.of("all", "gateway.parts:Recorder"),
            ModulePlan.of("file", "tail", settings),
        ),
        (("file", "all"),),
    )
    parts.HAPPENED.clear()
    for text, count in ((b"two\n", 2), (b"three\n", 3)):
        async with open_gateway(plan):
            add(path, text)
            while sum(what[1] == "receive" for what in parts.HAPPENED) < count:  # noqa: ASYNC110
                await trio.sleep(0.001)
    heard = [what[2] for what in parts.HAPPENED if what[1] == "receive"]
    assert heard == ["one", "two", "three"]
    assert os.listdir(tmp_path).count("place") == 1
