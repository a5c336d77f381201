"""Tests of `simplebus sbom`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from email.message import Message
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simplebus.cli import app
from simplebus.commands import sbom
from simplebus.commands.sbom import build_sbom

CREATED_AT = datetime(2026, 1, 2, tzinfo=UTC)


class FakeDistribution(Distribution):
    def __init__(self, name: str, requires: list[str], headers: dict[str, str]) -> None:
        message = Message()
        for header, value in {"Name": name, "Version": "1.0", **headers}.items():
            message[header] = value
        for requirement in requires:
            message["Requires-Dist"] = requirement
        self._text = message.as_string()

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        raise NotImplementedError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeDistribution]:
    found: dict[str, FakeDistribution] = {}

    def find(name: str) -> Distribution:
        try:
            return found[name.lower()]
        except KeyError:
            raise PackageNotFoundError(name) from None

    monkeypatch.setattr(sbom, "distribution", find)
    return found


def add(installed: dict[str, FakeDistribution], name: str, *requires: str, **headers: str) -> None:
    headers = {key.replace("_", "-"): value for key, value in headers.items()}
    installed[name.lower()] = FakeDistribution(name, list(requires), headers)


def names(document: dict[str, object]) -> list[str]:
    return [component["name"] for component in document["components"]]  # type: ignore[attr-defined]


def test_command_prints_a_valid_document() -> None:
    # Each worker would spend two seconds on this import if it were at the top.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    result = CliRunner().invoke(app, ["sbom"])
    assert result.exit_code == 0, result.output
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(result.stdout) is None
    document = json.loads(result.stdout)
    assert document["metadata"]["component"]["name"] == "simplebus-broker"
    assert {"trio", "numpy"} <= set(names(document))
    assert "pytest" not in names(document)


def test_lists_indirect_requirements_and_who_needs_them(
    installed: dict[str, FakeDistribution],
) -> None:
    add(installed, "app", "Lib_A>=1", "lib-b[fast]")
    add(installed, "lib_a", "lib-c")
    installed["lib-a"] = installed["lib_a"]
    add(installed, "lib-b", 'speedup; extra == "fast"', 'slowdown; extra == "slow"')
    for name in ("lib-c", "speedup", "slowdown", "unrelated"):
        add(installed, name)
    document = build_sbom("app", (), CREATED_AT)
    assert names(document) == ["lib_a", "lib-b", "lib-c", "speedup"]
    needs = {dependency["ref"]: dependency["dependsOn"] for dependency in document["dependencies"]}
    assert needs["pkg:pypi/app@1.0"] == ["pkg:pypi/lib-a@1.0", "pkg:pypi/lib-b@1.0"]
    assert needs["pkg:pypi/lib-b@1.0"] == ["pkg:pypi/speedup@1.0"]


def test_lists_packages_of_given_extras_alone(installed: dict[str, FakeDistribution]) -> None:
    add(installed, "app", 'lib-a; extra == "more"', 'lib-b; python_version >= "3"', "missing")
    add(installed, "lib-a", "app")
    add(installed, "lib-b")
    assert names(build_sbom("app", (), CREATED_AT)) == ["lib-b"]
    assert names(build_sbom("app", ("more",), CREATED_AT)) == ["lib-a", "lib-b"]


def test_license_is_the_expression_or_the_names_in_classifiers(
    installed: dict[str, FakeDistribution],
) -> None:
    add(installed, "app", "lib-a", "lib-b", "lib-c", "lib-d")
    add(installed, "lib-a", License_Expression="MIT OR Apache-2.0")
    add(installed, "lib-b", Classifier="License :: OSI Approved :: BSD License", License="text")
    add(installed, "lib-c", License="Public domain")
    add(installed, "lib-d")
    licenses = [
        component.get("licenses") for component in build_sbom("app", (), CREATED_AT)["components"]
    ]
    assert licenses == [
        [{"expression": "MIT OR Apache-2.0"}],
        [{"license": {"name": "BSD License"}}],
        [{"license": {"name": "Public domain"}}],
        None,
    ]


def test_source_tree_without_installation_is_an_error(
    installed: dict[str, FakeDistribution],
) -> None:
    result = CliRunner().invoke(app, ["sbom"])
    assert result.exit_code == 1
    assert "expected an installed distribution simplebus-broker" in result.output
