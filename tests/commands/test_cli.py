"""Command line: arguments, output, start and end of its processes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import pytest
import trio
import typer
from typer.testing import CliRunner

import simplebus
from simplebus import cli
from simplebus.config.server_schema import SETTINGS
from simplebus.core.errors import BusConnectionError
from tests.support.certificates import CertificateAuthority
from tests.support.programs import ROOT, environment, run_program, run_server, running_program

COMMANDS = typer.main.get_group(cli.app).commands


def invoke(*arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run a command in this process, for commands that start nothing."""
    result = CliRunner().invoke(cli.app, arguments, env=environment(**variables))
    return result.exit_code, result.stdout, result.stderr


# Help --------------------------------------------------------------------------------------------


def test_help_shows_first_steps() -> None:
    status, output, _ = invoke("--help")
    assert status == 0
    for words in (
        "simplebus demo",
        "simplebus serve",
        "simplebus sub 1",
        'simplebus pub 1 "hello"',
    ):
        assert words in output
    for name in COMMANDS:
        assert name in output


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_has_an_example(name: str) -> None:
    status, output, _ = invoke(name, "--help")
    assert status == 0
    assert f"\n   simplebus {name}" in output


def _click_drops_argument_help() -> bool:
    """Return True for typer before 0.27 with click 8.5, whose own `help` replaces typer's."""

    def command(name: Annotated[str, typer.Argument(help="A name.")]) -> None: ...

    app = typer.Typer(add_completion=False)
    app.command()(command)
    return typer.main.get_command(app).params[0].help is None


@pytest.mark.parametrize("name", COMMANDS)
def test_options_and_arguments_have_help_texts(name: str) -> None:
    for parameter in COMMANDS[name].params:
        if _click_drops_argument_help() and parameter.param_type_name == "argument":
            continue
        assert len(parameter.help or "") > 20, parameter.name


def test_settings_are_options_of_serve() -> None:
    flags = [setting.flag for setting in SETTINGS.values()]
    options = [parameter.opts[0] for parameter in COMMANDS["serve"].params]
    assert [option for option in options if option != "--help"] == [*flags, "--config"]
    assert SETTINGS["nats_tls_ca"].variable == "SIMPLEBUS_NATS_TLS_CA"


def test_help_is_printed_without_a_command() -> None:
    _, output, errors = invoke()
    assert "simplebus demo" in output + errors


def test_version_is_printed() -> None:
    status, output, _ = invoke("--version")
    assert status == 0
    assert re.fullmatch(r"simplebus \d+\.\d+.*\n|simplebus, run from its source.*\n", output)


# Values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "--max-memory 64MiB --max-class-memory 65MiB",
            "--max-class-memory must be from 262144 to 67108864, got 68157440 (a class may not "
            "take more than --max-memory, which all classes share)",
        ),
        ("--max-memory 1", "--max-memory must be at least 262144, got 1"),
        (
            "--max-frame 300MiB",
            "--max-frame must be from 13 to 268435456, got 314572800 (a frame may take at most "
            "half of --max-class-memory)",
        ),
        (
            "--max-pending 1MiB",
            "--max-pending must be from 3145728 to 1099511627776, got 1048576 (a whole frame of "
            "--max-frame and one read must fit into it)",
        ),
        (
            "--max-total-pending 4MiB",
            "--max-total-pending must be from 67108864 to 1125899906842624, got 4194304 (one "
            "connection may take --max-pending of it)",
        ),
        ("--max-class-messages 0", "--max-class-messages must be above 0, got 0"),
        ("--max-connections 0", "--max-connections must be above 0, got 0"),
        ("--max-classes 70000", "--max-classes must be from 1 to 65536, got 70000"),
        ("--hello-timeout 0", "--hello-timeout must be above 0, got 0.0"),
        ("--frame-timeout 0", "--frame-timeout must be above 0, got 0.0"),
        ("--stall-timeout 0", "--stall-timeout must be above 0, got 0.0"),
        ("--ack-timeout 0", "--ack-timeout must be from 1 to 65535 ticks, got 0"),
        ("--tick 0", "--tick must be above 0, got 0.0"),
    ],
)
def test_invalid_values_print_one_sentence(arguments: str, sentence: str) -> None:
    for command in ("serve", "systemd-unit"):
        status, output, errors = invoke(command, *arguments.split())
        assert (status, output) == (2, "")
        assert errors.splitlines()[-1] == f"simplebus: {sentence}"
        assert "Traceback" not in errors


