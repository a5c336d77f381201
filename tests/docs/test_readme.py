"""Tests that the examples, defaults and links of README are right."""

from __future__ import annotations

import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from simplebus.core.broker.broker import Settings
from simplebus.core.limits import Limits
from tests.support.programs import PATIENCE_SECONDS, run_server

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()

NATS_FLAGS = shlex.split(re.findall(r"^simplebus serve (--bind .*)$", README, re.MULTILINE)[0])


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_readme_test_command_is_the_ci_command() -> None:
    section = README.split("## Test it", 1)[1]
    command = re.search(r"^```sh\n(.*?)\n```", section, re.MULTILINE | re.DOTALL)
    assert command is not None
    assert command[1] in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0])
def test_readme_examples_run(code: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Ports 8888 and 4222 of the examples are replaced by those of a running server."""
    with ExitStack() as stack:
        if "8888" in code or "4222" in code:
            code = stack.enter_context(with_server_ports(code))
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
    assert done.returncode == 0, done.stderr
    expected = re.findall(r"# prints (.*)", code)
    assert done.stdout.splitlines() == expected


@contextmanager
def with_server_ports(code: str) -> Iterator[str]:
    """Yield the example with the ports of a running server."""
    nats = NATS_FLAGS if "4222" in code else ["--no-nats"]
    with run_server(*nats) as (program, url):
        code = code.replace("8888", url.rpartition(":")[2])
        yield code.replace("4222", program.nats_address.rpartition(":")[2])


def test_readme_states_the_default_limits() -> None:
    limits = Limits()
    for text in (
        f"{limits.frame_bytes >> 20} MiB",
        f"{limits.class_bytes >> 20} MiB",
        f"{limits.total_bytes >> 30} GiB",
        f"{limits.connections:,}",
        f"{Settings().ack_timeout} ticks",
    ):
        assert text in README, text


def test_readme_links_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README):
        assert (ROOT / target).exists(), target


@contextmanager
def captured_log(name: str) -> Iterator[list[str]]:
    """Collect the messages of a logger, independent of the settings of its parents."""
    lines: list[str] = []
    log, handler = logging.getLogger(name), logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)
    log.setLevel(level)


async def test_readme_gateway_example_runs(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trio

    from simplebus.gateway import open_gateway
    from simplebus.gateway.config import read

    (shout,) = [code for code in blocks("py") if "class Shout" in code]
    (gateway,) = [text for text in blocks("toml") if "[modules.loud]" in text]
    (tmp_path / "shout.py").write_text(shout)
    (tmp_path / "gateway.toml").write_text(gateway)
    monkeypatch.syspath_prepend(str(tmp_path))
    with captured_log("simplebus.gateway.log") as lines:
        async with open_gateway(read(tmp_path / "gateway.toml")):
            await trio.sleep(1.5)
    shown = re.findall(r"^… INFO (.*)", README, re.MULTILINE)
    assert lines == shown
