"""In-memory files of an archive. A file holds a list of messages or a marker.

The model behaves like a file system and can fail before any step.
"""

from __future__ import annotations

from simplebus.spark.jobs.archive_layout import ArchiveFile


class DiedError(Exception):
    """Simulated crash of the program."""


class Folders:
    """Files by path. The program dies after a number of steps; None for never."""

    def __init__(self) -> None:
        self.data: dict[str, bytes | tuple[object, ...]] = {}
        self.remaining_steps: int | None = None
        """Steps until it dies."""
        self.copies = False
        """Whether a move is a copy, and then a removal, as in an object store."""

    def _step(self) -> None:
        if self.remaining_steps is not None:
            if not self.remaining_steps:
                raise DiedError
            self.remaining_steps -= 1

    def _below(self, folder: str) -> list[str]:
        return sorted(path for path in self.data if path.startswith(f"{folder}/" if folder else ""))

    def list_files(self, folder: str) -> list[ArchiveFile]:
        return [ArchiveFile(path, len(self.data[path])) for path in self._below(folder)]

    def read(self, path: str) -> bytes | None:
        found = self.data.get(path)
        assert found is None or isinstance(found, bytes)
        return found

    def put(self, path: str, rows: list[object]) -> None:
        """Store a data file in one step, as Spark does."""
        self._step()
        self.data[path] = tuple(rows)

    def write(self, path: str, data: bytes) -> None:
        self._step()
        folder, _, name = path.rpartition("/")
        self.data[f"{folder}/.{name}-draft"] = data[: len(data) // 2]
        self._step()
        del self.data[f"{folder}/.{name}-draft"]
        assert path not in self.data
        self.data[path] = data

    def exists(self, path: str) -> bool:
        return path in self.data or bool(self._below(path))

    def move(self, path: str, target: str) -> None:
        self._step()
        assert target not in self.data, f"{target} is there"
        self.data[target] = self.data[path]
        if self.copies:
            self._step()
        del self.data[path]

    def remove(self, path: str) -> None:
        self._step()
        if self.data.pop(path, None) is None:
            for each in self._below(path):
                del self.data[each]
                self._step()

    def seen(self) -> list[object]:
        """Return the messages that a program would find, sorted."""
        visible = [
            rows
            for path, rows in self.data.items()
            if not any(part[0] in "._" for part in path.split("/"))
        ]
        return sorted(message for rows in visible for message in rows)  # type: ignore[type-var]
