"""The command `simplebus gateway` as a process: file, signals and kills."""

from __future__ import annotations

import re
import signal
import sqlite3
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import simplebus
from load.ports import free_port
from simplebus import cli
from tests.support.certificates import CertificateAuthority
from tests.support.programs import PATIENCE_SECONDS, run_server, running_program

WRITER = '''
"""Writes received messages into a database."""
import sqlite3

from simplebus.gateway import BlockingModule


class Writer(BlockingModule):
    def __init__(self, bus, settings):
        super().__init__(bus, settings)
        self.database = sqlite3.connect(settings["path"])  # To be used in this thread only.
        self.database.execute("pragma synchronous = off")

    Settings = None

    def start(self):
        self.database.execute("create table if not exists said (what)")

    def receive(self, message):
        self.database.execute("insert into said values (?)", (message.content.decode(),))
        self.database.commit()

    def destroy(self):
        self.database.close()
'''

UNREADY = """
import trio

from simplebus.gateway import Module


class NeverStarts(Module):
    async def start(self):
        await trio.sleep_forever()
"""

SHIELDED = """
import trio

from simplebus.gateway import Module


class Shielded(Module):
    async def receive(self, message):
        self.bus.log.error("it never returns")
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()
"""

CLOCK = """
[modules.clock]
module = "timer"
settings = { every = 0.01, content = "%s" }
"""

LAST_WORD = """
[modules.clock]
module = "timer"
settings = { every = 0.01, content = "last", count = 1 }
"""

SINK = """
[modules.sink]
module = "writer_of_test:Writer"
hears = ["*"]
settings = { path = "%s" }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "writer_of_test.py").write_text(WRITER)
    return tmp_path


def stored_texts(path: Path) -> list[str]:
    database = sqlite3.connect(path)
    try:
        return [text for (text,) in database.execute("select what from said")]
    except sqlite3.OperationalError:  # The table does not exist yet.
        return []
    finally:
        database.close()


def wait_stored(path: Path, text: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while text not in stored_texts(path):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_stored_count(path: Path, count: int) -> None:
    """Wait until `count` messages are stored."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(stored_texts(path)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_reloads_file_and_stops_on_signal(folder: Path) -> None:
    file, path = folder / "gateway.toml", folder / "said.db"
    file.write_text(SINK % path + CLOCK % "one")
    with running_program("gateway", str(file)) as gateway:
        assert gateway.read_line() == "simplebus gateway ready modules=2"
        wait_stored(path, "one")
        file.write_text("[modules.sink]\nmodul = 3\n")
        gateway.signal(signal.SIGHUP)
        gateway.wait_for_stderr("cannot reload, keeping the current modules: ")
        file.write_text(SINK % path + CLOCK % "two")
        gateway.signal(signal.SIGHUP)
        wait_stored(path, "two")
        gateway.signal(signal.SIGTERM)
        status, _, log = gateway.wait()
    assert status == 0, log
    assert "cannot reload, keeping the current modules: " in log
    assert "gateway.toml:2: modules.sink: 'modul' is unknown; did you mean" in log
    assert "stopping: modules: 2 of 2 running;" in log
    assert "not all messages were delivered" not in log


def test_killed_gateway_loses_no_stored_messages(folder: Path) -> None:
    """The gateway is killed before the bus is available, and started again."""
    file = folder / "gateway.toml"
    port = free_port()
    url = f"simplebus://127.0.0.1:{port}"
    uplink_config = f"""
[modules.up]
module = "uplink"
hears = ["*"]
settings = {{ to = "{url}", class = 7, data_dir = "{folder / "kept"}" }}
"""
    path = folder / "said.db"  # It receives the same messages as the uplink.
    file.write_text(uplink_config + CLOCK % "x" + SINK % path)
    for is_last in False, True:
        with running_program("gateway", str(file)) as gateway:
            gateway.read_line()
            if not is_last:
                wait_stored_count(path, 40)
                continue  # Killed.
            with (
                run_server("--port", str(port)),
                simplebus.connect_blocking(url) as client,
                client.subscribe(7) as messages,
            ):
                ticks: list[int] = []
                for message in messages:
                    ticks.append(int(dict(message.headers)["tick"]))
                    if ticks.count(0) == 2 and len(ticks) - ticks[1:].index(0) > 12:
                        break
            gateway.signal(signal.SIGTERM)
            gateway.wait()
    starts = [number for number, tick_number in enumerate(ticks) if tick_number == 0]
    for start, end in zip(starts, [*starts[1:], len(ticks)], strict=True):
        ticks_of_run = ticks[start:end]
        assert ticks_of_run == sorted(set(ticks_of_run)), "in order and once"
        assert len(ticks_of_run) > 10, "the stored messages"


