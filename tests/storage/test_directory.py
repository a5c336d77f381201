"""Creation, locking and checks of a journal directory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
import pytest

from simplebus.storage.directory import check_directory, lock_directory, open_directory
from simplebus.storage.errors import JournalError


def test_creates_directory_with_stable_bus_id(tmp_path: Path) -> None:
    path = tmp_path / "new" / "one"
    first = lock_directory(path, new_bus="a")
    first.close()
    second = lock_directory(path, new_bus="b")
    assert (first.bus_id, second.bus_id, open_directory(path).bus_id) == ("a", "a", "a")
    second.close()


def test_second_server_is_refused(tmp_path: Path) -> None:
    first = lock_directory(tmp_path, new_bus="a")
    with pytest.raises(JournalError, match=f"used by another server, process {os.getpid()}"):
        lock_directory(tmp_path, new_bus="b")
    first.close()
    lock_directory(tmp_path, new_bus="c").close()


def test_refuses_foreign_directory_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(JournalError, match=r"it contains 'thesis\.txt'"):
        lock_directory(tmp_path, new_bus="a")
    with pytest.raises(JournalError, match="is not a journal"):
        open_directory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("text", "expected_error"),
    [
        ('{"format":"simplebus journal","version":3}', "written by a newer simplebus"),
        ('{"format":"simplebus journal","version":1}', "written by an older simplebus"),
        (
            '{"format":"simplebus journal","version":2,"bus":"a","salt":8,"checksum":2}',
            "simplebus.json is damaged",
        ),
        ('{"format":"simplebus journal","version":2,"bus":"a"}', "simplebus.json is damaged"),
        ('{"format":"other","version":1}', "has the format 'other'"),
        ('{"format":7}', "simplebus.json is invalid"),
        ("\udce4", "simplebus.json is invalid"),
        ("", "simplebus.json is invalid"),
    ],
)
def test_refuses_newer_or_foreign_stamp(tmp_path: Path, text: str, expected_error: str) -> None:
    (tmp_path / "simplebus.json").write_text(text, errors="surrogateescape")
    with pytest.raises(JournalError, match=expected_error):
        lock_directory(tmp_path, new_bus="a")


def test_damaged_salt_is_refused(tmp_path: Path) -> None:
    """With another salt, all records would look damaged."""
    lock_directory(tmp_path, new_bus="a").close()
    stamp = tmp_path / "simplebus.json"
    content = msgspec.json.decode(stamp.read_bytes())
    stamp.write_bytes(msgspec.json.encode(content | {"salt": content["salt"] ^ 1}))
    with pytest.raises(JournalError, match=r"simplebus\.json is damaged"):
        open_directory(tmp_path)
    del content["checksum"]  # Earlier versions of simplebus wrote none.
    stamp.write_bytes(msgspec.json.encode(content))
    assert open_directory(tmp_path).salt == content["salt"]


@pytest.mark.parametrize("folder", ["classes", "state"])
def test_incomplete_directory_is_refused(tmp_path: Path, folder: str) -> None:
    lock_directory(tmp_path, new_bus="a").close()
    (tmp_path / folder).rmdir()
    with pytest.raises(JournalError, match=f"contains no directory '{folder}'"):
        open_directory(tmp_path)


def test_refuses_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"cannot use .* as a journal"):
        lock_directory(tmp_path / "file", new_bus="a")
    with pytest.raises(JournalError):
        lock_directory(tmp_path / "file" / "below", new_bus="a")


@pytest.mark.parametrize("step", ["replace", "mkdir"])
def test_interrupted_creation_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("killed")

    (tmp_path / "bus").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(Path, step, fail)
        with pytest.raises(JournalError):
            lock_directory(tmp_path / "bus", new_bus="first")
    with contextlib.closing(lock_directory(tmp_path / "bus", new_bus="second")) as directory:
        assert directory.bus_id == ("second" if step == "replace" else "first")


def test_check_accepts_usable_directory_without_changes(tmp_path: Path) -> None:
    check_directory(tmp_path / "new" / "one")
    check_directory(tmp_path)
    assert not list(tmp_path.iterdir())
    lock_directory(tmp_path, new_bus="a").close()
    check_directory(tmp_path)


def test_check_refuses_unusable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, expected_error in {
        tmp_path: "it contains 'file'",
        tmp_path / "file": "file is not a directory",
        tmp_path / "file" / "in" / "it": "file is not a directory",
        Path("/proc/nope"): "cannot create /proc/nope: No such file or directory",
    }.items():
        with pytest.raises(JournalError, match=expected_error):
            check_directory(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
