"""Runs the code blocks of a documentation page, in the order in which a reader would.

Each page has a fresh directory. Its blocks are run by these rules:

- A block whose first line is a comment with only a file name is saved under that name.
- Other `python` blocks are run as scripts. A `text` block directly after one is its output.
- `sh` blocks are commands that must succeed, one per line. `simplebus serve`, `gateway` and
  `bridge` start in the background, until the page ends or starts another server at the same port.
  A command that ends with `&` runs in the background, too.
- `systemctl stop|start|restart simplebus`, also with unit suffixes, stops the server that was
  started without `--port`, or starts it again with the same command. systemd is not used.
- `console` blocks have commands after `$ ` and their output; `…` matches any characters, and a
  line `…` any lines.
- `<!-- not run: REASON -->` before a block excludes it. `<!-- needs: PROGRAM -->` names a program
  that is required from there on.

The ports of a page are replaced by free ones, and `/etc` and `/var/lib` by directories. Plain
`simplebus` and `python` commands are run by the fork server of the tests.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.spark.fast_start import JAVA_OPTIONS
from tests.support.forked_programs import ForkedProgram, can_fork_with
from tests.support.programs import File, environment

COMMAND_SECONDS = 240.0
_FENCE = re.compile(
    r"^(?:<!-- (?P<rule>not run|needs): (?P<argument>[^\n]*) -->\n)?"
    r"```(?P<language>[a-z]*)[^\n]*\n(?P<code>.*?)^```$(?P<gap>\n*)",
    re.MULTILINE | re.DOTALL,
)
_FILE_NAME = re.compile(r"(?:#|//) ([\w./-]+\.\w+)")
_PORT = re.compile(r"(?:(?:127\.0\.0\.1|localhost|\[::1\]):|--(?:[a-z]+-)?port[ =]|-p )(\d{4,5})\b")
_DEFAULT_PORTS = (8888, 4222, 8222)
_SERVICE = re.compile(r"simplebus (serve|gateway|bridge)\b(?!.* --(check|help)\b)")
_UNIT = r"simplebus(?:\.(?:service|socket))?"
_SYSTEMCTL = re.compile(rf"systemctl (stop|start|restart)(?: {_UNIT})+")
_READY = re.compile(r"simplebus (gateway )?ready|copying from")  # A bridge has no ready line.
_FORKED_PROGRAMS = ("simplebus", "python")
_SPARK = re.compile(r"^(?:from|import) (?:pyspark|simplebus\.spark)", re.MULTILINE)
"""Import of Spark, whose JVM outlives a fork that has started it."""
_SHELL_SYNTAX = re.compile(r"[|&;<>()$`*?~\\\n]")
_FREE_PORTS = range(20_000, 32_000)  # Below those that the system gives to clients.


class PageError(AssertionError):
    """A block of a page fails, or its output differs."""


class MissingProgramError(Exception):
    """A page needs a program that is not installed."""


@dataclass(frozen=True)
class Block:
    """Code block of a page."""

    language: str
    code: str
    line: int
    """Number of its first line in the page."""
    not_run: str
    """Reason why the block is not run; empty if it is run."""
    needs: str
    """Program that the block requires; empty for none."""
    follows_code: bool
    """True if only empty lines are between this block and the one before."""


def parse_blocks(page: str) -> list[Block]:
    """Return the code blocks of a page, in order."""
    blocks = []
    end = -1
    for match in _FENCE.finditer(page):
        rule, argument = match["rule"], match["argument"] or ""
        blocks.append(
            Block(
                language=match["language"],
                code=match["code"],
                line=page.count("\n", 0, match.start("code")) + 1,
                not_run=argument if rule == "not run" else "",
                needs=argument if rule == "needs" else "",
                follows_code=match.start() == end,
            )
        )
        end = match.end()
    return blocks


def matches_output(shown: str, output: str) -> bool:
    """Return True if the shown output matches; `…` stands for characters, or for lines."""
    pattern = ""
    for line in shown.rstrip("\n").split("\n"):
        if line.strip() == "…":
            pattern += r"(?:[^\n]*\n)*"
        else:
            pattern += "[^\n]*".join(map(re.escape, line.rstrip().split("…"))) + r"[ ]*\n"
    text = "\n".join(line.rstrip() for line in output.rstrip("\n").split("\n")) + "\n"
    return re.fullmatch(pattern, text) is not None


class PageRunner:
    """Runs one page in a directory."""

    def __init__(self, page: str, directory: Path) -> None:
        self._page = page
        self._directory = directory
        self._ports = _replace_ports(page)
        self._services: dict[str, subprocess.Popen[bytes]] = {}
        """Background processes by port or command."""
        self._server_command = ""
        """Command of the server that was started without `--port`."""
        client, nats, http = (str(self._ports[port]) for port in _DEFAULT_PORTS)
        self._environment = environment(
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            HOME=str(directory),
            SIMPLEBUS_PORT=client,
            SIMPLEBUS_NATS_PORT=nats,
            SIMPLEBUS_HTTP_PORT=http,
            SIMPLEBUS_URL=f"simplebus://127.0.0.1:{client}",
            COLUMNS="100",
            SPARK_SUBMIT_OPTS=JAVA_OPTIONS,
        )

    def run(self) -> None:
        """Run all blocks. Raises PageError or MissingProgramError."""
        blocks = parse_blocks(self._page)
        try:
            for index, block in enumerate(blocks):
                after = blocks[index + 1] if index + 1 < len(blocks) else None
                if block.needs and shutil.which(block.needs, path=self._path) is None:
                    raise MissingProgramError(block.needs)
                if block.not_run:
                    continue
                try:
                    self._run_block(block, after)
                except PageError as error:
                    raise PageError(f"line {block.line}: {error}") from None
        finally:
            self._stop_all()

    @property
    def _path(self) -> str:
        return self._environment["PATH"]

    def _run_block(self, block: Block, after: Block | None) -> None:
        code = self._localize(block.code)
        named = _FILE_NAME.fullmatch(code.split("\n", 1)[0])
        if named:
            path = self._directory / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
        elif block.language == "python":
            shows = after is not None and after.language == "text" and after.follows_code
            shown = after.code if after is not None and shows else ""
            output = self._run_command(["python", "-W", "error", "-c", code])
            self._compare(shown, output)
        elif block.language == "sh":
            for command in _commands(code):
                self._run_shell(command, None)
        elif block.language == "console":
            for command, shown in _dialogue(code):
                self._run_shell(command, self._generalize(shown))
        elif block.language != "text":
            raise PageError(f"a {block.language or 'plain'} block needs a file name or a reason")

    def _run_shell(self, command: str, shown: str | None) -> None:
        """Run one command; `shown` is its expected output, None if it is not compared."""
        if _SERVICE.search(command):
            self._start_service(command, shown)
        elif unit := _SYSTEMCTL.fullmatch(command):
            self._control_server(unit[1])
        elif command.endswith("&"):
            self._start(command.removesuffix("&"), command)
        elif assignment := re.fullmatch(r"export (\w+)=(.*)", command):
            self._environment[assignment[1]] = shlex.split(assignment[2])[0]
        else:
            # Expected failures are shown in console blocks.
            output = self._run_command(_split_command(command), may_fail=shown is not None)
            if shown is not None:
                self._compare(shown, output)

    def _run_command(self, command: list[str], *, may_fail: bool = False) -> str:
        with self._open_process(command, subprocess.PIPE) as process:
            try:
                output = process.communicate(timeout=COMMAND_SECONDS)[0].decode(errors="replace")
            except subprocess.TimeoutExpired as error:
                os.killpg(process.pid, signal.SIGKILL)
                output = (error.output or b"").decode(errors="replace")
                raise PageError(f"{command[-1]!r} does not end: {output}") from None
        if process.returncode and not may_fail:
            raise PageError(f"{command[-1]} fails with status {process.returncode}:\n{output}")
        return output

    def _open_process(self, command: list[str], output: File) -> subprocess.Popen[bytes]:
        """Start a command in a separate process group, as a fork if possible."""
        options: dict[str, Any] = {
            "cwd": self._directory,
            "env": self._environment,
            "stdin": subprocess.DEVNULL,
            "stdout": output,
            "stderr": subprocess.STDOUT,
        }
        is_spark = command[0] == "python" and _SPARK.search(self._page)
        is_forked = command[0] in _FORKED_PROGRAMS and not is_spark
        if is_forked and can_fork_with(self._environment):
            return ForkedProgram(command, **options)
        return subprocess.Popen(command, start_new_session=True, **options)

    def _start(self, command: str, key: str) -> Path:
        """Start a background command. Returns the file of its output."""
        log = self._directory / f".output-{len(self._services)}-{time.monotonic_ns()}"
        with log.open("wb") as output:
            self._services[key] = self._open_process(_split_command(command), output)
        return log

    def _start_service(self, command: str, shown: str | None) -> None:
        command = command.removesuffix("&").rstrip()
        port = re.search(r"--port[ =](\d+)", command)
        key = port[1] if port else "serve" if "simplebus serve" in command else command
        if key in self._services:
            _stop(self._services.pop(key))
        if key == "serve":
            self._server_command = command
        log = self._start(command, key)
        deadline = time.monotonic() + COMMAND_SECONDS
        while True:
            output = log.read_text(errors="replace")
            if shown is None and _READY.search(output):
                return
            if shown is not None and matches_output(shown, self._generalize(output)):
                return
            if time.monotonic() > deadline or self._services[key].poll() is not None:
                raise PageError(f"{command!r} does not become ready:\n{output}")
            time.sleep(0.02)

    def _control_server(self, action: str) -> None:
        """Stop the server, or start it again, as `systemctl` would."""
        process = self._services.get("serve")
        if process is None:
            raise PageError("systemctl needs a server that was started without --port")
        if action == "stop":
            _stop(process)
        else:
            self._start_service(self._server_command, None)

    def _compare(self, shown: str, output: str) -> None:
        output = self._generalize(output)
        if not shown.strip():
            if output.strip():
                raise PageError(f"unexpected output:\n{output}")
        elif not matches_output(shown, output):
            raise PageError(f"expected output:\n{shown}\nbut it is:\n{output}")

    def _localize(self, text: str) -> str:
        """Replace ports and system directories."""
        for port, free in self._ports.items():
            text = re.sub(rf"(?<![\d.,]){port}(?![\d,])", str(free), text)
        return re.sub(r"(?<![\w.])/(etc|var/lib)/", rf"{self._directory}/\1/", text)

    def _generalize(self, output: str) -> str:
        """Restore the ports and directories that the page shows."""
        for port, free in self._ports.items():
            output = output.replace(str(free), str(port))
        return output.replace(f"{self._directory}/", "/").replace(str(self._directory), ".")

    def _stop_all(self) -> None:
        for process in reversed(self._services.values()):
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children: by SIGTERM, then by SIGKILL."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _split_command(command: str) -> list[str]:
    """Return the words of a plain `simplebus` or `python` command; others are run by bash."""
    if not _SHELL_SYNTAX.search(command):
        words = shlex.split(command)
        if words[0] in _FORKED_PROGRAMS and words[1:2] != ["-m"]:
            return words
    return ["bash", "-c", command]


def _commands(code: str) -> Iterator[str]:
    """Yield the commands of a shell block, without comments."""
    for line in code.replace("\\\n", " ").splitlines():
        command = re.sub(r"\s+# .*$", "", line).strip()
        if command and not command.startswith("#"):
            yield command


def _dialogue(code: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a console block, each with its output."""
    for part in re.split(r"^\$ ", code.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield re.sub(r"\s+# .*$", "", command).strip(), shown


def _replace_ports(page: str) -> dict[int, int]:
    """Return a free port for each port of a page."""
    named = {int(port) for port in _PORT.findall(page)} - {0}
    free: set[int] = set()
    while len(free) < len(named | {*_DEFAULT_PORTS}):
        port = random.choice(_FREE_PORTS)
        with socket.socket() as probe:
            if port not in free and probe.connect_ex(("127.0.0.1", port)):
                free.add(port)
    return dict(zip(sorted(named | {*_DEFAULT_PORTS}), sorted(free), strict=True))