BROKEN = [
    ("", "the file is empty: expected [modules.NAME] for each module"),
    ("# not yet\n", "the file is empty"),
    ("[modules.clock\n", "is not TOML"),
    ("[modules.sink]\nmodul = 3\n", "'modul' is unknown; did you mean"),
    ('[modules.clock]\nmodule = "exits_of_test:It"\n', "fails when it is imported: SystemExit"),
    (None, "cannot be read: No such file"),
]


def test_broken_or_empty_file_changes_nothing(folder: Path) -> None:
    (folder / "exits_of_test.py").write_text("import sys\nsys.exit('on purpose')\n")
    file, path = folder / "gateway.toml", folder / "said.db"
    file.write_text(SINK % path + CLOCK % "begin")
    with running_program("gateway", str(file)) as gateway:
        gateway.read_line()
        wait_stored(path, "begin")
        for number, (text, _) in enumerate(BROKEN):
            if text is None:
                file.unlink()
            else:
                file.write_text(text)
            gateway.signal(signal.SIGHUP)
            gateway.wait_for_stderr("cannot reload, keeping the current modules: ", number + 1)
            file.write_text(SINK % path + CLOCK % number)
            gateway.signal(signal.SIGHUP)
            wait_stored(path, str(number))
        gateway.signal(signal.SIGTERM)
        status, _, log = gateway.wait()
    assert status == 0, log
    failure = f"cannot reload, keeping the current modules: {file}"
    lines = [line for line in log.splitlines() if failure in line]
    for line, (_, expected_error) in zip(lines, BROKEN, strict=True):
        assert expected_error in line
    assert log.count("sink' restarts") == 0, "an unchanged module is not restarted"


STUCK = '''
import threading

from simplebus.gateway import BlockingModule


class Stuck(BlockingModule):
    """Is made for ever."""

    def __init__(self, bus, settings):
        print("is made", flush=True)
        threading.Event().wait()
'''


@pytest.mark.parametrize("signals", [1, 2])
def test_stops_while_module_is_being_created(folder: Path, signals: int) -> None:
    (folder / "stuck_of_test.py").write_text(STUCK)
    file = folder / "gateway.toml"
    file.write_text(SINK % (folder / "said.db") + '[modules.a]\nmodule = "stuck_of_test:Stuck"\n')
    patience = "0.2" if signals == 1 else "3600"
    with running_program("gateway", "--drain-timeout", patience, str(file)) as gateway:
        assert gateway.read_line() == "is made"
        gateway.signal(signal.SIGTERM)
        if signals == 2:
            gateway.wait_for_stderr("stopping: ")
            gateway.signal(signal.SIGTERM)
        status, _, log = gateway.wait()
    assert status == 0, log
    assert ("exiting at once" in log) == (signals == 2)


def test_help_shows_tables_as_written() -> None:
    output = CliRunner().invoke(cli.app, ["gateway", "--help"]).output
    assert "[modules.clock]" in output
    assert "[modules.log]" in output
    assert "\\[" not in output


def test_check_accepts_valid_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    file = folder / "gateway.toml"
    file.write_text(CLOCK % "one" + SINK % "x")
    result = CliRunner().invoke(cli.app, ["gateway", "--check", str(file)])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:2] == [
        "clock: timer, receives from none",
        "sink: writer_of_test:Writer, receives from *",
    ]
    file.write_text('[modules.a]\nmodule = "timr"\n')
    result = CliRunner().invoke(cli.app, ["gateway", str(file)])
    assert result.exit_code == 78
    assert result.stderr.startswith(f"simplebus: {file}:2: modules.a.module: 'timr' is unknown")


