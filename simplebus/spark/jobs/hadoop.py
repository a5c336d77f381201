"""Archive files in any file system of Spark: local folders, HDFS or object stores."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from simplebus.spark.jobs.archive_layout import ArchiveFile

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LIST_ATTEMPTS_MAX = 20


class HadoopArchiveFiles:
    """Files below a root folder, through Hadoop's FileSystem. Implements ArchiveFiles."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        jvm: Any = spark.sparkContext._jvm
        self._jvm, self._path = jvm, jvm.org.apache.hadoop.fs.Path
        conf = spark._jsparkSession.sessionState().newHadoopConf()
        place = self._path(root)
        self._fs = place.getFileSystem(conf)
        place = self._fs.makeQualified(place)
        self.root: str = place.toString()
        """URI of the root folder."""
        self._prefix_length = len(place.toUri().getPath().rstrip("/")) + 1

    def uri(self, path: str) -> str:
        """Return the URI of a path within the archive."""
        return f"{self.root}/{path}"

    def _hadoop_path(self, path: str) -> Any:
        return self._path(self.uri(path) if path else self.root)

    def list_files(self, folder: str) -> list[ArchiveFile]:
        """Return all files below a folder; empty if it does not exist. Raises OSError.

        Hadoop aborts a listing if a file disappears meanwhile, as when a batch is moved; it is
        retried.
        """
        from py4j.protocol import Py4JJavaError

        for attempts_left in reversed(range(_LIST_ATTEMPTS_MAX)):
            try:
                return self._list_once(folder)
            except Py4JJavaError as error:
                reason = str(error.java_exception.toString())
                if not attempts_left or "FileNotFound" not in reason:
                    raise OSError(f"{self.uri(folder)} could not be listed: {reason}") from error
        raise AssertionError("unreachable")

    def _list_once(self, folder: str) -> list[ArchiveFile]:
        place = self._hadoop_path(folder)
        if not self._fs.exists(place):
            return []
        found = []
        each = self._fs.listFiles(place, True)
        while each.hasNext():
            status = each.next()
            path = status.getPath().toUri().getPath()[self._prefix_length :]
            found.append(ArchiveFile(path, int(status.getLen())))
        return found

    def list_visible_files(self) -> list[ArchiveFile]:
        """Return all files that Parquet readers find."""
        return [file for name in self._visible_names("") for file in self.list_files(name)]

    def _visible_names(self, folder: str) -> list[str]:
        """Return the names in a folder that Parquet readers do not ignore."""
        if not self.exists(folder):
            return []
        listed = self._fs.listStatus(self._hadoop_path(folder))
        names = [str(each.getPath().getName()) for each in listed]
        return [name for name in names if name[0] not in "._"]

    def partition_columns(self) -> tuple[str, ...]:
        """Return the columns that are folder names; empty if no messages are archived."""
        folder = ""
        found: list[str] = []
        while partitions := [name for name in self._visible_names(folder) if "=" in name]:
            found.append(partitions[0].partition("=")[0])
            folder = f"{folder}/{partitions[0]}" if folder else partitions[0]
        return tuple(found)

    def read(self, path: str) -> bytes | None:
        """Return a file's content; None if it does not exist."""
        if not self._fs.exists(self._hadoop_path(path)):
            return None
        stream = self._fs.open(self._hadoop_path(path))
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def write(self, path: str, data: bytes) -> None:
        """Create a file atomically."""
        folder, _, name = path.rpartition("/")
        draft = f"{folder}/.{name}-{uuid.uuid4().hex}"
        stream = self._fs.create(self._hadoop_path(draft), True)
        try:
            stream.write(bytearray(data))
        finally:
            stream.close()
        self.move(draft, path)

    def exists(self, path: str) -> bool:
        """Return True if a file or folder exists."""
        return bool(self._fs.exists(self._hadoop_path(path)))

    def move(self, path: str, target: str) -> None:
        """Rename a file and create its target folder. Raises OSError."""
        from py4j.protocol import Py4JJavaError

        place = self._hadoop_path(target)
        self._fs.mkdirs(place.getParent())
        try:
            moved = self._fs.rename(self._hadoop_path(path), place)
        except Py4JJavaError as error:
            reason = str(error.java_exception.getMessage())
            raise OSError(f"{self.uri(path)} could not be moved to {target}: {reason}") from error
        if not moved:
            raise OSError(f"{self.uri(path)} could not be moved to {target}")

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content; do nothing if it does not exist."""
        self._fs.delete(self._hadoop_path(path), True)

    def read_row_count(self, path: str) -> tuple[ArchiveFile, int]:
        """Return a Parquet file with its size, and its row count from the footer."""
        place = self._hadoop_path(path)
        parquet: Any = self._jvm.org.apache.parquet.hadoop
        source = parquet.util.HadoopInputFile.fromPath(place, self._fs.getConf())
        reader = parquet.ParquetFileReader.open(source)
        try:
            rows = int(reader.getRecordCount())
        finally:
            reader.close()
        return ArchiveFile(path, int(source.getLength())), rows
