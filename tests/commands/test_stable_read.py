"""Reading of files that are being written, or that were truncated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from simplebus.commands.serve.stable_read import STABLE_SECONDS, read_when_stable
from simplebus.config.errors import ConfigError

NOW = 1_000_000.0


class Disk:
    """File and clock; the file changes during sleeps."""

    def __init__(self, path: Path, *written: str, age: float = 0.0) -> None:
        self.path = path
        self.now = NOW
        self.slept = 0
        self._written = [*written]
        self.write(self._written.pop(0), NOW - age)

    def write(self, text: str, at: float) -> None:
        self.path.write_text(text)
        os.utime(self.path, (at, at))

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= STABLE_SECONDS
        self.now += seconds
        self.slept += 1
        if self._written:
            self.write(self._written.pop(0), self.now)

    def read(self) -> str:
        return read_when_stable(
            self.path.read_text, [self.path], clock=lambda: self.now, sleep=self.sleep
        )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "users.toml"


def test_stable_file_is_read_immediately(path: Path) -> None:
    disk = Disk(path, "whole", age=STABLE_SECONDS)
    assert (disk.read(), disk.slept) == ("whole", 0)


def test_read_waits_for_writer(path: Path) -> None:
    disk = Disk(path, "ha", "half", "whole")
    assert (disk.read(), disk.slept) == ("whole", 3)


def test_changed_file_is_read_again(path: Path) -> None:
    disk, texts = Disk(path, "half", age=60), ["whole", "whole"]

    def read() -> str:
        found = path.read_text()
        if texts:
            disk.write(texts.pop(), NOW - 50)
        return found

    def sleep(seconds: float) -> None:
        raise AssertionError("it is old enough")

    assert read_when_stable(read, [path], clock=lambda: NOW, sleep=sleep) == "whole"


def test_error_in_partial_file_is_not_reported(path: Path) -> None:
    disk, tries = Disk(path, "half", age=60), [1]

    def read() -> str:
        if tries:
            disk.write("whole", NOW - 50 - tries.pop())
            raise ConfigError("is not TOML")
        return path.read_text()

    assert read_when_stable(read, [path], clock=lambda: NOW, sleep=disk.sleep) == "whole"


def test_error_in_stable_file_is_reported(path: Path) -> None:
    def read() -> str:
        raise ConfigError("is not TOML")

    with pytest.raises(ConfigError, match="is not TOML"):
        read_when_stable(read, [path], clock=lambda: NOW)


def test_file_with_future_time_is_read_when_stable(path: Path) -> None:
    disk = Disk(path, "whole", age=-3600)
    assert (disk.read(), disk.slept) == ("whole", 1)


def test_constantly_changing_file_is_reported(path: Path) -> None:
    disk = Disk(path, *map(str, range(1000)))
    with pytest.raises(
        ConfigError, match=r"users.toml: the file keeps changing; expected no change"
    ):
        disk.read()
