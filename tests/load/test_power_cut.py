"""The power cut simulator loses unsynced data and nothing else."""

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


# Prologue of the programs, which are killed at their end.
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
    """Random source that makes a power cut lose nothing."""

    def __init__(self) -> None:
        super().__init__(0)
        self.fraction = 1.0

    def random(self) -> float:
        fraction, self.fraction = self.fraction, 0.5
        return fraction


@pytest.fixture(autouse=True, scope="module")
def _compiler() -> None:
    require_program("cc", "gcc", "clang")


@pytest.fixture
def power(tmp_path: Path) -> PowerCutDirectory:
    directory = tmp_path / "data"
    directory.mkdir()
    return PowerCutDirectory.of(directory)


def run_program(power: PowerCutDirectory, body: str) -> None:
    program = [sys.executable, "-S", "-c", PROGRAM.format(body=body), str(power.directory)]
    completed = subprocess.run(program, env=os.environ | power.environment(), check=False)
    assert completed.returncode == -signal.SIGKILL


def content(power: PowerCutDirectory) -> dict[str, bytes]:
    files = (path for path in power.directory.rglob("*") if path.is_file())
    return {str(path.relative_to(power.directory)): path.read_bytes() for path in files}


def test_cut_keeps_synced_data_only(power: PowerCutDirectory) -> None:
    (power.directory / "before").write_bytes(b"before")
    run_program(
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


def test_cut_keeps_synced_names_only(power: PowerCutDirectory) -> None:
    run_program(
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


def test_unsynced_data_of_killed_process_stays_uncertain(power: PowerCutDirectory) -> None:
    write = "os.write(opened('file'), b'written')\nsync()"
    run_program(power, write)
    run_program(power, "opened('file')")
    power.cut()
    assert content(power) == {"file": b""}
    run_program(power, write)
    run_program(power, "sync('file')")
    power.cut()
    assert content(power) == {"file": b"written"}


def test_truncated_and_rewritten_data_needs_sync(
    power: PowerCutDirectory,
) -> None:
    run_program(
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
def test_all_write_calls_are_recorded(power: PowerCutDirectory, write: str) -> None:
    """The first sync of a file keeps all of its data; this tests the second one."""
    prologue = "file = opened('file')\nos.write(file, b'old'), os.fsync(file), sync()\n"
    run_program(power, f"{prologue}{write}\nos.fsync(file)")
    power.cut()
    assert content(power) == {"file": b"oldnew"}


def test_random_cut_may_keep_unsynced_data(power: PowerCutDirectory) -> None:
    run_program(
        power,
        """
file = opened("file")
os.write(file, b"safe"), os.fsync(file), sync()
os.write(file, b" or not"), os.write(opened("new"), b"new")
""",
    )
    power.cut(Kind())
    assert content(power) == {"file": b"safe or not", "new": b"new"}


def test_random_cut_keeps_pages_and_tears_one() -> None:
    """Many seeds produce every kind of loss, and never a byte that was not written."""
    safe, written = b"a" * (3 * PAGE_BYTES), b"a" * (2 * PAGE_BYTES) + b"b" * (2 * PAGE_BYTES + 9)
    outcomes = set()
    for seed in range(200):
        found = mix_pages(safe, written, Random(seed), 0.5)
        assert len(found) in (len(safe), len(written))
        assert found[: 2 * PAGE_BYTES] == safe[: 2 * PAGE_BYTES]
        assert all(byte in (a, 0, ord("b")) for byte, a in zip(found, safe, strict=False))
        page = set(found[2 * PAGE_BYTES : 3 * PAGE_BYTES])
        outcomes.add((len(found) > len(safe), page == set(b"b"), page == set(b"ab")))
    assert outcomes > {(longer, *page) for longer in (0, 1) for page in ((0, 1), (1, 0))}
    assert mix_pages(safe, safe[:9], Random(1), 1.0) == safe[:9]
    assert mix_pages(safe, safe[:9], Random(1), 0.0) == safe


def test_random_cut_mixes_names() -> None:
    """Keep exactly one of the two names of a renamed file."""
    synced = {"kept": "1", "gone": "2", "old": "3"}
    written = {"kept": "1", "new": "4", "other": "3"}
    outcomes = set()
    for seed in range(100):
        found = mix_names(synced, written, Random(seed), 0.5)
        assert found["kept"] == "1"
        assert ("old" in found) != ("other" in found)
        outcomes.add(("gone" in found, "new" in found, "old" in found))
    assert len(outcomes) == 8
