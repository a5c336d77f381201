"""Compilation and start of the load generator.

The generator prints one line of JSON. Other output is an error, which is shown unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from load.processes import LoadError, Process

SOURCES = Path(__file__).resolve().parent / "generator"
DISK = Path(__file__).resolve().parent / "disk"
TLS = Path(__file__).resolve().parent / "tls"
BUILD = Path(__file__).resolve().parent / ".build"
FLAGS = ("-O2", "-march=native", "-std=gnu11", "-Wall", "-Wextra")
_OPENSSL = "apt-get install libssl-dev, or dnf install openssl-devel"
_PACKAGES = {"openssl/ssl.h": _OPENSSL, "-lssl": _OPENSSL, "-lcrypto": _OPENSSL}
"""Compiler errors about missing packages, and how to install them."""
READY_S = 20.0
GRACE_S = 10.0  # Beyond the generator's own time limit, whose error is more detailed.


def program() -> Path:
    """Return the compiled generator. A changed source or flag compiles a new one."""
    return _build("generator", SOURCES, FLAGS)


def disk() -> Path:
    """Return a preloadable library that slows disk syncs or simulates power cuts: disk/sync.c."""
    return _build("disk", DISK, (*FLAGS, "-shared", "-fPIC"))


def tls() -> Path:
    """Return a preloadable library that gives a generator TLS: tls/shim.c."""
    libraries = ("-Wl,--no-as-needed", "-lssl", "-lcrypto", "-ldl")
    return _build("tls", TLS, (*FLAGS, "-shared", "-fPIC", *libraries))


def _build(name: str, folder: Path, flags: tuple[str, ...]) -> Path:
    sources = sorted(folder.glob("*.c"))
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in [*sources, *folder.glob("*.h")]:
        digest.update(path.read_bytes())
    target = BUILD / f"{name}-{digest.hexdigest()[:16]}"
    if not target.exists():
        _compile(sources, flags, target)
    return target


def _compile(sources: list[Path], flags: tuple[str, ...], target: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise LoadError(
            "the load generator is written in C, and no compiler (cc) was found: "
            "apt-get install gcc libc6-dev, or dnf install gcc glibc-devel"
        )
    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}")  # Other processes may compile it, too.
    command = [compiler, *flags, "-o", str(unfinished), *map(str, sources)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if process.returncode != 0:
        for missing, packages in _PACKAGES.items():
            if missing in process.stderr:
                name = target.name.partition("-")[0]
                raise LoadError(f"{name} cannot be compiled without OpenSSL's headers: {packages}")
        raise LoadError(f"the load generator does not compile: {process.stderr.strip()[-600:]}")
    unfinished.replace(target)


class Generator(Process):
    """Running generator."""

    def __init__(self, mode: str, protocol: str, port: int, *, timeout_s: int, **options: object):
        command: list[str | Path] = [program(), mode, protocol, "--port", str(port)]
        command += ["--timeout", str(timeout_s)]
        for name, value in options.items():
            flag = "--" + name.replace("_", "-")
            command += [flag] if value is True else [flag, str(value)]
        super().__init__(f"the {protocol} generator ({mode})", command)
        self.timeout_s = timeout_s

    def wait_ready(self) -> None:
        self.wait_for_line("ready", timeout_s=READY_S)

    def result(self) -> dict[str, Any]:
        """Wait until the generator has ended successfully and return its measurements."""
        lines = self.finish(timeout_s=self.timeout_s + GRACE_S).splitlines()
        found: dict[str, Any] = json.loads(lines[-1])
        return found
