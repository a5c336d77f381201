"""Problems that `simplebus check-config` finds in a whole configuration file."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from simplebus.commands.serve.settings import check_file
from tests.config.check_config import check_config
from tests.support.certificates import CertificateAuthority


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[serve]\nport = 4222", "2: serve.port: port 4222 is already used by nats.port"),
        ("[nats]\nport = 8888", "2: nats.port: port 8888 is already used by serve.port"),
        (
            "[serve]\nport = 9\nhttp-port = 9",
            "3: serve.http-port: port 9 is already used by serve.port",
        ),
        (
            "[serve]\nport = 9\nhost = '10.0.0.1'\nhttp-port = 9\nhttp-host = '0.0.0.0'",
            "4: serve.http-port: port 9 is already used by serve.port",
        ),
    ],
)
def test_listeners_need_different_ports(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "bus.toml"
    file.write_text(text)
    assert check_config(file) == (78, f"simplebus: {file}:{problem}\n")


@pytest.mark.parametrize(
    "text",
    [
        "[serve]\nport = 4222\n[nats]\nport = 9",
        "[serve]\nport = 9\nhost = '10.0.0.1'\nhttp-port = 9\nhttp-host = '10.0.0.2'",
        "[serve]\nport = 0\nhttp-port = 0\n[nats]\nport = 0",
    ],
)
def test_listeners_can_share_a_port_on_different_addresses(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bus.toml"
    file.write_text(text)
    assert check_config(file) == (0, f"{file} is valid\n")


def find_problems(tmp_path: Path, text: str) -> list[str]:
    """Return the problems found in a configuration, each with its line number."""
    file = tmp_path / "bus.toml"
    file.write_text(text)
    file.chmod(0o600)
    status, output = check_config(file)
    assert status == 78, output
    return [line.removeprefix(f"simplebus: {file}:") for line in output.splitlines()]


def test_all_errors_of_classes_are_reported(tmp_path: Path) -> None:
    assert find_problems(
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
        "4: classes.orders.max-messages must be at least 1, got 0",
        "5: classes.orders.backoff[1]: -1 is not a time; write seconds such as 10 or 0.5, or a "
        "number with ms, s, min, h or d, such as 5min",
        "6: classes.orders.max-deliveries: it should be 0 or more, got -1",
        "7: classes.orders.subjects[0]: cannot bind the subject: pattern 'a..b': "
        "segment 2 of 3 is empty, expected at least one character in each",
        "7: classes.orders.subjects[2]: cannot bind the subject '$SYS.a': subjects that begin "
        "with $ or _INBOX. are reserved",
        "8: classes.orders.ack-seconds must be above 0 and up to 86400 seconds, got 0",
        "11: classes.other.id: 5 is the id of 'orders' too",
        "12: classes.other.keep-memory: '1MB' is not a size; did you mean 1MiB? write a whole "
        "number of bytes, or a number with KiB, MiB or GiB, such as 64MiB",
        "13: classes.other.max-disk must be at least 1, got 0",
        "15: classes.dead.orders.full: 'Drop_newest' is not one of 'block', 'drop_oldest', "
        "'drop_newest', 'spill'; did you mean 'drop_newest'?",
        "16: classes.dead.orders.last-values has no effect on a class of dead letters: leave it "
        "out",
        "17: classes.a b: 'a b' is not a class; write its id, from 0 to 65535, or its name, 1 to "
        "200 characters without spaces",
        "18: classes.a b.keep-seconds: nan is not a time; write seconds such as 10 or 0.5, or a "
        "number with ms, s, min, h or d, such as 5min",
        "20: classes.values.last-values cannot be combined with the policy spill",
    ]


def test_unknown_words_are_reported_with_suggestions(tmp_path: Path) -> None:
    text = "[serve]\nlog-level = 'INFO'\nfull = 'Blok'\ndurability = 'x'\n[http]\n[log]\n[max]\n"
    assert find_problems(tmp_path, text) == [
        "2: serve.log-level: 'INFO' is not one of 'debug', 'info', 'warning', 'error'; did you "
        "mean 'info'?",
        "3: serve.full: 'Blok' is not one of 'block', 'drop_oldest', 'drop_newest', 'spill'; did "
        "you mean 'block'?",
        "4: serve.durability: 'x' is not one of 'memory', 'os', 'disk'",
        "5: 'http' is unknown; did you mean 'http-port' or 'http-host' or 'http-name' in [serve]?",
        "6: 'log' is unknown; did you mean 'log-level' or 'log-format' in [serve]?",
        "7: 'max' is unknown; there are bridges, classes, nats, serve, tls, users",
    ]


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    users = tmp_path / "users.toml"
    users.write_text("[[users]]\nname = 'ada'\ntoken = 'abc'\n", encoding="utf-8-sig")
    users.chmod(0o600)
    file = tmp_path / "bus.toml"
    file.write_text("[serve]\nusers = 'users.toml'\n", encoding="utf-8-sig")
    assert check_config(file) == (0, f"{file} is valid\n")
    file.write_text("[serve]\nport = \n", encoding="utf-8-sig")
    assert check_config(file)[1].startswith(f"simplebus: {file}:2: is not TOML")


def test_requirements_of_class_settings_are_reported_at_the_class(tmp_path: Path) -> None:
    expected_problem = "spill keeps on disk what does not fit into memory: it needs serve.data-dir"
    text = "[serve]\nfull = 'spill'\n[classes.a]\nfull = 'spill'\nmax-messages = 0\n"
    assert find_problems(tmp_path, text + "[classes.b]\nfull = 'spill'\n") == [
        f"2: serve.full: {expected_problem}",
        f"4: classes.a.full: {expected_problem}",
        "5: classes.a.max-messages must be at least 1, got 0",
        f"7: classes.b.full: {expected_problem}",
    ]


def test_settings_unsupported_by_a_cluster_are_reported(tmp_path: Path) -> None:
    expected_problem = "cannot be combined with serve.engine, which stores messages in the cluster"
    assert find_problems(
        tmp_path,
        """[serve]
