"""The precompiled Spark home contains the installed files, except the zip of Python sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplebus.spark import spark_home


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "site" / "pyspark"
    for name in ("__init__.py", "jars/a.jar", "bin/spark-submit", "python/lib/pyspark.zip"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    (package / "python" / "pyspark").mkdir()
    monkeypatch.delenv("SPARK_HOME", raising=False)
    return package


def test_spark_home_has_everything_but_the_zip(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_home, "find_spec", lambda name: _Found(installed))
    spark_home.use_precompiled_home(tmp_path / "cache")
    (made,) = (tmp_path / "cache").iterdir()
    assert spark_home.os.environ["SPARK_HOME"] == str(made)
    assert (made / "jars" / "a.jar").exists()
    assert (made / "bin" / "spark-submit").exists()
    assert (made / "python" / "pyspark").is_dir()
    assert not (made / "python" / "lib").exists()
    monkeypatch.delenv("SPARK_HOME")
    spark_home.use_precompiled_home(tmp_path / "cache")  # It is there.
    assert [folder.name for folder in (tmp_path / "cache").iterdir()] == [made.name]
    monkeypatch.delenv("SPARK_HOME")


def test_configured_spark_home_is_used(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_HOME", "/mine")
    spark_home.use_precompiled_home(tmp_path / "cache")
    assert spark_home.os.environ["SPARK_HOME"] == "/mine"
    assert not (tmp_path / "cache").exists()


def test_spark_starts_without_own_home(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_home, "find_spec", lambda name: _Found(installed))
    (tmp_path / "cache").touch()  # No folder.
    spark_home.use_precompiled_home(tmp_path / "cache")
    assert "SPARK_HOME" not in spark_home.os.environ


class _Found:
    def __init__(self, package: Path) -> None:
        self.origin = str(package / "__init__.py")
