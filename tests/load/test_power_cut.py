"""A cut of the power takes what was not synced, and nothing else; the tool that does it is no use
unless that holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from load.power_cut import PAGE_BYTES, PowerCutDirectory, mix_names, mix_pages
from tests.support.requirements import require_program

ROOT = Path(__file__).resolve().parents[2]


# What a program does; it is killed behind it.
PROGRAM = """
import os, signal, sys
at = sys.argv[1]
def opened(name):
    return os.open(os.path.join(at, name), os.O_RDWR | os.O_CREAT)
def sync(path=""):
    file = os.open(os.path.join(at, path), os.O_RDONLY)
    os.fsync(file)
    os.close(file)
{body}
os.kill(os.getpid(), signal.SIGKILL)
"""


class Kind(Random):
    """By this chance, nothing is lost."""

    def __init__(self) -> None:
        super().__init__(0)
        self.part = 1.0

    def random(self) -> float:
        part, self.part = self.part, 0.5
        return part


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> None:
    require_program("cc", "gcc", "clang")


@pytest.fixture
def power(tmp_path: Path) -> PowerCutDirectory:
    directory = tmp_path / "data"
    directory.mkdir()
    return PowerCutDirectory.of(directory)


def do(power: PowerCutDirectory, body: str) -> None:
    program = [sys.executable, "-S", "-c", PROGRAM.format(body=body), str(power.directory)]
    done = subprocess.run(program, env=os.environ | power.environment(), check=False)
    assert done.returncode == -signal.SIGKILL


def content(power: PowerCutDirectory) -> dict[str, bytes]:
    files = (path for path in power.directory.rglob("*") if path.is_file())
    return {str(path.relative_to(power.directory)): path.read_bytes() for path in files}


def test_what_was_synced_is_there_and_nothing_else(power: PowerCutDirectory) -> None:
    (power.directory / "before").write_bytes(b"before")
    do(
        power,
        """
a, b, c, d = map(opened, ["before", "named", "unnamed", "empty"])
os.pwrite(a, b"AFTER!", 0)
os.pwritev(b, [b"one ", b"two "], 0)
os.write(c, b"nobody finds it")
os.fdatasync(b), os.fsync(c), sync()
os.pwrite(b, b"three", 8)
os.rename(os.path.join(at, "before"), os.path.join(at, "later"))
os.unlink(os.path.join(at, "unnamed"))
os.fdatasync(opened("too late"))
""",
    )
    power.cut()
    expected = {"before": b"before", "named": b"one two ", "unnamed": b"nobody finds it"}
    assert content(power) == expected | {"empty": b""}


def test_a_folder_has_the_names_that_were_synced(power: PowerCutDirectory) -> None:
    do(
        power,
        """
for name in "ab":
    os.mkdir(os.path.join(at, name))
    os.fdatasync(opened(name + "/file"))
sync("a"), sync()
os.fdatasync(opened("b/file")), os.fdatasync(opened("a/second"))
""",
    )
    power.cut()
    assert content(power) == {"a/file": b""}
    assert (power.directory / "b").is_dir()


def test_what_a_kill_left_is_in_doubt_until_it_is_synced_again(power: PowerCutDirectory) -> None:
    write = "os.write(opened('file'), b'written')\nsync()"
    do(power, write)
    do(power, "opened('file')")
    power.cut()
    assert content(power) == {"file": b""}
    do(power, write)
    do(power, "sync('file')")
    power.cut()
    assert content(power) == {"file": b"written"}


def test_what_is_cut_off_and_written_anew_counts_when_it_is_synced(
    power: PowerCutDirectory,
) -> None:
    do(
        power,
        """
file = opened("file")
os.posix_fallocate(file, 0, 100)
os.write(file, b"0123456789"), os.fsync(file), sync()
os.ftruncate(file, 4), os.pwrite(file, b"x", 4), os.fdatasync(file)
os.ftruncate(file, 1)
""",
    )
    power.cut()
    assert content(power) == {"file": b"0123x"}


@pytest.mark.parametrize(
    "write",
    [
        "os.write(file, b'new')",
        "os.writev(file, [b'n', b'ew'])",
        "os.pwrite(file, b'new', 3)",
        "os.pwritev(file, [b'n', b'ew'], 3)",
    ],
)
def test_every_way_to_write_is_seen(power: PowerCutDirectory, write: str) -> None:
    """At the first sync of a file all of it is kept; here it is the second."""
    begin = "file = opened('file')\nos.write(file, b'old'), os.fsync(file), sync()\n"
    do(power, f"{begin}{write}\nos.fsync(file)")
    power.cut()
    assert content(power) == {"file": b"oldnew"}


def test_by_chance_what_was_not_synced_is_there_too(power: PowerCutDirectory) -> None:
    do(
        power,
        """
file = opened("file")
os.write(file, b"safe"), os.fsync(file), sync()
os.write(file, b" or not"), os.write(opened("new"), b"new")
""",
    )
    power.cut(Kind())
    assert content(power) == {"file": b"safe or not", "new": b"new"}


def test_by_chance_pages_stay_and_one_is_torn() -> None:
    """Over many seeds all kinds; and never a byte that nobody wrote."""
    safe, written = b"a" * (3 * PAGE_BYTES), b"a" * (2 * PAGE_BYTES) + b"b" * (2 * PAGE_BYTES + 9)
    seen = set()
    for seed in range(200):
        found = mix_pages(safe, written, Random(seed), 0.5)
        assert len(found) in (len(safe), len(written))
        assert found[: 2 * PAGE_BYTES] == safe[: 2 * PAGE_BYTES]
        assert all(byte in (a, 0, ord("b")) for byte, a in zip(found, safe, strict=False))
        page = set(found[2 * PAGE_BYTES : 3 * PAGE_BYTES])
        seen.add((len(found) > len(safe), page == set(b"b"), page == set(b"ab")))
    assert seen > {(longer, *page) for longer in (0, 1) for page in ((0, 1), (1, 0))}
    assert mix_pages(safe, safe[:9], Random(1), 1.0) == safe[:9]
    assert mix_pages(safe, safe[:9], Random(1), 0.0) == safe


def test_by_chance_names_come_and_go() -> None:
    """What has another name has the one or the other, never both, never none."""
    synced = {"kept": "1", "gone": "2", "old": "3"}
    written = {"kept": "1", "new": "4", "other": "3"}
    seen = set()
    for seed in range(100):
        found = mix_names(synced, written, Random(seed), 0.5)
        assert found["kept"] == "1"
        assert ("old" in found) != ("other" in found)
        seen.add(("gone" in found, "new" in found, "old" in found))
    assert len(seen) == 8