engine = "nats://127.0.0.1:1"
last-values = "a"
full = "drop_oldest"
keep-seconds = "1h"
data-dir = "kept"
[classes.x]
keep-messages = 5
last-values = true
""",
    ) == [
        f"3: serve.last-values {expected_problem}",
        "4: serve.full: a JetStream cluster supports only block, got drop_oldest",
        "5: serve.keep-seconds: a JetStream cluster does not keep acknowledged messages",
        f"6: serve.data-dir {expected_problem}",
        "8: classes.x.keep-messages: a JetStream cluster does not keep acknowledged messages",
        "9: classes.x.last-values: a JetStream cluster does not keep last values",
    ]


def test_limit_without_effect_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text("[classes.a]\nmax-disk = '1GiB'\n")
    warning = f"{file}:2: classes.a.max-disk has no effect: the class does not spill"
    assert check_config(file) == (0, f"simplebus: {warning}\n{file} is valid\n")
    file.write_text("[serve]\nfull = 'spill'\ndata-dir = 'kept'\n[classes.a]\nmax-disk = '1GiB'\n")
    assert check_config(file) == (0, f"{file} is valid\n")


@pytest.mark.parametrize(
    ("key", "expected_problem"),
    [
        ("bind = [1.5]", "serve.bind[0]: expected a text, got 1.5"),
        ("last-values = 1.5", "serve.last-values: expected a text, got 1.5"),
        ("users = 7", "serve.users: expected a text, got 7"),
        (r'users = "\u0000"', r"serve.users: '\x00' is not a path: it contains a zero byte"),
        ("max-class-memory = 1", "serve.max-class-memory must be from 262144 to 1073741824, got 1"),
        (
            "engine = 'nats://h'\nengine-storage = 'tape'",
            "serve.engine-storage must be file or memory, got 'tape'",
        ),
    ],
)
def test_values_of_wrong_type_are_reported(tmp_path: Path, key: str, expected_problem: str) -> None:
    assert find_problems(tmp_path, f"[serve]\n{key}\n") == [
        f"{1 + len(key.splitlines())}: {expected_problem}"
    ]


def test_unreadable_files_are_reported_by_key(tmp_path: Path) -> None:
    text = "[tls]\ncert = 'one.pem'\nkey = 'one.pem'\nca = 'one.pem'\nverify = 'yes'\n"
    pem_file = tmp_path / "one.pem"
    assert find_problems(tmp_path, text + "[serve]\nusers = 'none.toml'\nport = 'x'\n") == [
        f"2: tls.cert: the certificate {pem_file} cannot be read: No such file or directory",
        f"3: tls.key: the key {pem_file} cannot be read: No such file or directory",
        f"4: tls.ca: the CA certificate {pem_file} cannot be read: No such file or directory",
        "5: tls.verify: expected true or false, got 'yes'",
        f"7: serve.users: {tmp_path / 'none.toml'} cannot be read: No such file or directory",
        "8: serve.port: 'x' is not a port; expected a number from 0 to 65535",
    ]


def test_errors_in_users_file_name_both_files(tmp_path: Path) -> None:
    users = tmp_path / "users.toml"
    users.write_text("[[users]]\nname = 'a'\n")
    expected_problem = (
        "users[0]: user 'a' cannot authenticate: expected a password, token, nkey, certificate or"
    )
    [problem] = find_problems(tmp_path, "[serve]\nusers = 'users.toml'\n")
    assert problem.startswith(f"2: serve.users: {users}:1: {expected_problem}")


def test_all_errors_of_bridges_and_nats_users_are_reported(
    tmp_path: Path,
) -> None:
    found = find_problems(
        tmp_path,
        """[[bridges]]
