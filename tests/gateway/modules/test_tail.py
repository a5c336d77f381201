"""Following a file: each line is published once, and none is missed."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from simplebus.gateway.config import GatewayPlan, ModulePlan
from simplebus.gateway.gateway import open_gateway
from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.module import BlockingModule
from simplebus.gateway.modules import tail
from simplebus.gateway.modules.tail import (
    FINISHED_FILES_MAX,
    LINE_BYTES_MAX,
    OPEN_FILES_MAX,
    QUIET_POLLS,
    FileFollower,
    Line,
)
from tests.gateway import sample_modules


def read_lines(follower: FileFollower) -> list[bytes]:
    """Return all new lines, including those after a rotation."""
    found: list[bytes] = []
    idle_polls = 0
    while idle_polls <= 20 * QUIET_POLLS:  # There may be several empty files.
        lines = follower.lines()
        found += [line.content for line in lines]
        idle_polls = 0 if lines else idle_polls + 1
    return found


def poll_nothing(follower: FileFollower, times: int) -> None:
    """Poll `times` times, and check that there are no new lines."""
    assert [follower.lines() for _ in range(times)] == [[]] * times


def rotate_to(path: Path, number: int) -> None:
    """Rename the file to `app.log.NUMBER`, with that modification time."""
    os.utime(path, ns=(0, number))
    path.rename(path.with_name(f"{path.name}.{number}"))


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.log"


def test_publishes_complete_lines(path: Path) -> None:
    append(path, b"one\ntwo\r\nthr")
    follower = FileFollower(path, at_end=False)
    assert follower.lines() == [Line(b"one", 0), Line(b"two", 4)]
    append(path, b"ee\n\n")
    assert follower.lines() == [Line(b"three", 9), Line(b"", 15)]
    assert follower.lines() == []
    follower.close()


def test_begins_at_end_of_existing_file(path: Path) -> None:
    append(path, b"old\n")
    follower = FileFollower(path, at_end=True)
    assert read_lines(follower) == []
    append(path, b"new\n")
    assert read_lines(follower) == [b"new"]
    follower.close()


def test_reads_later_file_from_beginning(path: Path) -> None:
    follower = FileFollower(path, at_end=True)
    assert read_lines(follower) == []
    append(path, b"first\n")
    assert read_lines(follower) == [b"first"]
    follower.close()


def test_reads_rotated_file_to_end(path: Path) -> None:
    append(path, b"one\n")
    follower = FileFollower(path, at_end=False)
    assert read_lines(follower) == [b"one"]
    path.rename(path.with_suffix(".1"))
    append(path.with_suffix(".1"), b"late\nwithout an end")
    assert read_lines(follower) == [b"late"]
    append(path, b"new\n")
    assert read_lines(follower) == [b"without an end", b"new"]
    follower.close()


def test_keeps_reading_rotated_file_while_it_grows(path: Path) -> None:
    append(path, b"one\n")
    follower = FileFollower(path, at_end=False)
    assert read_lines(follower) == [b"one"]
    rotated = path.with_name("app.log.1")
    path.rename(rotated)
    append(path, b"new\n")
    for _ in range(3):
        poll_nothing(follower, QUIET_POLLS - 1)
        append(rotated, b"late\n")
        assert follower.lines() == [Line(b"late", rotated.stat().st_size - 5)]
    append(rotated, b"part")
    poll_nothing(follower, QUIET_POLLS)  # Part of an incomplete line was new.
    assert follower.lines() == [Line(b"part", rotated.stat().st_size - 4)]
    assert follower.lines() == [Line(b"new", 0)]
    follower.close()


def test_reads_several_rotated_files_in_order(path: Path) -> None:
    for number, name in enumerate(("app.log.0", "app.log.gz", "app.log.err", "other.1"), 1):
        path.with_name(name).write_bytes(b"not its own\n")
        os.utime(path.with_name(name), ns=(0, number if name == "app.log.0" else 10**6))
    follower = FileFollower(path, at_end=False)
    expected = []
    for number in range(10, 10 + OPEN_FILES_MAX + 4):
        append(path, b"%d\n" % number)
        if number == 10:
            assert read_lines(follower) == [b"10"]
        else:
            expected.append(b"%d" % number)
        rotate_to(path, number)
    append(path, b"new\n")
    assert read_lines(follower) == [*expected, b"new"]
    follower.close()


def test_open_files_are_bounded(path: Path) -> None:
    path.touch()
    follower = FileFollower(path, at_end=False)
    before = len(os.listdir("/proc/self/fd"))
    poll_nothing(follower, 1)
    for number in range(1, 4 * OPEN_FILES_MAX):
        rotate_to(path, number)
        path.touch()
        poll_nothing(follower, 1)
        assert len(os.listdir("/proc/self/fd")) <= before + OPEN_FILES_MAX + FINISHED_FILES_MAX
    append(path, b"new\n")
    assert read_lines(follower) == [b"new"]
    assert len(os.listdir("/proc/self/fd")) == before + 1 + FINISHED_FILES_MAX
    for rotated in path.parent.glob("app.log.*"):
        rotated.unlink()
    poll_nothing(follower, 1)  # The deleted file is closed, so its disk space is freed.
    assert len(os.listdir("/proc/self/fd")) == before + 1
    follower.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_reads_truncated_file_from_beginning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    append(path, b"one\ntwo\nthr")
    follower = FileFollower(path, at_end=False)
    assert read_lines(follower) == [b"one", b"two"]
    path.write_bytes(b"new\n")
    assert read_lines(follower) == [b"new"]
    assert "was truncated after 11 bytes were read" in caplog.text
    caplog.clear()
    follower.close()
    path.write_bytes(b"ab\n")
    second_follower = FileFollower(path, at_end=True, saved_position=follower.position)
    assert read_lines(second_follower) == [b"ab"]
    assert "was truncated after 4 bytes were read" in caplog.text
    second_follower.close()


@pytest.mark.parametrize("is_away", [False, True])
@pytest.mark.parametrize("before", [b"one\ntwo\nthr", b"one\n" * 40])
def test_detects_truncated_file_that_grew(
    path: Path, caplog: pytest.LogCaptureFixture, before: bytes, is_away: bool
) -> None:
    append(path, before)
    follower = FileFollower(path, at_end=False)
    assert read_lines(follower) == before.split(b"\n")[:-1]
    if is_away:
        follower.close()
        follower = FileFollower(path, at_end=True, saved_position=follower.position)
    path.write_bytes(b"new\n" * 60)
    assert read_lines(follower) == [b"new"] * 60
    assert "was truncated after" in caplog.text
    append(path, b"newer\n")
    assert read_lines(follower) == [b"newer"]
    follower.close()


def test_accepts_position_without_checksum(path: Path) -> None:
    append(path, b"one\ntwo\n")
    stat = path.stat()
    saved_position = b'{"device":%d,"inode":%d,"offset":4}' % (stat.st_dev, stat.st_ino)
    follower = FileFollower(path, at_end=True, saved_position=saved_position)
    assert read_lines(follower) == [b"two"]
    follower.close()


def test_endless_line_is_split(path: Path) -> None:
    append(path, b"x" * (2 * LINE_BYTES_MAX + 5))
    follower = FileFollower(path, at_end=False)
    assert [len(line_) for line_ in read_lines(follower)] == [LINE_BYTES_MAX] * 2
    append(path, b"y\n")
    assert read_lines(follower) == [b"xxxxxy"]
    follower.close()


@given(
    st.lists(
        st.one_of(st.binary(max_size=8), st.sampled_from(["rotate", "again", "say", "poll"])),
        max_size=16,
    )
)
def test_random_rotation_publishes_lines_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, steps: list[bytes | str]
) -> None:
    """Compares the published lines with the bytes written to all files. With `again`, another
    follower continues at the saved position. Files may come and go unseen.
    """
    path = tmp_path_factory.mktemp("tail") / "app.log"
    path.touch()
    follower = FileFollower(path, at_end=False)
    files: list[bytearray] = [bytearray()]
    found: list[bytes] = read_lines(follower)
    for number, step in enumerate(steps, 1):
        if isinstance(step, bytes):
            append(path, step)
            files[-1] += step
        elif step == "rotate":
            rotate_to(path, number)
            path.touch()
            files.append(bytearray())
        elif step == "again":
            follower.close()
            follower = FileFollower(path, at_end=True, saved_position=follower.position)
        elif step == "poll":
            found += [line.content for line in follower.lines()]
        else:
            found += read_lines(follower)
    found += read_lines(follower)
    follower.close()
    expected: list[bytes] = []
    for file in files:
        *lines_, last = bytes(file).split(b"\n")
        expected += [line.removesuffix(b"\r") for line in lines_]
        if file is not files[-1] and last:
            expected.append(last)
    assert found == expected


def test_reads_rest_of_rotated_file_first(path: Path) -> None:
    append(path, b"one\n")
    follower = FileFollower(path, at_end=False)
    assert read_lines(follower) == [b"one"]
    follower.close()
    append(path, b"while away\n")
    rotate_to(path, 1)
    second_follower = FileFollower(path, at_end=True, saved_position=follower.position)
    assert read_lines(second_follower) == [b"while away"]  # Also without a new file.
    second_follower.close()
    append(path, b"between\n")
    rotate_to(path, 2)
    append(path, b"new\n")
    third_follower = FileFollower(path, at_end=True, saved_position=second_follower.position)
    assert read_lines(third_follower) == [b"between", b"new"]
    third_follower.close()


def test_position_of_another_file_is_ignored(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    append(path, b"one\ntwo\n")
    follower = FileFollower(path, at_end=False)
    read_lines(follower)
    saved_position = follower.position
    follower.close()
    path.rename(path.with_suffix(".1"))
    append(path, b"new\nnewer\nnewest\n")
    second_follower = FileFollower(path, at_end=True, saved_position=saved_position)
    assert read_lines(second_follower) == [b"new", b"newer", b"newest"]
    assert "the file that was read last no longer exists; lines may have been missed" in caplog.text
    second_follower.close()
    broken = FileFollower(path, at_end=False, saved_position=b"{not json")
    assert read_lines(broken) == [b"new", b"newer", b"newest"]
    broken.close()


async def test_tail_publishes_lines_and_saves_position(path: Path, tmp_path: Path) -> None:
    append(path, b"one\n")
    settings = {
        "path": str(path),
        "start": "begin",
        "remember": str(tmp_path / "place"),
        "poll_seconds": 0.001,
    }
    plan = GatewayPlan(
        (
            ModulePlan.of("all", "tests.gateway.sample_modules:Recorder"),
            ModulePlan.of("file", "tail", settings),
        ),
        (("file", "all"),),
    )
    sample_modules.EVENTS.clear()
    for text, count in ((b"two\n", 2), (b"three\n", 3)):
        async with open_gateway(plan):
            append(path, text)
            while sum(event[1] == "receive" for event in sample_modules.EVENTS) < count:  # noqa: ASYNC110
                await trio.sleep(0.001)
    received = [event[2] for event in sample_modules.EVENTS if event[1] == "receive"]
    assert received == ["one", "two", "three"]
    assert os.listdir(tmp_path).count("place") == 1


async def test_empty_position_file_is_reported(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "place").touch()
    settings = {"path": str(path), "remember": str(tmp_path / "place")}
    async with open_gateway(GatewayPlan((ModulePlan.of("file", "tail", settings),))):
        assert "ignoring the saved position" in caplog.text


async def test_full_disk_pauses_reading(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tail, "RETRY_SECONDS", 0.001)
    tries, is_full = 0, True
    replace = Path.replace

    def write(saved_position: Path, to: Path) -> Path:
        nonlocal tries
        tries += is_full
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(saved_position))
        return replace(saved_position, to)

    monkeypatch.setattr(Path, "replace", write)
    settings = {
        "path": str(path),
        "start": "begin",
        "remember": str(tmp_path / "place"),
        "poll_seconds": 0.001,
    }
    append(path, b"one\n")
    modules = (
        ModulePlan.of("all", "tests.gateway.sample_modules:Recorder"),
        ModulePlan.of("t", "tail", settings),
    )
    plan = GatewayPlan(modules, (("t", "all"),))
    sample_modules.EVENTS.clear()

    async def wait_for(condition: Callable[[], bool]) -> None:
        with trio.fail_after(240):
            while not condition():  # noqa: ASYNC110
                await trio.sleep(0.001)

    def received() -> list[str]:
        return [event[2] for event in sample_modules.EVENTS if event[1] == "receive"]

    async with open_gateway(plan):
        await wait_for(lambda: tries > 3)
        append(path, b"two\n")
        before = tries
        await wait_for(lambda: tries > before + 3)
        assert received() == ["one"]
        is_full = False
        await wait_for(lambda: len(received()) > 1)
        is_full, before = True, tries
        append(path, b"three\n")  # It may be read or not, depending on which save fails.
        await wait_for(lambda: tries > before)  # The module ends while it waits for space.
    assert received()[:2] == ["one", "two"]
    assert caplog.text.count("reading pauses until there is space") == 2


@pytest.mark.parametrize("before", [0, 2])
async def test_replaced_tail_publishes_each_line_once(
    before: int, path: Path, tmp_path: Path
) -> None:
    """The replaced tail has published some of the lines that it read, or none."""
    may_continue, received = threading.Event(), list[bytes]()

    class Slow(BlockingModule):
        def receive(self, message: ModuleMessage) -> None:
            may_continue.wait(30)
            received.append(message.content)

    def plan(poll_seconds: float) -> GatewayPlan:
        settings = {
            "path": str(path),
            "start": "begin",
            "remember": str(tmp_path / "place"),
            "poll_seconds": poll_seconds,
        }
        slow = ModulePlan("slow", "x", factory=Slow, places=1)
        return GatewayPlan((slow, ModulePlan.of("tail", "tail", settings)), (("*", "slow"),))

    async with open_gateway(plan(0.001)) as gateway:
        for _ in range(before):  # One message is being processed, and one is in the queue.
            await gateway.publish(ModuleMessage(b"before"))
            await trio.sleep(0.01)
        append(path, b"".join(b"%d\n" % number for number in range(100)))
        with trio.fail_after(240):
            while not gateway.bus.statistics().waiting:  # noqa: ASYNC110
                await trio.sleep(0.001)
            await gateway.apply(plan(0.002))
            may_continue.set()
            while len(received) < before + 100:  # noqa: ASYNC110
                await trio.sleep(0.001)
        await gateway.bus.wait_quiet_async()
    assert received == [b"before"] * before + [b"%d" % number for number in range(100)]


def test_position_before_line_of_finished_file(path: Path) -> None:
    append(path, b"one\ntwo\nrest")
    follower = FileFollower(path, at_end=False)
    _, second_line = follower.lines()
    second_follower = FileFollower(
        path, at_end=False, saved_position=follower.position_before(second_line)
    )
    assert [line.content for line in second_follower.lines()] == [b"two"]
    second_follower.close()
    rotate_to(path, 1)
    append(path, b"new\n")
    while not (lines_ := follower.lines()):
        pass
    assert [line.content for line in lines_] == [b"rest"]
    second_follower = FileFollower(
        path, at_end=False, saved_position=follower.position_before(lines_[0])
    )
    follower.close()
    assert read_lines(second_follower) == [b"rest", b"new"]
    second_follower.close()


@pytest.mark.parametrize("line", [b"%d\n", b"all lines are alike but %04d\n", b"\n"])
def test_reads_file_with_reused_inode(path: Path, line: bytes) -> None:
    """Two files are rotated between two polls; the second one has the inode of a deleted file."""
    number = 0

    def write() -> None:
        nonlocal number
        append(path, line.replace(b"%d", b"%d" % number).replace(b"%04d", b"%04d" % number))
        number += 1

    def rotate() -> None:
        first_rotated, second_rotated = (path.with_name(f"{path.name}.{n}") for n in (1, 2))
        second_rotated.unlink(missing_ok=True)
        if first_rotated.exists():
            first_rotated.rename(second_rotated)
        os.utime(path, ns=(0, number * 10**9))
        path.rename(first_rotated)
        write()

    write()
    follower = FileFollower(path, at_end=False)
    count = len(read_lines(follower))
    for _ in range(10):
        rotate()
        count += len(read_lines(follower))
    for _ in range(5):
        rotate()
        write()
        rotate()
        count += len(read_lines(follower))
    assert count == number
    follower.close()


def test_finished_file_is_not_read_again(path: Path) -> None:
    append(path, b"one\n")
    follower = FileFollower(path, at_end=False)
    assert read_lines(follower) == [b"one"]
    for text in b"two", b"three", b"four":
        rotate_to(path, number := len(os.listdir(path.parent)))
        append(path, text + b"\n")
        assert read_lines(follower) == [text]
        append(path.with_name(f"{path.name}.{number}"), b"late\n")
    follower.close()


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_line_of_maximum_length_is_not_split(path: Path, end: bytes) -> None:
    append(path, b"x" * LINE_BYTES_MAX + end[:-1])
    follower = FileFollower(path, at_end=False)
    assert read_lines(follower) == []
    append(path, b"\ny" + end)
    assert read_lines(follower) == [b"x" * LINE_BYTES_MAX, b"y"]
    append(path, b"z" * 5)
    assert read_lines(follower) == []
    append(path, b"z" * (LINE_BYTES_MAX - 4) + end)
    assert read_lines(follower) == [b"z" * LINE_BYTES_MAX, b"z"]
    follower.close()


@pytest.mark.parametrize("saved_position", [b"{}", b"\xff", b'{"device":1,"inode":1,"offset":-1}'])
def test_damaged_position_is_ignored_with_warning(
    saved_position: bytes, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append(path, b"one\n")
    follower = FileFollower(path, at_end=False, saved_position=saved_position)
    assert read_lines(follower) == [b"one"]
    follower.close()
    assert "ignoring the saved position" in caplog.text


@pytest.mark.parametrize("moment", ["before it is looked at", "then"])
def test_rejects_pipe_without_blocking(
    path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = FileFollower(path, at_end=False)
    if moment == "then":
        append(path, b"one\n")
        opened = os.open

        def open_later(path: str, flags: int) -> int:
            os.remove(path)
            os.mkfifo(path)
            return opened(path, flags)

        monkeypatch.setattr(tail.os, "open", open_later)
        assert follower.lines() == []
    else:
        os.mkfifo(path)
    with pytest.raises(ValueError, match=f"expected a regular file, and {path} is a pipe"):
        follower.lines()
    with pytest.raises(ValueError, match="is a pipe"):
        tail.TailSettings(str(path))
    follower.close()
