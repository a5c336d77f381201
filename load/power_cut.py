"""Cuts the power of a directory: what was not synced is gone, as far as a disk likes.

Rule 1: what a process in `environment` has synced is there after the cut, byte for byte. What it
has not may be there, whole, in part or not at all; chance decides, and a seed repeats it.
Rule 2: the process is dead when its power is cut, and the directory is cut before the next one.

    disk/          the library that keeps what is safe (C), beside the directory: its `shadow`
"""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from load.generators import disk

PAGE_BYTES = 4096
_KEY_BYTES = 48
_FOLDER = "/"


@dataclass(frozen=True)
class Power:
    """Of one directory, and the shadow beside it."""

    directory: Path
    shadow: Path

    @classmethod
    def of(cls, directory: Path) -> Power:
        """Its shadow lies beside it, on the same disk."""
        whole = directory.resolve()
        return cls(whole, whole.with_name(whole.name + ".shadow"))

    def environment(self) -> dict[str, str]:
        """What a process needs so that its power can be cut."""
        return {
            "LD_PRELOAD": str(disk()),
            "CUT_DIRECTORY": str(self.directory),
            "CUT_SHADOW": str(self.shadow),
        }

    def cut(self, chance: Random | None = None) -> None:
        """Leave what was synced; and by chance, if there is one, parts of what was not: pages, one
        of them torn, names that came, and names that went."""
        left = self.directory.with_name(self.directory.name + ".left")
        left.mkdir()
        self._cut_folder(left, "", chance, 0.0 if chance is None else chance.random())
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.shadow)
        left.rename(self.directory)

    def _cut_folder(self, left: Path, place: str, chance: Random | None, part: float) -> None:
        """`part` of what is in doubt stays."""
        here = self.directory / place
        names, written = self._synced_names(place), dict[str, str]()
        if chance is not None:
            written = _names_in(here)
            names = mixed(names, written, chance, part)
        by_key = {key: here / name for name, key in written.items()}
        for name, key in names.items():
            path = f"{place}/{name}".lstrip("/")
            if key == _FOLDER:
                (left / name).mkdir()
                self._cut_folder(left / name, path, chance, part)
                continue
            kept = self.shadow / "files" / key
            safe = kept.read_bytes() if kept.exists() else b""
            if chance is not None and key in by_key:
                safe = torn(safe, by_key[key].read_bytes(), chance, part)
            (left / name).write_bytes(safe)

    def _synced_names(self, place: str) -> dict[str, str]:
        listed = self.shadow / "folders" / ("%" + place.replace("/", "%"))
        if not listed.exists():
            return {}
        lines = (line.partition(" ") for line in listed.read_text().splitlines())
        return {name: key for key, _, name in lines}


def mixed(
    synced: dict[str, str], written: dict[str, str], chance: Random, part: float
) -> dict[str, str]:
    """Names that came or went since, in part. What has another name has one of the two."""
    names = dict(synced)
    former = {key: name for name, key in synced.items() if key != _FOLDER}
    for name, key in written.items():
        if synced.get(name) != key and chance.random() < part:
            names[name] = key
            if key in former and written.get(former[key]) != key:
                names.pop(former[key], None)
    kept = set(written.values())
    for name, key in synced.items():
        has_gone = name not in written and key not in kept
        if has_gone and names.get(name) == key and chance.random() < part:
            del names[name]
    return names


def torn(safe: bytes, written: bytes, chance: Random, part: float) -> bytes:
    """Some of the pages that were written since, and one of them not whole."""
    if safe == written:
        return safe
    size = len(written) if chance.random() < part else len(safe)
    written += safe[len(written) :]  # What was cut off is there until it is really gone.
    safe, written = safe.ljust(size, b"\0")[:size], written.ljust(size, b"\0")[:size]
    pages = [slice(at, at + PAGE_BYTES) for at in range(0, size, PAGE_BYTES)]
    changed = [page for page in pages if safe[page] != written[page]]
    found = bytearray(safe)
    for page in changed:
        if chance.random() < part:
            found[page] = written[page]
    if changed:
        first = chance.choice(changed).start
        last = min(first + chance.randrange(PAGE_BYTES), size)
        found[first:last] = written[first:last]
    return bytes(found)


def _names_in(folder: Path) -> dict[str, str]:
    if not folder.is_dir():
        return {}
    return {each.name: _FOLDER if each.is_dir() else _key(each) for each in folder.iterdir()}


def _key(path: Path) -> str:
    key = ctypes.create_string_buffer(_KEY_BYTES)
    if _library().cut_key(str(path).encode(), key):
        raise OSError(f"{path} cannot be looked at")
    return key.value.decode()


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(disk()))
