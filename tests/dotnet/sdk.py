"""The .NET SDK of the tests: finds it, builds projects with it, and runs the built programs.

`.ci/install-dotnet` installs it into `.dotnet/` of the checkout. Another installation is used if
`TESTS_DOTNET` names the directory of its program `dotnet`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.requirements import skip_or_fail

ROOT = Path(__file__).parents[2]
FRAMEWORK = "netcoreapp3.1"
"""Target framework of all builds, whatever a project names: the newest that the SDK has."""


def dotnet_program() -> Path:
    """Return the program `dotnet`. Without it, the test is skipped; in CI, it fails."""
    program = Path(os.environ.get("TESTS_DOTNET") or ROOT / ".dotnet").resolve() / "dotnet"
    if not program.exists():
        skip_or_fail(f"this test needs {program}: run .ci/install-dotnet or set TESTS_DOTNET")
    return program


class DotnetSdk:
    """A .NET SDK that builds projects outside the checkout.

    Args:
        folder: Empty directory for builds, which the SDK also uses as its home.
    """

    def __init__(self, folder: Path) -> None:
        self.program = dotnet_program()
        self._folder = folder
        self.environment = os.environ | {
            "DOTNET_CLI_HOME": str(folder),
            # Else processes of the SDK outlive the test.
            "MSBUILDDISABLENODEREUSE": "1",
        }

    def build(self, project: Path, **properties: str) -> Path:
        """Build a copy of the project's files and return its assembly.

        Args:
            project: A .csproj file. If it is in the checkout, it may refer to other files of
                `protocol/dotnet` and `tests/dotnet`.
            properties: Properties of MSBuild, which override those of the project.
        """
        copy = self._folder / "source"
        for part in ("protocol/dotnet", "tests/dotnet"):
            if not (copy / part).exists():
                # `bin` and `obj` of a developer may be from another SDK.
                ignored = shutil.ignore_patterns("bin", "obj", "__pycache__")
                shutil.copytree(ROOT / part, copy / part, ignore=ignored)
        if project.is_relative_to(ROOT):
            project = copy / project.relative_to(ROOT)
        output = self._folder / "built" / project.stem
        options = {"TargetFramework": FRAMEWORK, "UseSharedCompilation": "false"} | properties
        process = subprocess.run(
            [
                *(self.program, "build", project, "-c", "Release", "-o", output, "-v", "quiet"),
                *(f"-p:{name}={value}" for name, value in options.items()),
            ],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return output / f"{project.stem}.dll"

    def command(self, assembly: Path, *arguments: str) -> list[str | Path]:
        """Return the command that runs a built program."""
        return [self.program, assembly, *arguments]