@pytest.mark.parametrize(
    "arguments",
    [
        "serve --port 65536",
        "serve --port x",
        "serve --max-memory lots",
        "serve --tick nan",
        "serve --full sometimes",
        "serve --log-level loud",
        "serve --nonsense",
        "serve extra",
        "nonsense",
        "pub",
        "pub 65536 x",
        "pub -1 x",
        "pub 1 x --count 3",
        "pub 1 x --channel a..b",
        "pub 1 x --channel a.*",
        "pub 1 x --header novalue",
        "pub 1 x --expires soon",
        "sub a\tb",
        "sub 1 --channel #.a",
        "pub 1 x --url http://127.0.0.1:8888",
        "sub 1 --count 0",
        "sub 1 --url simplebus://127.0.0.1:port",
        "bench --size 15",
        "bench --url nonsense://host",
        "systemd-unit --port x",
    ],
)
def test_bad_arguments_end_with_status_2(arguments: str) -> None:
    status, output, errors = invoke(*arguments.split())
    assert (status, output) == (2, "")
    assert errors
    assert "Traceback" not in errors


# Errors ------------------------------------------------------------------------------------------


def app_raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Callable[[], None]:
    def app(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    return cli.main


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (KeyboardInterrupt(), 130, ""),
        (BaseExceptionGroup("", [ExceptionGroup("", [OSError()]), KeyboardInterrupt()]), 130, ""),
        (BusConnectionError("it is gone"), 1, "simplebus: it is gone\n"),
        (ExceptionGroup("", [BusConnectionError("it is gone")]), 1, "simplebus: it is gone\n"),
        (OSError(28, "No space left on device"), 1, "simplebus: No space left on device\n"),
        (
            OSError(13, "Permission denied", "/x"),
            1,
            "simplebus: /x: Permission denied\n",
        ),
    ],
)
def test_expected_errors_print_a_sentence_and_exit_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    sentence: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        app_raising(monkeypatch, error)()
    assert ended.value.code == status
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize(
    "error", [ZeroDivisionError(), ExceptionGroup("", [OSError(), AssertionError()])]
)
def test_unexpected_errors_print_a_traceback(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with pytest.raises(type(error)):
        app_raising(monkeypatch, error)()


# serve -------------------------------------------------------------------------------------------


def test_server_prints_ready_when_it_accepts_connections() -> None:
    with run_server() as (program, url):
        host, port = url.removeprefix("simplebus://").split(":")
        assert int(port) > 0
        socket.create_connection((host, int(port)), timeout=60).close()
        program.signal(signal.SIGTERM)
        status, output, errors = program.wait()
    assert (status, output) == (0, "")
    assert "SIGTERM: draining" in errors
    assert "Traceback" not in errors


def test_sigint_stops_server_like_sigterm() -> None:
    with run_server() as (program, _):
        program.signal(signal.SIGINT)
        status, _, errors = program.wait()
    assert status == 0
    assert "Traceback" not in errors


def test_environment_configures_server() -> None:
    with running_program(
        "serve", SIMPLEBUS_PORT="0", SIMPLEBUS_HOST="127.0.0.1", SIMPLEBUS_TICK="9"
    ) as program:
        assert program.read_line().startswith("simplebus ready tcp=127.0.0.1:")


def test_port_in_use_prints_one_sentence() -> None:
    with run_server("--host", "127.0.0.1") as (_, url):
        address = url.removeprefix("simplebus://")
        status, output, errors = run_program(
            "serve", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]
        )
    assert (status, output) == (69, "")
    assert errors == (
        f"simplebus: cannot listen on {address}: Address already in use. That port is for clients: "
        "select another one with --port\n"
    )


def test_failure_of_server_is_an_event_with_json_logs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        status, stdout, stderr = run_program(
            *("serve", "--host", "127.0.0.1", "--port", port, "--log-format", "json")
        )
    assert (status, stdout) == (69, "")
    event = json.loads(stderr.splitlines()[-1])
    assert (event["event"], event["level"]) == ("server.failed", "error")
    assert "Address already in use" in event["error"]


def test_http_port_of_a_bridge_in_use_prints_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        _, output, errors = run_program(
            *("bridge", "--from", "127.0.0.1:1", "--to", "127.0.0.1:2", "--name", "b", "a"),
            *("--http", str(port)),
        )
    assert output == ""
    assert errors.endswith(
        "Address already in use. That port is for HTTP: select another one with --http\n"
    )


