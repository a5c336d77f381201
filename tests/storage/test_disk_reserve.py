"""Reserved space for a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from simplebus.storage.append_file import AppendFile
from simplebus.storage.disk_reserve import DiskReserve


def test_reserves_releases_and_reserves_again(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path, 10_000)
    assert not reserve.release()
    for _ in range(2):
        assert reserve.reserve()
        assert [path.stat().st_size for path in tmp_path.iterdir()] == [10_000]
        assert reserve.reserve()
        assert reserve.release()
        assert not list(tmp_path.iterdir())
        assert not reserve.release()


def test_reserve_is_small_on_small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        f_blocks, f_frsize = 2048, 4096

    monkeypatch.setattr(os, "fstatvfs", lambda _: Disk)
    assert DiskReserve(tmp_path).reserve()
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [512 * 1024]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EOPNOTSUPP, errno.EIO])
def test_no_reserve_on_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    reserve = DiskReserve(tmp_path, 10_000)
    assert not reserve.reserve()
    assert reserve.is_disk_full is (code == errno.ENOSPC)
    assert not list(tmp_path.iterdir()) or code == errno.EOPNOTSUPP
    assert not reserve.release()
    assert not DiskReserve(tmp_path / "not there").reserve()


def test_nearly_full_disk_allocates_the_minimum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, requested_sizes = os.posix_fallocate, list[int]()

    def allocate_little(descriptor: int, offset: int, size: int) -> None:
        requested_sizes.append(size)
        if size > 8192:
            raise OSError(errno.ENOSPC, "No space")
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate_little)
    file = AppendFile(tmp_path / "a")
    file.append([b"x" * 5000], end_mark=1)
    assert requested_sizes == [64 * 1024, 8192]
    with pytest.raises(OSError, match="No space"):
        file.append([b"x" * 20_000], end_mark=2)
    file.close()
    assert (tmp_path / "a").read_bytes() == b"x" * 5000
