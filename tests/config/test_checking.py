"""What only a look at a whole file finds: `simplebus check-config`."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from certificates import Authority
from typer.testing import CliRunner

from simplebus import cli


def checked(file: Path) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["check-config", str(file)])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[serve]\nport = 4222", "2: serve.port: nats.port is 4222 already"),
        ("[nats]\nport = 8888", "2: nats.port: serve.port is 8888 already"),
        ("[serve]\nport = 9\nhttp-port = 9", "3: serve.http-port: serve.port is 9 already"),
        (
            "[serve]\nport = 9\nhost = '10.0.0.1'\nhttp-port = 9\nhttp-host = '0.0.0.0'",
            "4: serve.http-port: serve.port is 9 already",
        ),
    ],
)
def test_two_doors_have_two_ports(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "bus.toml"
    file.write_text(text)
    assert checked(file) == (78, f"simplebus: {file}:{told}\n")


@pytest.mark.parametrize(
    "text",
    [
        "[serve]\nport = 4222\n[nats]\nport = 9",
        "[serve]\nport = 9\nhost = '10.0.0.1'\nhttp-port = 9\nhttp-host = '10.0.0.2'",
        "[serve]\nport = 0\nhttp-port = 0\n[nats]\nport = 0",
    ],
)
def test_or_one_at_two_addresses(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bus.toml"
    file.write_text(text)
    assert checked(file) == (0, f"{file} is fine\n")


def told(tmp_path: Path, text: str) -> list[str]:
    """What is wrong with a file, each with its line."""
    file = tmp_path / "bus.toml"
    file.write_text(text)
    status, said = checked(file)
    assert status == 78, said
    return [each.removeprefix(f"simplebus: {file}:") for each in said.splitlines()]


def test_all_that_is_wrong_with_classes_is_told_at_once(tmp_path: Path) -> None:
    assert told(
        tmp_path,
        """[classes.orders]
id = 5
max-memory = "1"
max-messages = 0
backoff = [5, -1]
max-deliveries = -1
subjects = ["a..b", "a.>", "$SYS.a"]
ack-seconds = 0
[classes.other]
subjects = ["a.>"]
id = 5
keep-memory = "1MB"
max-disk = 0
[classes."dead.orders"]
full = "Drop_newest"
last-values = true
[classes."a b"]
keep-seconds = nan
[classes.values]
last-values = true
full = "spill"
""",
    ) == [
        "3: classes.orders.max-memory must be at least 262144, got 1",
        "4: classes.orders.max-messages: expected a whole number from 1",
        "5: classes.orders.backoff must be above 0 and up to 86400 seconds, got -1",
        "6: classes.orders.max-deliveries must be from 0 to 65535, got -1",
        "7: classes.orders.subjects[0]: to be bound: pattern 'a..b': segment 2 of 3 is empty, "
        "expected at least one character in each",
        "7: classes.orders.subjects[2]: to be bound: the subject '$SYS.a' begins with $ or "
        "_INBOX., which are not for messages that are kept",
        "8: classes.orders.ack-seconds must be above 0 and up to 86400 seconds, got 0",
        "11: classes.other.id: 5 is the id of 'orders' too",
        "12: classes.other.keep-memory: '1MB' is no size; did you mean 1MiB? write a whole number "
        "of bytes, or one with KiB, MiB or GiB behind it, such as 64MiB",
        "13: classes.other.max-disk must be at least 1, got 0",
        "15: classes.dead.orders.full: 'Drop_newest' is unknown, expected one of block, "
        "drop_oldest, drop_newest, spill; did you mean 'drop_newest'?",
        "16: classes.dead.orders.last-values has no effect on a class of dead letters: leave it "
        "out",
        "17: classes.a b: 'a b' is no class; write its id, from 0 to 65535, or its name, 1 to 200 "
        "characters without spaces",
        "18: classes.a b.keep-seconds: expected a number from 0.0",
        "20: classes.values.last-values is for classes that fit into memory, and not for spill",
    ]


def test_a_word_is_told_with_the_nearest_that_is_one(tmp_path: Path) -> None:
    text = "[serve]\nlog-level = 'INFO'\nfull = 'Blok'\ndurability = 'x'\n[http]\n[log]\n[max]\n"
    assert told(tmp_path, text) == [
        "2: serve.log-level: 'INFO' is not one of 'debug', 'info', 'warning', 'error'; did you "
        "mean 'info'?",
        "3: serve.full: 'Blok' is not one of 'block', 'drop_oldest', 'drop_newest', 'spill'; did "
        "you mean 'block'?",
        "4: serve.durability: 'x' is not one of 'memory', 'os', 'disk'",
        "5: 'http' is unknown; did you mean 'http-port', 'http-host' or 'http-name' in [serve]?",
        "6: 'log' is unknown; did you mean 'log-level' or 'log-format' in [serve]?",
        "7: 'max' is unknown; there are bridges, classes, nats, serve, tls, users",
    ]


def test_a_file_may_begin_with_a_mark_that_it_is_utf_8(tmp_path: Path) -> None:
    users = tmp_path / "users.toml"
    users.write_text("[[users]]\nname = 'ada'\ntoken = 'abc'\n", encoding="utf-8-sig")
    users.chmod(0o600)
    file = tmp_path / "bus.toml"
    file.write_text("[serve]\nusers = 'users.toml'\n", encoding="utf-8-sig")
    assert checked(file) == (0, f"{file} is fine\n")
    file.write_text("[serve]\nport = \n", encoding="utf-8-sig")
    assert checked(file)[1].startswith(f"simplebus: {file}:2: is no TOML")


def test_all_that_is_wrong_with_users_is_told_at_once(tmp_path: Path) -> None:
    channels = "is a pattern of channels, expected a class: * for all, or '* {}' for these"
    found = told(
        tmp_path,
        """[[users]]
name = "a"
max-connections = "x"
max-byte-rate = "1MB"
[users.permissions]
publish = "#"
subscribe = { deny = ["orders", "eu.>"] }
admin = ["purge", "delete"]
[[users]]
name = "b"
password = 7
[[users]]
name = "c"
""",
    )
    for each, (line, sentence) in zip(
        found,
        [
            (3, "users[0].max-connections: expected a whole number, got a text"),
            (4, "users[0].max-byte-rate: '1MB' is no size; did you mean 1MiB?"),
            (6, f"users[0].permissions.publish: '#' {channels.format('#')}"),
            (7, f"users[0].permissions.subscribe.deny[1]: 'eu.>' {channels.format('eu.>')}"),
            (8, "users[0].permissions.admin[1]: 'delete' is no right, expected one of inquire"),
            (11, "users[1].password: expected a text, got a whole number"),
            (12, "users[2]: user 'c' cannot come in: expected a password"),
        ],
        strict=True,
    ):
        assert each.startswith(f"{line}: {sentence}")


def test_a_certificate_whose_time_is_over_is_a_warning(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("old", later=datetime.timedelta(days=-3))
    pair.key.chmod(0o600)
    file = tmp_path / "bus.toml"
    file.write_text("[tls]\ncert = 'old.pem'\nkey = 'old.key'")
    status, said = checked(file)
    assert status == 0
    assert f"the certificate {pair.cert} has expired: clients that check it stay away" in said


def test_a_data_directory_that_cannot_be_is_told_also_to_root(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text("[serve]\ndata-dir = '/proc/nope'")
    status, said = checked(file)
    assert status == 78
    assert said.startswith(f"simplebus: {file}:2: serve.data-dir: /proc/nope cannot be made: ")