@pytest.mark.parametrize(
    ("file_owner", "is_secret"),
    [("token = 'hunter2'", True), ("credentials = {user = 'u', password = 'hunter2'}", True),
     ("ca = '%s'", False)],
)  # fmt: skip
def test_warns_about_readable_file_with_secrets(
    file_owner: str, is_secret: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    CertificateAuthority(folder)
    file = folder / "gateway.toml"
    settings = file_owner.replace("%s", str(folder / "authority.pem"))
    file.write_text(
        "[modules.up]\nmodule = 'uplink'\n[modules.up.settings]\n"
        f"to = 'simplebuss://localhost'\nclass = 1\n{settings}\n"
    )
    for mode, is_open in (0o644, True), (0o640, False):
        file.chmod(mode)
        result = CliRunner().invoke(cli.app, ["gateway", "--check", str(file)])
        assert result.exit_code == 0, result.output
        is_warned = "holds passwords or tokens, and every user may read it" in result.stderr
        assert is_warned == (is_secret and is_open)
        assert "hunter2" not in result.output


def test_second_signal_ends_shielded_module(
    folder: Path,
) -> None:
    (folder / "shielded_of_test.py").write_text(SHIELDED)
    file = folder / "gateway.toml"
    file.write_text(
        CLOCK % "one" + "[modules.bad]\nmodule = 'shielded_of_test:Shielded'\nhears = ['clock']\n"
    )
    with running_program("gateway", "--drain-timeout", "0.1", str(file)) as gateway:
        assert gateway.read_line() == "simplebus gateway ready modules=2"
        gateway.wait_for_stderr("it never returns")
        gateway.signal(signal.SIGTERM)
        gateway.wait_for_stderr("module 'bad' shields itself from cancellation")
        gateway.signal(signal.SIGTERM)
        status, _, log = gateway.wait()
    assert status == 1, log
    assert "exiting at once" in log


def test_reload_abandons_module_that_never_starts(folder: Path) -> None:
    file, path = folder / "gateway.toml", folder / "said.db"
    (folder / "stuck_of_test.py").write_text(UNREADY)
    file.write_text(
        SINK % path + CLOCK % "one" + '[modules.stuck]\nmodule = "stuck_of_test:NeverStarts"\n'
    )
    with running_program("gateway", str(file), "--drain-timeout", "0.2") as gateway:
        wait_stored(path, "one")
        file.write_text(SINK % path + CLOCK % "two")
        gateway.signal(signal.SIGHUP)
        assert gateway.read_line() == "simplebus gateway ready modules=3"
        wait_stored(path, "two")
        gateway.signal(signal.SIGTERM)
        status, _, log = gateway.wait()
    assert status == 0, log
    assert "module 'stuck' did not stop within" in log


def test_earlier_loss_is_not_reported_at_end(folder: Path) -> None:
    """A module was removed earlier, while messages waited in its queue."""
    file, path = folder / "gateway.toml", folder / "said.db"
    (folder / "stuck_of_test.py").write_text(UNREADY)
    stuck = '[modules.stuck]\nmodule = "stuck_of_test:NeverStarts"\nhears = ["clock"]\n'
    file.write_text(SINK % path + CLOCK % "one" + stuck)
    with running_program("gateway", str(file), "--drain-timeout", "0.2") as gateway:
        wait_stored_count(path, 3)
        # The next plan publishes one more message, after all earlier ones.
        file.write_text(SINK % path + LAST_WORD)
        gateway.signal(signal.SIGHUP)
        assert gateway.read_line() == "simplebus gateway ready modules=3"
        gateway.wait_for_stderr("reloaded ")
        wait_stored(path, "last")
        gateway.signal(signal.SIGTERM)
        status, _, log = gateway.wait()
    assert status == 0, log
    assert re.search(r"stopping: modules: 2 of 2 running; .*, [\d,]+ dropped", log)
    assert "not all messages were delivered" not in log