name = "a"
to = "simplebus://h:port"
classes = ["a b", 70000]
[[bridges]]
name = "b"
[[nats.users]]
user = 1
[[nats.users]]
user = "x"
permissions = { publish = ["a..b"] }
[[nats.users]]
""",
    )
    for each, expected_problem in zip(
        [each for each in found if "is deprecated" not in each],
        [
            "3: bridges[0].to: 'simplebus://h:port' is not a server address",
            "4: bridges[0].classes[0]: 'a b' is not a class",
            "4: bridges[0].classes[1]: a class id is from 0 to 65535, got 70000",
            "5: bridges[1]: 'to' is missing, or 'from'",
            "8: nats.users[0].user: expected a text",
            "11: nats.users[1].permissions.publish[0]: 'a..b' is not a pattern",
            "12: nats.users[2]: expected 'user' or 'nkey'",
        ],
        strict=True,
    ):
        assert each.startswith(expected_problem)


def test_all_errors_of_users_are_reported(tmp_path: Path) -> None:
    channels = "is a pattern of channels, expected a class: * for all, or '* {}' for these"
    found = find_problems(
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
    for each, (line, expected_problem) in zip(
        found,
        [
            (3, "users[0].max-connections: it should be a valid integer, got 'x'"),
            (4, "users[0].max-byte-rate: '1MB' is not a size; did you mean 1MiB?"),
            (6, f"users[0].permissions.publish: '#' {channels.format('#')}"),
            (7, f"users[0].permissions.subscribe.deny[1]: 'eu.>' {channels.format('eu.>')}"),
            (8, "users[0].permissions.admin[1]: 'delete' is not a right, expected one of inquire"),
            (11, "users[1].password: expected a text, got a number"),
            (12, "users[2]: user 'c' cannot authenticate: expected a password"),
        ],
        strict=True,
    ):
        assert each.startswith(f"{line}: {expected_problem}")


def test_errors_of_one_user_do_not_hide_each_other(tmp_path: Path) -> None:
    assert find_problems(
        tmp_path,
        """[[users]]
