"""Configuration file: its settings reach the server, and errors are one sentence each."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simplebus import cli
from simplebus.commands.serve.command import declare_options, parse_arguments
from simplebus.commands.serve.listener_options import NatsOptions, nats_options
from simplebus.commands.serve.settings import build_plan, check_file, reload_plan
from simplebus.config.bridges import BridgeTable, CopyTable
from simplebus.config.changed_values import (
    ValueChange,
    apply_reload,
    count_changes,
    find_changes,
)
from simplebus.config.configuration import Configuration
from simplebus.config.environment import unread_variables
from simplebus.config.errors import ConfigError
from simplebus.config.file import ConfigFile
from simplebus.config.nats_users import NatsTable, NatsUserTable
from simplebus.config.sample import render_sample
from simplebus.config.server_schema import SETTING_TABLES, SETTINGS, TABLES, ClassTable
from simplebus.config.server_settings import server_settings
from simplebus.config.setting import FILE, FLAG, Setting, SettingsTable
from simplebus.config.users import UserTable
from simplebus.core.settings import ClassSettings, FullPolicy, Retention, Settings
from simplebus.core.users.subject_permissions import ResponsePermission, SubjectPermissions
from simplebus.core.users.users import User, Users
from tests.config.check_config import check_config


def load(path: Path, *arguments: str) -> Configuration:
    """Return the values of all settings with this file. Raises ConfigError."""
    configuration = parse_arguments(["--config", str(path), *arguments])
    configuration.raise_errors()
    return configuration


def load_file(path: Path) -> ConfigFile:
    """Return the content of a valid file."""
    file = load(path).file
    assert file is not None
    return file


def load_nats(path: Path, *arguments: str) -> NatsOptions:
    """Return the settings of the NATS listener with this file."""
    return nats_options(load(path, *arguments), os.environ)


def load_settings(path: Path, *arguments: str) -> Settings:
    """Return the core settings with this file."""
    configuration = load(path, *arguments)
    assert configuration.file is not None
    return server_settings(configuration.config, configuration.file.class_settings)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "bus.toml"


def test_file_can_set_any_option(file: Path) -> None:
    file.write_text(
        """
        [serve]
        host = ["127.0.0.1", "::1"]
        max-memory = "4GiB"
        max_class_messages = 1000
        tick = 0.5
        verbose = true
        full = "drop_oldest"
        data-dir = "kept"
        [nats]
        port = 7
        max-payload = 8388608
        [nats.tls]
        cert = "server.pem"
        key = "/etc/key.pem"
        """
    )
    config, nats = load(file).config, load_nats(file)
    assert config.general.host == ("127.0.0.1", "::1")
    assert (config.memory.max_memory, config.memory.max_class_messages) == (4 << 30, 1000)
    assert (config.acknowledgement.tick, config.general.verbose) == (0.5, True)
    assert config.memory.full is FullPolicy.DROP_OLDEST
    assert config.durability.data_dir == file.parent / "kept"
    assert nats.tls is not None
    assert (nats.port, nats.settings.limits.max_payload) == (7, 8 << 20)
    assert (nats.tls.cert, nats.tls.key) == (
        file.parent / "server.pem",
        Path("/etc/key.pem"),
    )


def sample_value(setting: Setting) -> Any:
    """Return a value of a setting as the sample file has it: the default, or an example."""
    (text,) = re.findall(rf"^#-? {setting.toml_key} = (.*)$", sample_table(setting), re.MULTILINE)
    return tomllib.loads(f"value = {text}")["value"]


def sample_table(setting: Setting) -> str:
    """Return the table of the sample file that contains a setting."""
    return render_sample().split(f"\n[{setting.toml_table}]\n")[1].split("\n[")[0]


def test_every_setting_can_be_given_by_option_variable_and_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: dict[str, str] = {}
    flags: list[str] = []
    variables: dict[str, str] = {}
    for setting in SETTINGS.values():
        value = True if setting.kind is FLAG else sample_value(setting)
        values = [str(each) for each in (value if isinstance(value, list) else [value])]
        table = tables.get(setting.toml_table, f"[{setting.toml_table}]\n")
        tables[setting.toml_table] = f"{table}{setting.toml_key} = {json.dumps(value)}\n"
        flags += (
            [setting.flag] if value is True else [f"{setting.flag}={value}" for value in values]
        )
        variables[setting.variable] = " ".join(values)
    file.write_text("".join(tables.values()))
    from_file = dict(load(file).config.items())
    assert from_file.keys() == set(SETTINGS.values())
    assert dict(parse_arguments(flags).config.items()) == from_file
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert dict(parse_arguments([]).config.items()) == from_file
    for setting, found in from_file.items():
        assert found or setting.kind.parse("0") == found, setting.name


def test_command_line_overrides_environment_and_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[serve]\nport = 1\ntick = 2\nack_timeout = 3")
    monkeypatch.setenv("SIMPLEBUS_TICK", "20")
    monkeypatch.setenv("SIMPLEBUS_ACK_TIMEOUT", "30")
    config = load(file, "--ack-timeout", "300").config
    acknowledgement = config.acknowledgement
    assert (config.general.port, acknowledgement.tick) == (1, 20)
    assert acknowledgement.ack_timeout == 300


def test_environment_can_name_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[serve]\nport = 1")
    monkeypatch.setenv("SIMPLEBUS_CONFIG", str(file))
    assert parse_arguments([]).config.general.port == 1


def test_users_have_permissions(file: Path) -> None:
    file.write_text(
        """
        [nats]
        no_auth_user = "guest"
        default_permissions = { subscribe = "public.>" }
        [[nats.users]]
        user = "guest"
        [[nats.users]]
        user = "ada"
        password = "secret"
        [nats.users.permissions]
        publish = ["orders.>", "logs"]
        subscribe = { allow = ["orders.> billing"], deny = "orders.secret" }
        allow_responses = { max = 5, expires = 0.5 }
        """
    )
    file.chmod(0o600)
    guest_user = User(
        "guest", subject_permissions=SubjectPermissions(subscribe_allow=("public.>",))
    )
    restricted_user = User(
        "ada",
        "secret",
        subject_permissions=SubjectPermissions(
            publish_allow=("orders.>", "logs"),
            subscribe_allow=("orders.> billing",),
            subscribe_deny=("orders.secret",),
            responses=ResponsePermission(5, 0.5),
        ),
    )
    assert load_nats(file).settings.users == Users((guest_user, restricted_user), anonymous="guest")
    deprecated = [
        re.search(r"nats\.(\w+) is deprecated", warning) for warning in load(file).warnings
    ]
    assert [each and each[1] for each in deprecated] == [
        "no_auth_user",
        "default_permissions",
        "users",
    ]


def test_classes_have_bound_subjects(file: Path) -> None:
    file.write_text('[classes.orders]\nid = 7\nsubjects = ["orders.>"]\n[classes.logs]')
    classes = load_file(file).classes
    assert (classes["orders"].id, classes["orders"].subjects) == (7, ["orders.>"])
    assert (classes["logs"].id, classes["logs"].subjects) == (None, [])


def test_class_settings_override_server_settings(file: Path) -> None:
    file.write_text(
        "[classes.orders]\nfull = 'drop_oldest'\nmax-messages = 9\nmax-memory = '1MiB'\n"
        "keep-seconds = 60\n[classes.logs]\n[classes.state]\nlast-values = true"
    )
    settings = load_settings(file)
    assert settings.settings_for_class(3, "orders") == ClassSettings(
        Retention(seconds=60), FullPolicy.DROP_OLDEST, 9, 1 << 20
    )
    assert settings.settings_for_class(3, "state") == ClassSettings(last_values=True)
    assert (
        settings.settings_for_class(3, "logs") == settings.settings_for_class(3) == ClassSettings()
    )


def test_classes_have_backoff_and_max_deliveries(file: Path) -> None:
    file.write_text(
        "[serve]\nmax-deliveries = 5\n[classes.orders]\nack-seconds = 2\n"
        "backoff = [1, 5.5, 30]\nmax-deliveries = 0\n[classes.logs]\nmax-deliveries = 3"
    )
    settings = load_settings(file)
    assert settings.deliveries_max == 5
    class_settings = settings.settings_for_class(3, "orders")
    assert (
        class_settings.ack_seconds,
        class_settings.backoff_seconds,
        class_settings.deliveries_max,
    ) == (2, (1, 5.5, 30), 0)
    assert settings.settings_for_class(3, "logs").deliveries_max == 3
    assert settings.settings_for_class(3).deliveries_max is None
    with pytest.raises(ValueError, match="--max-deliveries must be from 0 to 65535, got 65536"):
        load_settings(file, "--max-deliveries", "65536")


def test_times_and_sizes_of_classes_have_units(file: Path) -> None:
    file.write_text(
        "[classes.orders]\nkeep-seconds = '5min'\nkeep-memory = '1MiB'\nack-seconds = '500ms'\n"
        "backoff = ['1s', 5, '2min']\nmax-memory = 1048576\n"
    )
    assert load_settings(file).settings_for_class(3, "orders") == ClassSettings(
        keep=Retention(bytes=1 << 20, seconds=300),
        ack_seconds=0.5,
        backoff_seconds=(1, 5, 120),
        bytes_max=1 << 20,
    )


def test_spill_requires_data_directory(file: Path) -> None:
    file.write_text(
        "[serve]\ndata-dir = 'here'\n[classes.orders]\nfull = 'spill'\nmax-disk = '2GiB'\n"
    )
    settings = load_settings(file)
    assert settings.settings_for_class(3, "orders") == ClassSettings(
        full_policy=FullPolicy.SPILL, disk_bytes_max=2 << 30
    )
    file.write_text("[classes.orders]\nfull = 'spill'\n")
    with pytest.raises(ValueError, match="it needs --data-dir"):
        load_settings(file)


@pytest.mark.parametrize(
    ("table", "flags", "expected_error"),
    [
        ("last-values = true", (), "class state keeps last values"),
        ("", ("--last-values", "state"), "--last-values state: a class that spills"),
    ],
)
def test_last_values_conflict_with_spill(
    file: Path, table: str, flags: tuple[str, ...], expected_error: str
) -> None:
    """Otherwise the class would silently keep no last values."""
    old_text = "[serve]\ndata-dir = 'here'\nfull = 'spill'\n[classes.state]\n"
    file.write_text(old_text + table)
    with pytest.raises(ValueError, match=expected_error):
        load_settings(file, *flags)
    file.write_text(old_text + "full = 'block'\n" + table)
    assert load_settings(file, *flags).settings_for_class(3, "state").last_values != bool(flags)


@pytest.mark.parametrize("text", ['[nats]\ntoken = "x"', '[nats]\nuser = "x"\npassword = "y"'])
def test_secrets_readable_by_others_are_a_warning(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o644)
    warning = f"{file} holds passwords or tokens, and every user may read it"
    assert warning in load(file).warnings
    file.chmod(0o640)
    assert warning not in load(file).warnings


USER = '[[nats.users]]\nuser = "x"\n'


@pytest.mark.parametrize(
    ("text", "expected_error"),
    [
        ("nonsense", "is not TOML"),
        ("[serv]", ": 'serv' is unknown; did you mean 'serve'?"),
        ("[serve]\nmax-memori = 1", ": serve: 'max-memori' is unknown; did you mean 'max-memory'?"),
        ("[serve]\nconfig = 'x'", ": serve: 'config' is unknown"),
        ("[serve]\nport = '7'", ": serve.port: expected a number, got '7'"),
        ("[serve]\nport = 7.5", ": serve.port: "),
        (
            "[classes.orders]\nbackoff = []",
            ": classes.orders.backoff must have from 1 to 64 delays, got 0",
        ),
        ("[classes.orders]\nbackoff = {}", ": classes.orders.backoff: expected a single value"),
        (
            "[classes.orders]\nbackoff = [1, 0]",
            ": classes.orders.backoff must be above 0 and up to 86400 seconds, got 0",
        ),
        (
            "[classes.orders]\nmax-deliveries = -1",
            ": classes.orders.max-deliveries: it should be 0 or more, got -1",
        ),
        (
            "[classes.'dead.o']\nfull = 'drop_newest'",
            ".full: drop_newest has no effect on a class of dead letters, expected drop_oldest or",
        ),
        ("[classes.'dead.o']\nlast-values = true", ".last-values has no effect on a class of dead"),
        ("[serve]\nport = 70000", ": serve.port: "),
        ("[serve]\nport = true", ": serve.port: expected a value, not true or false, got true"),
        ("[serve]\nverbose = 1", ": serve.verbose: expected true or false, got 1"),
        ("[serve]\nhost = 3", ": serve.host: expected a text, got 3"),
        ("[serve]\nhost = [[]]", ": serve.host[0]: expected a single value, got a list"),
        ("[serve]\ntick = 2026-01-01", ": serve.tick: expected a single value"),
        ("[serve]\ntick = 'soon'", ": serve.tick: 'soon' is not a time"),
        ("[serve]\nmax_memory = '1MB'", ": serve.max_memory: '1MB' is not a size"),
        (
            "[serve]\nmax_memory = '1.5GiB'",
            ": serve.max_memory: '1.5GiB' is not a size; write a whole",
        ),
        ("[serve]\ntick = '\uff19s'", ": serve.tick: '\uff19s' is not a time"),
        ("[serve]\nfull = 'blok'", ": serve.full: 'blok' is not one of 'block'"),
        ("serve = 1", ": serve: expected a table, got 1"),
        ("[nats]\nmax-payloads = 1", ": nats: 'max-payloads' is unknown; did you mean"),
        ("[nats]\ntls = 1", ": nats.tls: expected a table, got 1"),
        ("[nats.tls]\ncrt = ''", ": nats.tls: 'crt' is unknown; did you mean 'cert'?"),
        ("[nats]\nusers = 4", ": nats.users: expected tables, as [[nats.users]]"),
        ("[[nats.users]]\nusr = 'x'", ": nats.users[0]: 'usr' is unknown; did you mean 'user'?"),
        (USER + "password = 1", ": nats.users[0].password: expected a text, got a number"),
        (
            USER + "permissions = 1",
            ": nats.users[0].permissions: expected a table, got 1",
        ),
        (
            USER + "permissions = { publish = { alow = '' } }",
            ": nats.users[0].permissions.publish: 'alow' is unknown; did you mean 'allow'?",
        ),
        (
            USER + "permissions = { publish = ['a..b'] }",
            ": nats.users[0].permissions.publish[0]: 'a..b' is not a pattern, expected a subj",
        ),
        (
            "[nats]\ndefault_permissions = { subscribe = { deny = '' } }",
            ": nats.default_permissions.subscribe.deny: '' is not a pattern, expected a subject",
        ),
        (USER + "nkey = 'U'", ": nats.users[0].nkey: nkey 'U'"),
        ("[[nats.users]]", ": nats.users[0]: expected 'user' or 'nkey'"),
        (USER + USER, ": nats: users 'x' and 'x' have the same name"),
        ("[nats]\nuser = 'x'", ": nats: 'user' and 'password' need each other"),
        (
            "[nats]\nuser = ''",
            ": nats.user: an empty value would admit every client",
        ),
        ("[nats]\ntoken = ''", ": nats.token: an empty value would admit every client"),
        ("[nats]\nno_auth_user = 'x'", ": nats: no_auth_user x: expected the name of a user"),
        ("[classes.x]\nid = '4'", ": classes.x.id: expected a number, got '4'"),
        ("[classes.x]\nid = 70000", ": classes.x.id: a class id is from 0 to 65535, got 70000"),
        ("[classes.x]\nid = -1", ": classes.x.id: it should be 0 or more, got -1"),
        ("[classes.x]\nmax-memory = 'much'", ": classes.x.max-memory: 'much' is not a size; "),
        ("[classes.x]\nmax-memory = 9", ": classes.x.max-memory must be at least 262144, got 9"),
        ("[classes.x]\nfull = 'never'", ": classes.x.full: "),
        ("[classes.'a b']", ": classes.a b: 'a b' is not a class; write its id, "),
        ("[classes.7]", ": classes.7: '7' is an id; expected a class name"),
        ("[classes.x]\nsubjects = ['a', 'a..b']", ": classes.x.subjects[1]: "),
        (
            "[nats]\nmax-payload = 8\nmax_payload = 9",
            ": nats: 'max-payload' and 'max_payload' are the same, expected either",
        ),
        (
            USER + "permissions = { allow-responses = true, allow_responses = true }",
            ": nats.users[0].permissions: 'allow-responses' and 'allow_responses' are the same",
        ),
        ("[nats]\nmax_subs = 'x'", ": nats.max_subs: it should be a valid integer, got 'x'"),
        ("[nats]\nmax_subs = 7.5", ": nats.max_subs: it should be a valid integer, got 7.5"),
        ("[nats]\nmax_subs = inf", ": nats.max_subs: it should be a valid integer, got inf"),
        ("[nats]\nport = 70000", ": nats.port: "),
        ("[classes]\nx = 4", ": classes.x: expected a table, got 4"),
        (
            "[classes.x]\nsubject = []",
            ": classes.x: 'subject' is unknown; did you mean 'subjects'?",
        ),
    ],
)
def test_errors_are_one_sentence(file: Path, text: str, expected_error: str) -> None:
    file.write_text(text)
    result = CliRunner().invoke(cli.app, ["serve", "--config", str(file)])
    assert result.exit_code == 78
    assert result.output.startswith(f"simplebus: {file}")
    assert expected_error in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "arguments", "expected_error"),
    [
        ("[nats.tls]\ncert = 'x'", (), ": nats.tls.cert needs nats.tls.key too\n"),
        ("[nats.tls]\noptional = true", ("--nats-tls-cert", "x"), None),
        (
            "[nats.tls]\nverify = true",
            (),
            ": nats.tls.verify needs nats.tls.cert and nats.tls.key\n",
        ),
        (
            "[serve]\nno-nats = true",
            ("--nats-port", "7"),
            ": serve.no-nats and --nats-port contradict each other\n",
        ),
        (
            "[serve]\nmax-memory = '1MiB'\nmax-class-memory = '2MiB'",
            (),
            ": serve.max-class-memory ",
        ),
    ],
)
def test_conflicting_settings_are_reported_by_key(
    file: Path, text: str, arguments: tuple[str, ...], expected_error: str | None
) -> None:
    file.write_text(text)
    result = CliRunner().invoke(cli.app, ["serve", "--config", str(file), *arguments])
    if expected_error is None:  # The error is not in the file.
        assert result.exit_code == 2
        assert result.output == "simplebus: --nats-tls-cert needs --nats-tls-key too\n"
    else:
        assert result.exit_code == 78
        assert re.match(
            rf"simplebus: {re.escape(str(file))}:\d{re.escape(expected_error)}", result.output
        )


def test_file_can_set_permissions_of_environment_user(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[nats]\ndefault_permissions = { publish = 'a' }")
    monkeypatch.setenv("SIMPLEBUS_NATS_USER", "ada")
    monkeypatch.setenv("SIMPLEBUS_NATS_PASSWORD", "secret")
    users = load_nats(file).settings.users
    assert users is not None
    assert users.users[0].subject_permissions == SubjectPermissions(publish_allow=("a",))


def test_missing_file_prints_one_sentence(file: Path) -> None:
    result = CliRunner().invoke(cli.app, ["serve", "--config", str(file)])
    assert result.exit_code == 78
    assert result.output == f"simplebus: {file} cannot be read: No such file or directory\n"


# check-config ------------------------------------------------------------------------------------


def test_check_config_does_not_start_a_server(file: Path) -> None:
    file.write_text("[nats]\nmax-payload = '2MiB'")
    assert check_config(file) == (0, f"{file} is valid\n")
    file.write_text("[[users]]\nname = 'x'\ntoken = 'x'")
    file.chmod(0o644)
    warning = f"simplebus: {file} holds passwords or tokens, and every user may read it\n"
    assert check_config(file) == (0, f"{warning}{file} is valid\n")
    file.write_text("[nats]\nmax-pending = '1MiB'\nmax-payload = '2MiB'")
    status, output = check_config(file)
    assert status == 78
    assert output.startswith(f"simplebus: {file}:2: nats.max-pending must be from 2097152 to")
    file.write_text("[nats]\ndefault_permissions = { publish = 'a' }")
    status, output = check_config(file)
    assert status == 78
    assert output.endswith(f"simplebus: {file}:2: nats.default_permissions: there are no users\n")
    file.write_text("[nats.tls]\ncert = 'none.pem'\nkey = 'none.pem'")
    status, output = check_config(file)
    assert status == 78
    assert f"the certificate {file.parent / 'none.pem'} cannot be read" in output


def test_all_errors_are_reported_with_lines(file: Path) -> None:
    file.write_text(
        """[serve]
