"""Power cuts of a directory: unsynced data is lost, in whole or in part.

Data that a process in `environment` has synced is kept byte for byte. Other data is kept, lost or
torn at random, repeatably by a seed. The process must be dead when the power is cut.

    disk/          preloaded library (C) that records synced data in a `shadow` beside the directory
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
class PowerCutDirectory:
    """Directory and its shadow."""

    directory: Path
    shadow: Path

    @classmethod
    def of(cls, directory: Path) -> PowerCutDirectory:
        """Create the copy of synced data beside the directory, on the same disk."""
        whole = directory.resolve()
        return cls(whole, whole.with_name(whole.name + ".shadow"))

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a process whose power can be cut."""
        return {
            "LD_PRELOAD": str(disk()),
            "CUT_DIRECTORY": str(self.directory),
            "CUT_SHADOW": str(self.shadow),
        }

    def cut(self, chance: Random | None = None) -> None:
        """Restore the synced state; with `chance`, keep parts of the unsynced state.

        Such parts are pages, of which one is torn, new names, and removed names.
        """
        result_directory = self.directory.with_name(self.directory.name + ".left")
        result_directory.mkdir()
        self._cut_folder(result_directory, "", chance, 0.0 if chance is None else chance.random())
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.shadow)
        result_directory.rename(self.directory)

    def _cut_folder(self, target: Path, place: str, chance: Random | None, part: float) -> None:
        """Keep the fraction `part` of unsynced changes."""
        folder = self.directory / place
        names, written = self._synced_names(place), dict[str, str]()
        if chance is not None:
            written = _names_in(folder)
            names = mix_names(names, written, chance, part)
        by_key = {key: folder / name for name, key in written.items()}
        for name, key in names.items():
            path = f"{place}/{name}".lstrip("/")
            if key == _FOLDER:
                (target / name).mkdir()
                self._cut_folder(target / name, path, chance, part)
                continue
            synced_file = self.shadow / "files" / key
            safe = synced_file.read_bytes() if synced_file.exists() else b""
            if chance is not None and key in by_key:
                safe = mix_pages(safe, by_key[key].read_bytes(), chance, part)
            (target / name).write_bytes(safe)

    def _synced_names(self, place: str) -> dict[str, str]:
        listed = self.shadow / "folders" / ("%" + place.replace("/", "%"))
        if not listed.exists():
            return {}
        lines = (line.partition(" ") for line in listed.read_text().splitlines())
        return {name: key for key, _, name in lines}


def mix_names(
    synced: dict[str, str], written: dict[str, str], chance: Random, part: float
) -> dict[str, str]:
    """Return a random mix of synced and current names. A renamed file has one of both names."""
    names = dict(synced)
    synced_names = {key: name for name, key in synced.items() if key != _FOLDER}
    for name, key in written.items():
        if synced.get(name) != key and chance.random() < part:
            names[name] = key
            if key in synced_names and written.get(synced_names[key]) != key:
                names.pop(synced_names[key], None)
    written_keys = set(written.values())
    for name, key in synced.items():
        is_removed = name not in written and key not in written_keys
        if is_removed and names.get(name) == key and chance.random() < part:
            del names[name]
    return names


def mix_pages(safe: bytes, written: bytes, chance: Random, part: float) -> bytes:
    """Return a random mix of synced and written pages, one of them torn."""
    if safe == written:
        return safe
    size = len(written) if chance.random() < part else len(safe)
    written += safe[len(written) :]  # A truncation may be lost, too.
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
    return {path.name: _FOLDER if path.is_dir() else _key(path) for path in folder.iterdir()}


def _key(path: Path) -> str:
    key = ctypes.create_string_buffer(_KEY_BYTES)
    if _library().cut_key(str(path).encode(), key):
        raise OSError(f"{path} cannot be read")
    return key.value.decode()


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(disk()))
