"""`simplebus sbom`: list of the installed components in the CycloneDX format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import datetime
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Annotated, Any

import typer

from simplebus.console.errors import fail
from simplebus.console.installation import DISTRIBUTION, install_command

HELP = (
    "Print a software bill of materials.\n\n"
    "It lists simplebus and every installed package that it needs, with versions and licenses, in "
    "the format CycloneDX 1.6 (JSON).\n\n\b\n"
    "  simplebus sbom > sbom.json\n"
    "  simplebus sbom --extra spark > sbom.json    with the packages of the data pipeline"
)

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^]]*)\])?")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")


def sbom(
    extra: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Include the packages of this extra, such as spark. Can be given several times.",
        ),
    ] = None,
) -> None:
    try:
        document = build_sbom(DISTRIBUTION, extra or (), datetime.now().astimezone())
    except PackageNotFoundError:
        fail(
            f"simplebus runs from its source tree, expected an installed distribution "
            f"{DISTRIBUTION}; run: {install_command()}"
        )
    typer.echo(json.dumps(document, indent=2))


def build_sbom(name: str, extras: Iterable[str], created_at: datetime) -> dict[str, Any]:
    """Return the bill of materials of an installed distribution as a CycloneDX 1.6 object.

    A package that is needed only on other systems, or only for an extra, is listed if it is
    installed and the extra is given.

    Args:
        name: Name of the distribution.
        extras: Extras of the distribution whose packages are listed.
        created_at: Time of the document, with a time zone.

    Raises:
        PackageNotFoundError: The distribution is not installed.
    """
    root = distribution(name)
    found: dict[str, Distribution] = {}
    needed: dict[str, set[str]] = {}
    followed: set[tuple[str, str]] = set()
    waiting = [(root, extra) for extra in ("", *extras)]
    while waiting:
        each, extra = waiting.pop()
        key = _normalize(each.name)
        if (key, extra) in followed:
            continue
        followed.add((key, extra))
        found[key] = each
        dependencies = needed.setdefault(key, set())
        for requirement, its_extras in _find_requirements(each, extra):
            try:
                dependency = distribution(requirement)
            except PackageNotFoundError:
                continue
            dependencies.add(_normalize(dependency.name))
            waiting += [(dependency, its_extra) for its_extra in ("", *its_extras)]
    root_key = _normalize(root.name)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": created_at.isoformat(timespec="seconds"),
            "component": _describe(root, "application"),
        },
        "components": [
            _describe(each, "library") for key, each in sorted(found.items()) if key != root_key
        ],
        "dependencies": [
            {
                "ref": _package_url(found[key]),
                "dependsOn": [
                    _package_url(found[dependency]) for dependency in sorted(dependencies)
                ],
            }
            for key, dependencies in sorted(needed.items())
        ],
    }


def _find_requirements(package: Distribution, extra: str) -> Iterable[tuple[str, tuple[str, ...]]]:
    """Yield name and extras of the packages that a package needs for one extra; empty for none."""
    for text in package.requires or ():
        requirement, _, marker = text.partition(";")
        named_extra = _EXTRA.search(marker)
        if (named_extra[1] if named_extra else "") != extra:
            continue
        match = _REQUIREMENT.match(requirement)
        assert match is not None, f"requirement of {package.name} without a name: {text!r}"
        yield match[1], tuple(re.findall(r"[^\s,]+", match[2] or ""))


def _describe(package: Distribution, kind: str) -> dict[str, Any]:
    """Return a package as a CycloneDX component."""
    url = _package_url(package)
    component: dict[str, Any] = {
        "type": kind,
        "bom-ref": url,
        "name": package.name,
        "version": package.version,
        "purl": url,
    }
    if licenses := _find_licenses(package):
        component["licenses"] = licenses
    return component


def _find_licenses(package: Distribution) -> list[dict[str, Any]]:
    """Return the license of a package as CycloneDX license choices; empty if it names none."""
    headers: dict[str, Any] = package.metadata.json  # Names in lower case; without absent ones.
    if expression := headers.get("license_expression"):
        return [{"expression": expression}]
    names = [
        classifier.rpartition(" :: ")[2]
        for classifier in headers.get("classifier", ())
        if classifier.startswith("License :: ")
    ]
    text = headers.get("license", "")
    if not names and text and "\n" not in text:
        names = [text]
    return [{"license": {"name": name}} for name in names]


def _package_url(package: Distribution) -> str:
    """Return the address of a package on PyPI in the form of the package URL specification."""
    return f"pkg:pypi/{_normalize(package.name)}@{package.version}"


def _normalize(name: str) -> str:
    """Return a package's name as PyPI compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()