max-memori = 1
port = "7"
max-memory = "1MB"
max-class-memory = "2GiB"
max-frame = "1GiB"
cert = "x"
data-dir = "bus.toml"

[nats]
max-pending = "1MiB"
max-payload = "2MiB"

[nats.tls]
cert = "none.pem"
key = "none.pem"

[[nats.users]]
user = 1
[[nats.users]]
usr = "x"
permissions.publish = 3
permissions.subscribe = { alow = "" }

[classes.orders]
id = 7
full = "never"
max-messages = "1"

[classes.logs]
id = 70000
[classes.shops]
id = 7
max-memory = 9
subjects = ["a",
  "a..b"]
[nat]
"""
    )
    status, output = check_config(file)
    assert status == 78
    lines = [
        line.removeprefix(f"simplebus: {file}:")
        for line in output.splitlines()
        if "is deprecated" not in line
    ]
    problems_by_line = {int(line.partition(":")[0]): line.partition(": ")[2] for line in lines}
    assert len(problems_by_line) == len(lines)
    for line, expected_error in {
        2: "serve: 'max-memori' is unknown; did you mean 'max-memory'?",
        3: "serve.port: expected a number, got '7'",
        4: "serve.max-memory: '1MB' is not a size; did you mean 1MiB?",
        5: "serve.max-class-memory must be from 262144 to 1073741824, got 2147483648",
        6: "serve.max-frame must be from 13 to 268435456, got 1073741824 (a frame",
        7: "serve: 'cert' is unknown; did you mean it to stand in [tls]?",
        8: f"serve.data-dir: {file} is not a directory",
        11: "nats.max-pending must be from 2097152",
        15: f"nats.tls.cert: the certificate {file.parent / 'none.pem'} cannot be read",
        16: f"nats.tls.key: the key {file.parent / 'none.pem'} cannot be read",
        19: "nats.users[0].user: expected a text, got 1",
        21: "nats.users[1]: 'usr' is unknown; did you mean 'user'?",
        22: "nats.users[1].permissions.publish: expected a text, got 3",
        23: "nats.users[1].permissions.subscribe: 'alow' is unknown; did you mean 'allow'?",
        27: "classes.orders.full: 'never' is not one of 'block', 'drop_oldest', 'drop_newest'",
        28: "classes.orders.max-messages: expected a number, got '1'",
        31: "classes.logs.id: a class id is from 0 to 65535, got 70000",
        33: "classes.shops.id: 7 is the id of 'orders' too",
        34: "classes.shops.max-memory must be at least 262144, got 9",
        35: "classes.shops.subjects[1]: ",
        37: "'nat' is unknown; did you mean 'nats'?",
    }.items():
        assert problems_by_line.pop(line).startswith(expected_error), line
    assert not problems_by_line


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("host", "it to stand in [serve]"),
        ("port", "it to stand in [serve]"),
        ("drain-timeout", "it to stand in [serve]"),
        ("cert", "it to stand in [tls]"),
        ("max_payload", "it to stand in [nats]"),
        ("nats-port", "'port' in [nats]"),
        ("tls-cert", "'cert' in [tls]"),
        ("nats_tls_ca", "'ca' in [nats.tls]"),
    ],
)
def test_misplaced_key_is_reported_with_its_table(file: Path, key: str, suggestion: str) -> None:
    file.write_text(f"\n{key} = 1\n")
    problems_by_line = f"simplebus: {file}:2: {key!r} is unknown; did you mean {suggestion}?\n"
    assert check_config(file) == (78, problems_by_line)


def test_keys_are_reported_as_spelled_in_the_file(file: Path) -> None:
    file.write_text("[classes.a]\nmax-deliverys = 1\nmax_message = 1\nbackoff = true\n")
    assert check_config(file)[1].splitlines() == [
        f"simplebus: {file}:{line}"
        for line in (
            "2: classes.a: 'max-deliverys' is unknown; did you mean 'max-deliveries'?",
            "3: classes.a: 'max_message' is unknown; did you mean 'max_messages'?",
            "4: classes.a.backoff: expected a value, not true or false, got true",
        )
    ]


def test_toml_syntax_error_has_line(file: Path) -> None:
    file.write_text("[serve]\nport = \n")
    assert check_config(file) == (
        78,
        f"simplebus: {file}:2: is not TOML: Invalid value, in column 8\n",
    )
    file.write_bytes(b"[serve]\n\n# \xff")
    assert check_config(file) == (78, f"simplebus: {file}:3: is not TOML: it is not UTF-8\n")


def test_endless_file_is_not_read(file: Path) -> None:
    file.write_text("#" * (5 << 20))
    assert (
        check_config(file)[1] == f"simplebus: {file} is longer than 4 MiB, which is the maximum\n"
    )


def test_times_and_sizes_have_units(file: Path) -> None:
    file.write_text(
        "[serve]\ndrain-timeout = '2min'\nhello-timeout = '500ms'\nmax-memory = '2GiB'\n"
        "keep-seconds = '7d'\nheartbeat = 5\n"
    )
    config = load(file).config
    timeouts = config.timeouts
    assert (timeouts.drain_timeout, timeouts.hello_timeout, timeouts.heartbeat) == (120, 0.5, 5)
    assert (config.memory.max_memory, config.memory.keep_seconds) == (2 << 30, 7 * 86_400)


# sample ------------------------------------------------------------------------------------------


def sample() -> str:
    result = CliRunner().invoke(cli.app, ["config", "sample"])
    assert result.exit_code == 0
    return result.output


def test_sample_is_valid_and_shows_defaults(file: Path, tmp_path: Path) -> None:
    text = sample()
    file.write_text(text)
    assert check_config(file) == (0, f"{file} is valid\n")
    uncommented = re.sub(r"^# ([a-z-]+ = )", r"\1", text, flags=re.MULTILINE)
    assert uncommented.count("\nport = ") == 2
    file.write_text(uncommented)
    assert check_config(file) == (0, f"{file} is valid\n")
    missing_file = tmp_path / "nothing.toml"
    missing_file.touch()
    assert load_settings(file) == load_settings(missing_file)
    assert load_nats(file) == load_nats(missing_file)
    written = dict(load(file).config.items())
    for setting, value in load(missing_file).config.items():
        assert not value or written[setting] == value, setting.name


def test_sample_contains_every_option(file: Path) -> None:
    text = sample()
    for setting in SETTINGS.values():
        assert re.search(rf"^#-? {setting.toml_key} = ", text, re.MULTILINE), setting.name
    examples = re.sub(r"^#- (?!engine|cert|key|ca|users =)", "", text, flags=re.MULTILINE)
    file.write_text(examples)
    file.chmod(0o600)
    status, output = check_config(file)
    assert (status, output) == (0, f"{file} is valid\n")


def keys_of(table: type[SettingsTable], path: str) -> Iterator[str]:
    """Yield the dotted keys of a table and of the tables in it, below `path`."""
    for setting in table.settings():
        key = f"{path}{setting.toml_key}"
        yield key
        if setting.kind.table is not None and not setting.is_list_of_tables:
            yield from keys_of(setting.kind.table, f"{key}.")


TABLES_OF_FILE = {
    **{
        f"[{name}]\n": [s.toml_key for s in SETTINGS.values() if s.toml_table == name]
        for name in SETTING_TABLES
    },
    "": ["serve", "nats", "tls", "users", "bridges", "classes", "classes.a"],
    "[classes.a]\n": [*keys_of(ClassTable, "")],
    "[[users]]\nname = 'a'\n": [*keys_of(UserTable, "")],
    "[nats]\n ": [*keys_of(NatsTable, "")],
    "[[nats.users]]\nuser = 'a'\n": [*keys_of(NatsUserTable, "")],
    "[[bridges]]\nname = 'a'\nto = 'h'\n": [*keys_of(BridgeTable, "")],
    "[[bridges]]\nname = 'a'\nto = 'h'\n[[bridges.copy]]\n": [*keys_of(CopyTable, "")],
}
VALUES = ("-1", "0", "1.5", "nan", "true", "''", "'x'", "'a b'", "'10s'", "[]", "[1, 'x', true]")
VALUES += ("{}", "{ a = 1 }", "[{}]", "[[]]", "[['a', 'b']]", "1979-05-27", "'\\u0000'", f"{9**99}")


@pytest.mark.parametrize("table", TABLES_OF_FILE)
def test_no_value_of_any_key_makes_the_check_fail(file: Path, table: str) -> None:
    for key in TABLES_OF_FILE[table]:
        for value in VALUES:
            file.write_text(f"{table}{key} = {value}\n")
            check_file(str(file))


# Read again --------------------------------------------------------------------------------------


def test_changes_are_reported_with_required_restarts(file: Path) -> None:
    file.write_text("[serve]\nport = 1\nmax-memory = '1GiB'\n[nats.tls]\ntimeout = 3\n")
    file.chmod(0o600)
    configuration = load(file, "--tick", "2")
    old_text = build_plan(configuration)
    assert find_changes(old_text.values, reload_plan(configuration).values) == []
    file.write_text(
        "[serve]\nport = 2\nmax-memory = '2GiB'\ntick = 3\nlog-level = 'debug'\n"
        "[classes.a]\nsubjects = ['a']\n[[nats.users]]\nuser = 'ada'\npassword = 'secret'\n"
    )
    after = reload_plan(configuration)
    changes = find_changes(old_text.values, after.values)
    assert {str(change) for change in changes} == {
        "serve.port = 2, was 1: needs a restart",
        'serve.max-memory = "2GiB", was "1GiB"',
        'serve.log-level = "debug", was "info"',
        "nats.tls.timeout = 2, was 3: needs a restart",
        "classes.a was added",
        "nats.users.ada was added",
    }
    assert count_changes(changes) == "4 changes applied, 2 need a restart"
    remaining_changes = find_changes(apply_reload(old_text.values, after.values), after.values)
    assert {change.description for change in remaining_changes} == {
        "serve.port = 2, was 1",
        "nats.tls.timeout = 2, was 3",
    }


def reload_texts(file: Path, old_text: str, after: str) -> list[str]:
    """Return the changes between two texts of the file."""
    file.write_text(old_text)
    file.chmod(0o600)
    configuration = load(file)
    plan = build_plan(configuration)
    file.write_text(after)
    return [str(change) for change in find_changes(plan.values, reload_plan(configuration).values)]


@pytest.mark.parametrize(
    ("old_text", "after", "changes"),
    [
        ("keep-seconds = 3600", "keep-seconds = 1800", ["keep-seconds = 1800, was 3600"]),
        ("keep-seconds = 3600", "keep-seconds = 3600.0", []),
        ("", "keep-seconds = 2592000", ["keep-seconds = 2592000"]),
        ("max-memory = '1MiB'", "max_memory = '1MiB'", []),
        ("max-memory = '1MiB'", "", ['max-memory is not set, was "1MiB"']),
        ("", "full = 'drop_oldest'\nid = 7", ['full = "drop_oldest"', "id = 7"]),
        ("", "backoff = [1, 2.5]", ["backoff = [1, 2.5]"]),
        ("last-values = true", "last-values = false", ["last-values = false, was true"]),
    ],
)
def test_changed_keys_of_a_class_are_named(
    file: Path, old_text: str, after: str, changes: list[str]
) -> None:
    table = "[classes.orders]\n"
    assert reload_texts(file, table + old_text, table + after) == [
        f"classes.orders.{change}" for change in changes
    ]


def test_changed_users_are_described_without_secrets(file: Path) -> None:
    old_text = (
        "[[users]]\nname = 'till'\npassword = 'secret one'\n"
        "[[users]]\nname = 'a.b'\ntoken = 'secret two'\n"
        "[nats]\ntoken = 'secret three'\n"
        "[[bridges]]\nname = 'hq'\nto = 'simplebus://hq:8888'\nclasses = ['a']\n"
    )
    after = (
        "[[users]]\nname = 'till'\npassword = 'secret five'\nmax-connections = 5\n"
        "[users.permissions]\npublish = ['orders eu.#']\nadmin = ['inquire', 'purge x']\n"
        "[[users]]\nname = 'new'\ntoken = 'secret six'\n"
        "[nats]\ntoken = 'secret seven'\n"
        "[[bridges]]\nname = 'hq'\nto = 'simplebus://other:8888'\nclasses = ['a']\n"
    )
    changes = reload_texts(file, old_text, after)
    assert set(changes) == {
        "users.till.password has changed",
        "users.till.max-connections = 5",
        'users.till.permissions.publish = ["orders eu.#"]',
        'users.till.permissions.admin = ["inquire", "purge x"]',
        'users."a.b" was removed',
        "users.new was added",
        "nats.token has changed",
        'bridges.hq.to = "simplebus://other:8888", was "simplebus://hq:8888": needs a restart',
    }
    assert "secret" not in "".join(changes)


@pytest.mark.parametrize(
    ("old_text", "after", "change"),
    [
        ("host = '::1'", "host = ['::1', '127.0.0.1']", 'host = ["::1", "127.0.0.1"], was ["::1"]'),
        ("", "bind = 'orders.>=orders'", 'bind = ["orders.>=orders"]'),
        ("last-values = [7]", "last-values = ['x']", 'last-values = ["x"], was ["7"]'),
        ("verbose = false", "verbose = true", "verbose = true, was false"),
        ("engine = 'nats://a'", "engine = 'nats://u:secret@b'", "engine has changed"),
        ("", "durability = 'os'", 'durability = "os", was "disk"'),
    ],
)
def test_changed_options_are_written_as_in_the_file(
    file: Path, old_text: str, after: str, change: str
) -> None:
    changes = reload_texts(file, f"[serve]\n{old_text}\n", f"[serve]\n{after}\n")
    assert [each.removesuffix(": needs a restart") for each in changes] == [f"serve.{change}"]


def test_added_and_removed_class_without_keys_is_named(file: Path) -> None:
    assert reload_texts(file, "", "[classes.orders]\n") == ["classes.orders was added"]
    assert reload_texts(file, "[classes.orders]\n", "") == ["classes.orders was removed"]


def test_change_has_its_values(file: Path) -> None:
    file.write_text("[serve]\nmax-classes = 5\n")
    configuration = load(file)
    plan = build_plan(configuration)
    file.write_text("[serve]\nmax-classes = 6\n[[users]]\nname = 'a'\ntoken = 't'\n")
    first, second = find_changes(plan.values, reload_plan(configuration).values)
    assert (first.key, first.value, first.previous) == ("serve.max-classes", "6", "5")
    assert (second.key, second.value, second.previous) == ("users.a", "", "")


def test_old_name_of_a_value_is_a_warning(file: Path) -> None:
    file.write_text("[serve]\nlog-format = 'text'\n")
    (warning,) = build_plan(load(file)).warnings
    assert warning == f"{file}:2: serve.log-format: 'text' is deprecated: use 'console'"
    configuration = parse_arguments(["--log-format", "text"])
    assert build_plan(configuration).warnings == (
        "--log-format: 'text' is deprecated: use 'console'",
    )


def test_readable_users_file_is_a_warning_of_the_plan(file: Path) -> None:
    users = file.parent / "users.toml"
    users.write_text("[[users]]\nname = 'a'\ntoken = 't'\n")
    users.chmod(0o644)
    file.write_text("[serve]\nusers = 'users.toml'\n")
    (warning,) = build_plan(load(file)).warnings
    assert warning.startswith(f"{users} holds secrets")


def test_changes_are_counted() -> None:
    applied, waiting = ValueChange("a", "a = 1", True), ValueChange("b", "b = 1", False)
    assert count_changes([]) == "no changes"
    assert count_changes([applied]) == "1 change applied"
    assert count_changes([applied, waiting, applied]) == "2 changes applied, 1 needs a restart"
    assert count_changes([waiting, waiting]) == "0 changes applied, 2 need a restart"


def test_error_of_the_command_line_is_reported_once_beside_those_of_the_file(file: Path) -> None:
    file.write_text("[serve]\nmax-class-memory = '1MiB'\n[tls]\ncert = 'a'\n")
    with pytest.raises(ConfigError) as raised:
        build_plan(load(file, "--max-frame", "900MiB"))
    assert [message.removeprefix(f"{file}:").strip() for message in raised.value.messages] == [
        "4: tls.cert needs tls.key too",
        "--max-frame must be from 13 to 524288, got 943718400 (a frame may take at most half of "
        "serve.max-class-memory)",
    ]


def test_invalid_reload_reports_all_errors(file: Path) -> None:
    file.write_text("[serve]\nport = 1")
    configuration = load(file)
    file.write_text("[serve]\nport = 'x'\nprt = 2\n")
    with pytest.raises(ConfigError) as raised:
        reload_plan(configuration)
    assert len(raised.value.messages) == 2
    file.write_text("[serve]\nmax-classes = 0\nmax-connections = 0\n[tls]\ncert = 'a'\n")
    with pytest.raises(ConfigError) as raised:
        reload_plan(configuration)
    assert raised.value.messages == (
        f"{file}:2: serve.max-classes must be above 0, got 0",
        f"{file}:3: serve.max-connections must be above 0, got 0",
        f"{file}:5: tls.cert needs tls.key too",
    )
    file.write_text("[serve]\nmax-memory = '1MiB'\nmax-class-memory = '2MiB'")
    with pytest.raises(ConfigError, match=r"bus.toml:3: serve\.max-class-memory must be from"):
        reload_plan(configuration)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        reload_plan(configuration)


# Paths and former names ---------------------------------------------------------------------------

PATHS = [each for each in SETTINGS.values() if each.kind.parse is FILE.parse]


@pytest.mark.parametrize("setting", PATHS, ids=lambda each: each.name)
def test_paths_of_the_file_are_relative_to_its_directory(
    file: Path, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file.parent / "elsewhere").mkdir()
    monkeypatch.chdir(file.parent / "elsewhere")
    file.write_text(f"[{setting.toml_table}]\n{setting.toml_key} = 'a/b'\n")
    assert dict(load(file).config.items())[setting] == file.parent / "a/b"
    assert dict(load(file, setting.flag, "c").config.items())[setting] == Path("c")
    monkeypatch.setenv(setting.variable, "d")
    assert dict(load(file).config.items())[setting] == Path("d")


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give two settings a former name."""
    for name, former_name in (("max_frame", "longest_frame"), ("nats_max_subs", "most_subs")):
        setting = replace(SETTINGS[name], old_names=(former_name,))
        monkeypatch.setitem(SETTINGS, name, setting)  # type: ignore[arg-type]
    declare_options()
    yield
    monkeypatch.undo()
    declare_options()


