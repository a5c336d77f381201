"""Listing of an archive that other programs change meanwhile."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JJavaError

from simplebus.spark.jobs import hadoop
from simplebus.spark.jobs.archive_layout import ArchiveFile
from simplebus.spark.jobs.hadoop import HadoopArchiveFiles


class _Thrown:
    def __init__(self, text: str) -> None:
        self._text = text

    def toString(self) -> str:  # noqa: N802 - Java's name.
        return self._text


class _OvertakenError(Py4JJavaError):
    def __init__(self, text: str) -> None:
        self.java_exception = _Thrown(text)


class _Files(HadoopArchiveFiles):
    """Archive files with prescribed listings, in order."""

    def __init__(self, *outcomes: list[ArchiveFile] | str) -> None:
        self.root = "file:/archive"
        self._outcomes = iter(outcomes)

    def _list_once(self, folder: str) -> list[ArchiveFile]:
        outcome = next(self._outcomes)
        if isinstance(outcome, str):
            raise _OvertakenError(outcome)
        return outcome


GONE = "java.io.FileNotFoundException: File x does not exist"


def test_interrupted_listing_is_retried() -> None:
    assert _Files(GONE, GONE, [ArchiveFile("a", 1)]).list_files("class=1") == [ArchiveFile("a", 1)]


@pytest.mark.parametrize("outcomes", [["java.io.IOException: torn"], [GONE] * 99])
def test_failed_listing_names_path_and_reason(
    outcomes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hadoop, "_LIST_ATTEMPTS_MAX", 3)
    with pytest.raises(OSError, match=r"file:/archive/class=1 could not be listed: java\.io"):
        _Files(*outcomes).list_files("class=1")