name = 3
token = "sha256:x"
max-connections = -1
max-message-rate = inf
max_classes = 1
max-classes = 2
[users.permissions]
admn = "purge"
[users.nats]
subscribe = ["a..b", "c..d"]
allow_responses = { expires = nan }
[[users]]
name = "a"
token = "t"
addresses = "10.0.0.0/8"
[[users]]
name = "b"
token = "t"
addresses = ["10.1.0.0/8"]
""",
    ) == [
        "2: users[0].name: expected a text, got 3",
        "3: users[0].token: expected 64 hexadecimal digits after sha256:",
        "4: users[0].max-connections: it should be 0 or more, got -1",
        "5: users[0].max-message-rate: it should be a number of 0 or more, got inf",
        "6: users[0]: 'max_classes' and 'max-classes' are the same, expected either",
        "9: users[0].permissions: 'admn' is unknown; did you mean 'admin'?",
        "11: users[0].nats.subscribe[0]: 'a..b' is not a pattern, expected a subject, or a "
        "subject and a queue",
        "11: users[0].nats.subscribe[1]: 'c..d' is not a pattern, expected a subject, or a "
        "subject and a queue",
        "12: users[0].nats.allow_responses.expires: expected a finite number of seconds, got nan",
        "19: users[2].token: user 'a' has the same token",
        "20: users[2].addresses: user 'a' has the same network",
    ]


def test_each_element_of_a_list_is_checked(tmp_path: Path) -> None:
    text = "[serve]\nhost = [1, '::1', '']\nlast-values = [99999, -1, 'state']"
    assert find_problems(tmp_path, text) == [
        "2: serve.host[0]: expected a text, got 1",
        "2: serve.host[2]: '' is not an address; expected an address to listen on, such as "
        "0.0.0.0 or :: for all addresses of this machine",
        "3: serve.last-values[0]: a class id is from 0 to 65535, got 99999",
        "3: serve.last-values[1]: a class id is from 0 to 65535, got -1",
    ]


@pytest.mark.parametrize("key", ["port", "max-memory", "tick"])
def test_long_value_is_shortened(tmp_path: Path, key: str) -> None:
    (problem,) = find_problems(tmp_path, f"[serve]\n{key} = '{'9' * 5000}x'")
    assert problem.startswith(f"2: serve.{key}: '9999")
    assert len(problem) < 600


def test_number_of_further_errors_is_reported(tmp_path: Path) -> None:
    text = "[tls]\n" + "".join(f"x{number} = 1\n" for number in range(103))
    problems = find_problems(tmp_path, text)
    assert len(problems) == 101
    assert problems[-1].endswith("there are 3 more errors")


def test_table_in_a_wrong_place_is_named(tmp_path: Path) -> None:
    assert find_problems(tmp_path, "[serve.tls]\ncert = 'a'\n") == [
        "1: serve: 'tls' is unknown; did you mean the table [tls]?"
    ]


def test_bridges_are_checked_independently(tmp_path: Path) -> None:
    bridge = "[[bridges]]\nname = 'b'\nto = 'simplebus://h'\nclasses = ['a']\n"
    assert find_problems(tmp_path, f"{bridge}hops = -1\n{bridge}heartbeat = 'x'\n") == [
        "5: bridges[0].hops: it should be 0 or more, got -1",
        "7: bridges[1].name: there is another bridge 'b'",
        "10: bridges[1].heartbeat: 'x' is not a time; write seconds such as 10 or 0.5, or a number "
        "with ms, s, min, h or d, such as 5min",
    ]


def test_unknown_key_of_an_inner_table_gets_the_names_of_that_table(tmp_path: Path) -> None:
    text = "[[bridges]]\nname = 'b'\nto = 'simplebus://h'\nclasses = ['a']\n"
    assert find_problems(tmp_path, f"{text}[bridges.target]\ntokn = 'x'\n") == [
        "6: bridges[0].target: 'tokn' is unknown; did you mean 'token'?"
    ]


def test_expired_certificate_is_a_warning(tmp_path: Path) -> None:
    pair = CertificateAuthority(tmp_path).issue("old", shift=datetime.timedelta(days=-3))
    pair.key.chmod(0o600)
    file = tmp_path / "bus.toml"
    file.write_text("[tls]\ncert = 'old.pem'\nkey = 'old.key'")
    status, output = check_config(file)
    assert status == 0
    assert (
        f"the certificate {pair.cert} has expired: clients that verify it will not connect"
        in output
    )


def test_user_without_requested_credentials_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    expected = "user 'a' and 1 more can authenticate by certificate only, and no listener asks for"
    file.write_text(
        '[[users]]\nname = "a"\ncertificate = "CN=a"\n'
        '[[users]]\nname = "b"\ncertificate = "CN=b"\n'
        '[[users]]\nname = "c"\ncertificate = "CN=c"\naddresses = "10.0.0.0/8"\n'
    )
    status, expected_warning = check_config(file)
    assert status == 0
    assert expected in expected_warning


def test_impossible_data_directory_is_reported_also_to_root(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text("[serve]\ndata-dir = '/proc/nope'")
    status, output = check_config(file)
    assert status == 78
    assert output.startswith(f"simplebus: {file}:2: serve.data-dir: cannot create /proc/nope: ")


def test_former_names_of_a_bridge_are_warnings_with_lines(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    bridge = "[[bridges]]\nname = 'a'\nto = 'simplebuss://h'\nclasses = ['x']\n"
    text = bridge + "[bridges.{}]\nca = 'a.pem'\n"
    file.write_text(text.format("far"))
    warning = f"{file}:5: bridges[0].far is deprecated: use bridges[0].target"
    assert check_config(file) == (0, f"simplebus: {warning}\n{file} is valid\n")
    file.write_text(text.format("target"))
    assert check_config(file) == (0, f"{file} is valid\n")


def test_deprecated_variables_are_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bus.toml"
    file.write_text("")
    monkeypatch.setenv("SIMPLEBUS_NATS_TOKEN", "secret")
    warnings, errors = check_file(str(file))
    assert warnings == (
        "SIMPLEBUS_NATS_TOKEN is deprecated; write [[users]] in the configuration file instead",
    )
    assert errors == ()