def test_invalid_host_prints_one_sentence() -> None:
    status, output, errors = run_program("serve", "--host", "256.0.0.1", "--port", "0")
    assert (status, output) == (69, "")
    assert errors.startswith("simplebus: cannot listen on 256.0.0.1: ")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("flag", ["--host", "--http-host"])
def test_empty_host_is_rejected(flag: str, tmp_path: Path) -> None:
    expected = (
        f"Invalid value for '{flag}': '' is not an address; expected an address to listen on, "
        "such as 0.0.0.0"
    )
    status, output, errors = run_program("serve", flag, "", "--port", "0")
    assert (status, output) == (2, "")
    assert expected in errors
    file = tmp_path / "bus.toml"
    file.write_text(f"[serve]\n{flag[2:]} = ''\n")
    status, output, errors = run_program("check-config", str(file))
    assert status == 78
    assert "not an address; expected an address to listen on" in output + errors


def test_verbose_prints_rates_to_stderr() -> None:
    with run_server("--verbose") as (program, _):
        assert program.process.stderr is not None
        while not program.process.stderr.readline().startswith(
            b"Received: 0. Send: 0. Acknowledged: 0."
        ):
            assert program.process.poll() is None
        program.signal(signal.SIGTERM)
        status, output, _ = program.wait()
    assert (status, output) == (0, "")


def test_verbose_prints_rates_as_json_events() -> None:
    with run_server("--verbose", "--log-format", "json") as (program, _):
        assert program.process.stderr is not None
        line = json.loads(program.process.stderr.readline())
        program.signal(signal.SIGTERM)
        assert program.wait()[0] == 0
    assert line["event"] == "rates.measured"
    assert line["message"].startswith("Received: 0. Send: 0.")
    numbers = [line[name] for name in ("received", "in_flight", "memory_bytes", "nats_clients")]
    assert numbers == [0, 0, 0, 0]


async def test_sigterm_waits_for_acks_of_stored_messages() -> None:
    with run_server() as (program, url):
        async with (
            simplebus.connect(url) as bus,
            bus.subscribe(1, auto_ack=False) as messages,
        ):
            await bus.publish(b"important", class_id=1)
            message = await anext(messages)
            program.signal(signal.SIGTERM)
            await trio.sleep(1.5)
            assert program.process.poll() is None
            messages.ack(message)
            await bus.flush()
            status, _, errors = await trio.to_thread.run_sync(program.wait)
    assert status == 0
    assert "lost" not in errors


async def test_sigterm_waits_for_drain_timeout_at_most() -> None:
    with run_server("--drain-timeout", "0.1") as (program, url):
        async with (
            simplebus.connect(url) as bus,
            bus.subscribe(1, auto_ack=False) as messages,
        ):
            await bus.publish(b"important", class_id=1)
            await anext(messages)
            program.signal(signal.SIGTERM)
            status, _, errors = await trio.to_thread.run_sync(program.wait)
    assert status == 0
    assert "class 1: lost 1 stored message," in errors


async def test_shutdown_names_classes_that_lose_messages() -> None:
    with run_server("--drain-timeout", "0") as (program, url):
        async with simplebus.connect(url) as bus:
            await bus.publish(b"important", class_id="orders")
        program.signal(signal.SIGTERM)
        _, _, errors = await trio.to_thread.run_sync(program.wait)
    assert "class orders: lost 1 stored message," in errors


