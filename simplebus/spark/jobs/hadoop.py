"""An archive's files through Spark's own file systems: a folder, HDFS, an object store.

Rule 1: no decisions here: `tables` decides. What fails says which file.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from simplebus.spark.jobs.archive_layout import File

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LISTINGS_MAX = 20


class HadoopFiles:
    """The files below a root, by Hadoop's FileSystem, which Spark writes through, too."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        jvm: Any = spark.sparkContext._jvm
        self._jvm, self._path = jvm, jvm.org.apache.hadoop.fs.Path
        conf = spark._jsparkSession.sessionState().newHadoopConf()
        place = self._path(root)
        self._fs = place.getFileSystem(conf)
        place = self._fs.makeQualified(place)
        self.root: str = place.toString()
        """As a URI."""
        self._cut = len(place.toUri().getPath().rstrip("/")) + 1

    def uri(self, path: str) -> str:
        """A path within the archive as Spark takes it."""
        return f"{self.root}/{path}"

    def _at(self, path: str) -> Any:
        return self._path(self.uri(path) if path else self.root)

    def listed(self, folder: str) -> list[File]:
        """All files below a folder; none when it is not there. Raises OSError.

        Hadoop ends a listing when a file goes meanwhile, as it does where a batch is moved: then
        it is begun again.
        """
        from py4j.protocol import Py4JJavaError

        for left in reversed(range(_LISTINGS_MAX)):
            try:
                return self._listed(folder)
            except Py4JJavaError as error:
                why = str(error.java_exception.toString())
                if not left or "FileNotFound" not in why:
                    raise OSError(f"{self.uri(folder)} could not be listed: {why}") from error
        raise AssertionError("unreachable")

    def _listed(self, folder: str) -> list[File]:
        place = self._at(folder)
        if not self._fs.exists(place):
            return []
        found = []
        each = self._fs.listFiles(place, True)
        while each.hasNext():
            status = each.next()
            path = status.getPath().toUri().getPath()[self._cut :]
            found.append(File(path, int(status.getLen())))
        return found

    def visible(self) -> list[File]:
        """All files that programs which read Parquet find."""
        if not self.exists(""):
            return []
        names = [str(each.getPath().getName()) for each in self._fs.listStatus(self._at(""))]
        return [file for name in names if name[0] not in "._" for file in self.listed(name)]

    def read(self, path: str) -> bytes | None:
        """What is in a file; None when it is not there."""
        if not self._fs.exists(self._at(path)):
            return None
        stream = self._fs.open(self._at(path))
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def write(self, path: str, data: bytes) -> None:
        """Make a file that is there as a whole or not at all."""
        folder, _, name = path.rpartition("/")
        draft = f"{folder}/.{name}-{uuid.uuid4().hex}"
        stream = self._fs.create(self._at(draft), True)
        try:
            stream.write(bytearray(data))
        finally:
            stream.close()
        self.move(draft, path)

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder of this name."""
        return bool(self._fs.exists(self._at(path)))

    def move(self, path: str, target: str) -> None:
        """Rename a file, into a folder that is made if need be. Raises OSError."""
        from py4j.protocol import Py4JJavaError

        place = self._at(target)
        self._fs.mkdirs(place.getParent())
        try:
            moved = self._fs.rename(self._at(path), place)
        except Py4JJavaError as error:
            why = str(error.java_exception.getMessage())
            raise OSError(f"{self.uri(path)} could not be moved to {target}: {why}") from error
        if not moved:
            raise OSError(f"{self.uri(path)} could not be moved to {target}")

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing when it is not there."""
        self._fs.delete(self._at(path), True)

    def measured(self, path: str) -> tuple[File, int]:
        """A Parquet file with its size, and how many rows it has by its own account."""
        place = self._at(path)
        parquet: Any = self._jvm.org.apache.parquet.hadoop
        source = parquet.util.HadoopInputFile.fromPath(place, self._fs.getConf())
        reader = parquet.ParquetFileReader.open(source)
        try:
            rows = int(reader.getRecordCount())
        finally:
            reader.close()
        return File(path, int(source.getLength())), rows