@pytest.mark.usefixtures("renamed")
def test_former_names_work_with_a_warning(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[serve]\nlongest-frame = '2MiB'\n[nats]\nmost_subs = 3\n")
    configuration = load(file)
    assert configuration.config.memory.max_frame == 2 << 20
    assert configuration.config.nats.max_subs == 3
    assert configuration.warnings == (
        f"{file}:2: serve.longest-frame is deprecated: use serve.max-frame",
        f"{file}:4: nats.most_subs is deprecated: use nats.max-subs",
    )
    monkeypatch.setenv("SIMPLEBUS_LONGEST_FRAME", "3MiB")
    configuration = load(file)
    assert configuration.config.memory.max_frame == 3 << 20
    assert configuration.warnings[-1] == (
        "SIMPLEBUS_LONGEST_FRAME is deprecated: use SIMPLEBUS_MAX_FRAME"
    )
    assert not unread_variables(["SIMPLEBUS_LONGEST_FRAME"], None)
    configuration = load(file, "--longest-frame", "4MiB")
    assert configuration.config.memory.max_frame == 4 << 20
    assert configuration.warnings[-1] == "--longest-frame is deprecated: use --max-frame"


@pytest.mark.usefixtures("renamed")
def test_current_name_overrides_former_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("[nats]\nmost-subs = 3\nmax-subs = 4\n")
    monkeypatch.setenv("SIMPLEBUS_LONGEST_FRAME", "3MiB")
    monkeypatch.setenv("SIMPLEBUS_MAX_FRAME", "2MiB")
    config = load(file).config
    assert (config.memory.max_frame, config.nats.max_subs) == (2 << 20, 4)


def test_settings_of_all_tables_have_distinct_names() -> None:
    assert len(SETTINGS) == sum(len(table.settings()) for table in TABLES.values())
    assert len({setting.key for setting in SETTINGS.values()}) == len(SETTINGS)