def test_systemd_receives_status(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        with run_server(NOTIFY_SOCKET=str(tmp_path / "notify")) as (program, url):
            lines = systemd.recv(4096).decode().splitlines()
            assert lines[0] == "READY=1"
            assert lines[1].startswith(f"STATUS=listening on {url.removeprefix('simplebus://')}")
            program.signal(signal.SIGTERM)
            assert systemd.recv(4096).decode().splitlines() == ["STOPPING=1", "STATUS=draining"]
            assert program.wait()[0] == 0


# pub and sub -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Server that the tests share; each uses its own class."""
    with run_server() as (_, url):
        yield url


def publish(url: str, class_id: int | str, *texts: str) -> None:
    """Publish `texts` in process, for tests of subscribers that need no `simplebus pub`."""
    with simplebus.connect_blocking(url) as bus:
        for text in texts:
            bus.publish(text.encode(), class_id=class_id)


def test_sub_prints_published_messages(url: str) -> None:
    assert run_program("pub", "11", "hello", "wörld", "--url", url) == (
        0,
        "",
        "2 messages sent to class 11\n",
    )
    assert run_program("sub", "11", "--count", "2", "--url", url) == (0, "hello\nwörld\n", "")


def test_pub_publishes_each_input_line(url: str) -> None:
    status, _, errors = run_program("pub", "12", "--url", url, stdin_data=b"one\n\n\xff\r\nlast")
    assert (status, errors) == (0, "4 messages sent to class 12\n")
    assert run_program("sub", "12", "--count", "4", SIMPLEBUS_URL=url) == (
        0,
        "one\n\n\\xff\\r\nlast\n",
        "",
    )


def test_pub_with_empty_input_publishes_nothing(url: str) -> None:
    assert run_program("pub", "13", "--url", url, stdin_data=b"") == (
        0,
        "",
        "0 messages sent to class 13\n",
    )


def test_raw_output_equals_published_bytes(url: str) -> None:
    content = b"\x1b[31m \xc3\xb6 \t"
    run_program("pub", "14", "--url", url, stdin_data=content)
    with running_program("sub", "14", "--raw", "--count", "1", "--url", url) as program:
        out, _ = program.process.communicate(timeout=60)
    assert out == content + b"\n"


def test_pub_options_set_message_fields(url: str) -> None:
    options = [
        "--channel",
        "eu.paid",
        "--key",
        "17",
        "--header",
        "by=ada",
        "--header",
        "by=bob",
        "--expires",
        "3600",
    ]
    assert run_program("pub", "cli.orders", "x", *options, "--url", url) == (
        0,
        "",
        "1 message sent to class cli.orders\n",
    )
    assert run_program("pub", "cli.orders", "--count", "2", *options, "--url", url)[0] == 0
    assert run_program("pub", "cli.orders", *options, "--url", url, stdin_data=b"line\n")[0] == 0
    with simplebus.connect_blocking(url) as bus:
        messages = bus.fetch("cli.orders")
    assert [message.payload[:2] for message in messages] == [b"x", b"00", b"00", b"li"]
    for message in messages:
        assert (message.channel, message.key) == ("eu.paid", b"17")
        assert message.headers == (("by", "ada"), ("by", "bob"))
        assert message.expires_ms == 3_600_000


def test_sub_receives_matching_channels(url: str) -> None:
    with simplebus.connect_blocking(url) as bus:
        for channel in ("eu.paid", "us.paid", "eu.sent"):
            bus.publish(channel.encode(), class_id="cli.sales", channel=channel)
    patterns = ("--channel", "us.*", "--channel", "*.sent")
    assert run_program("sub", "cli.sales", *patterns, "--count", "2", "--url", url) == (
        0,
        "us.paid\neu.sent\n",
        "",
    )


def test_sub_begins_at_start_position(url: str) -> None:
    with simplebus.connect_blocking(url) as bus:
        for channel in ("a", "b", "a"):
            bus.publish(channel.encode(), class_id="cli.state", channel=channel)
    begin = ("sub", "cli.state", "--start", "last_values", "--count", "2", "--url", url)
    assert run_program(*begin) == (0, "b\na\n", "")


def test_durable_sub_continues_at_its_position(url: str) -> None:
    durable = ("sub", "cli.lasting", "--durable", "till", "--count", "1", "--url", url)
    publish(url, "cli.lasting", "a", "b")
    assert run_program(*durable)[:2] == (0, "a\n")
    publish(url, "cli.lasting", "c")
    assert [run_program(*durable)[1] for _ in range(2)] == ["b\n", "c\n"]


def test_group_members_share_messages(url: str) -> None:
    member = ("sub", "cli.shared", "--group", "tills", "--count", "1", "--url", url)
    publish(url, "cli.shared", "a", "b")
    assert [run_program(*member)[1] for _ in range(2)] == ["a\n", "b\n"]


def test_group_can_be_key_ordered(url: str) -> None:
    publish(url, "cli.keyed", "a", "b")
    member = ("sub", "cli.keyed", "--group", "tills", "--by-key", "--count", "2", "--url", url)
    assert run_program(*member)[:2] == (0, "a\nb\n")
    code, _, error = run_program("sub", "cli.keyed", "--by-key", "--url", url)
    assert code == 2
    assert "--group NAME" in error


def test_sub_prints_messages_immediately(url: str) -> None:
    with running_program("sub", "15", "--url", url) as program:
        for text in ("first", "second"):
            publish(url, 15, text)
            assert program.read_line() == text
        program.signal(signal.SIGINT)
        assert program.wait() == (130, "", "")


def test_pub_sends_each_line_immediately(url: str) -> None:
    with (
        running_program("sub", "16", "--url", url) as subscriber,
        running_program("pub", "16", "--url", url) as publisher,
    ):
        assert publisher.process.stdin is not None
        publisher.process.stdin.write(b"typed\n")
        publisher.process.stdin.flush()
        assert subscriber.read_line() == "typed"


def test_messages_beyond_count_stay_for_next_sub(url: str) -> None:
    publish(url, 17, "a", "b", "c")
    assert run_program("sub", "17", "--count", "2", "--url", url)[1] == "a\nb\n"
    assert run_program("sub", "17", "--count", "1", "--url", url)[1] == "c\n"


def test_unacknowledged_messages_stay_for_next_sub(url: str) -> None:
    publish(url, 18, "a", "b")
    assert run_program("sub", "18", "--no-ack", "--count", "2", "--url", url)[1] == "a\nb\n"
    assert run_program("sub", "18", "--count", "2", "--url", url)[1] == "a\nb\n"


def test_sub_ends_quietly_when_its_output_is_closed(url: str) -> None:
    run_program("pub", "19", "--count", "100000", "--url", url)
    with running_program("sub", "19", "--url", url) as program:
        assert program.read_line().startswith("0000000000")
        assert program.process.stdout is not None
        program.process.stdout.close()
        assert program.process.wait(60) == 1
        assert program.process.stderr is not None
        assert program.process.stderr.read() == b""


def test_generated_messages_have_number_and_size(url: str) -> None:
    status, _, errors = run_program(
        "pub", "9", "--count", "1200", "--size", "32", "--rate", "5000", "--url", url
    )
    # rich 13 ends a hidden progress bar with an empty line.
    assert (status, errors.lstrip("\n")) == (0, "1,200 messages sent to class 9\n")
    lines = run_program("sub", "9", "--count", "1200", "--url", url)[1].splitlines()
    assert [int(line[:10]) for line in lines] == list(range(1200))
    assert {len(line) for line in lines} == {32}


def test_unreachable_server_prints_one_sentence() -> None:
    with socket.socket() as unused_socket:
        unused_socket.bind(("127.0.0.1", 0))
        url = f"simplebus://127.0.0.1:{unused_socket.getsockname()[1]}"
        for command in (["pub", "1", "x"], ["sub", "1"]):
            status, output, errors = run_program(*command, "--url", url)
            assert (status, output) == (1, "")
            assert errors.startswith(f"simplebus: cannot connect to {url}: Connection refused")
            assert len(errors.splitlines()) == 1


def test_lost_server_prints_one_sentence() -> None:
    with run_server() as (bus, url), running_program("sub", "1", "--url", url) as program:
        publish(url, 1, "x")
        assert program.read_line() == "x"
        bus.process.kill()
        status, _, errors = program.wait()
    assert status == 1
    assert errors.startswith("simplebus: ")
    assert len(errors.splitlines()) == 1


# systemd-unit and start-up -----------------------------------------------------------------------


def test_systemd_unit_contains_given_options() -> None:
    status, output, _ = invoke("systemd-unit", "--host", "0.0.0.0", "--drain-timeout", "31.5")
    assert status == 0
    assert (
        f"ExecStart={sys.executable} -m simplebus serve --host 0.0.0.0 --drain-timeout 31.5"
        in output
    )
    assert "TimeoutStopSec=42" in output


def test_command_line_does_not_import_server() -> None:
    """Help is instant only if the heavy modules wait until they are needed."""
    code = "import sys, simplebus.cli; print('trio' in sys.modules, 'rich.live' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert process.stdout == "False False\n"


def test_wrong_certificate_is_reported_with_key_and_line(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    cert, key = authority.issue("localhost").cert, authority.issue("other").key
    file = tmp_path / "bus.toml"
    file.write_text(f"[tls]\ncert = '{cert}'\nkey = '{key}'\n")
    status, _, errors = run_program("serve", "--port", "0", "--config", str(file))
    assert status == 78
    place = rf"simplebus: {re.escape(str(file))}:[23]: tls\.(cert|key): "
    assert re.match(f"{place}{re.escape(str(cert))} and .* are not a PEM certificate", errors)
    assert errors.count("\n") == 1
