"""Users files: the commands that change them, and their tables."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simplebus.cli import app
from simplebus.client.credentials import CREDENTIALS_VARIABLE, ENVIRONMENT_VARIABLES, Access
from simplebus.commands.client_options import with_client_options
from simplebus.commands.serve.command import parse_arguments
from simplebus.commands.serve.settings import build_plan
from simplebus.config.errors import ConfigError
from simplebus.config.table_reader import TableReader
from simplebus.config.users import ConfiguredUsers, merge_users, read_users, read_users_file
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import (
    AdminRight,
    PermissionRule,
    PermissionRules,
    Permissions,
)
from simplebus.core.users.subject_permissions import SubjectPermissions
from simplebus.server.preauth.address_limits import AddressLimits, KeyedTokenBuckets, is_loopback
from simplebus.server.preauth.auth_worker import verify_password
from tests.support.programs import running_program


def parse_users(tables: Any) -> ConfiguredUsers:
    """Return the users of parsed tables. Raises ConfigError with all errors."""
    reader = TableReader(Path())
    users = read_users(reader, tables)
    reader.errors.raise_if_any()
    return users


def run(*words: str, stdin: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, ["user", *words], input=stdin)
    return result.exit_code, result.output


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "users.toml"


def test_user_is_added_changed_listed_and_removed(file: Path) -> None:
    users_option = ("--users", str(file))
    assert run("add", "ada", *users_option, stdin="first\n") == (0, f"added ada in {file}\n")
    status, token = run("add", "scan", *users_option, "--token")
    assert status == 0
    assert run("add", "old", *users_option, "--address", "10.0.0.0/8")[0] == 0
    assert run("add", "cert", *users_option, "--certificate", "CN=cert")[0] == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = {user.name: user for user in read_users_file(file)[0].users}
    assert list(found) == ["ada", "scan", "old", "cert"]
    assert verify_password(found["ada"].password, "first")
    assert not verify_password(found["ada"].password, "second")
    assert found["scan"].token == hash_token(token.splitlines()[0])
    assert found["old"].addresses == ("10.0.0.0/8",)
    assert found["cert"].certificates == ("CN=cert",)
    assert run("add", "ada", *users_option, stdin="second\n") == (
        1,
        f"simplebus: {file}: user 'ada' exists; replace its secret with --change\n",
    )
    assert verify_password(read_users_file(file)[0].users[0].password, "first")
    changed = run("add", "ada", *users_option, "--change", stdin="second\n")
    assert changed == (0, f"changed ada in {file}\n")
    assert run("add", "eve", *users_option, "--change", stdin="x\n")[0] == 1
    assert verify_password(read_users_file(file)[0].users[0].password, "second")
    listed = run("ls", *users_option)[1].splitlines()
    assert listed[:2] == ["ada\tpassword\teverything", "scan\ttoken\teverything"]
    assert run("rm", "ada", *users_option) == (0, f"removed ada from {file}\n")
    assert run("rm", "ada", *users_option) == (1, f"simplebus: {file}: there is no user 'ada'\n")
    assert [user.name for user in read_users_file(file)[0].users] == ["scan", "old", "cert"]


def test_file_mode_is_kept_without_access_for_others(file: Path) -> None:
    file.write_text("")
    groups = [group_id for group_id in os.getgroups() if group_id != os.getgid()]
    if os.geteuid() == 0 or groups:
        os.chown(file, -1, groups[0] if groups else 20)
    group = file.stat().st_gid
    for before, after in ((0o640, 0o640), (0o664, 0o660), (0o600, 0o600)):
        file.chmod(before)
        words = ("--users", str(file), "--address", f"10.{before % 256}.0.0/16")
        assert run("add", f"u{before}", *words)[0] == 0
        found = file.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (after, group)


def test_concurrent_changes_are_all_kept(file: Path) -> None:
    with contextlib.ExitStack() as stack:
        at_once = [
            stack.enter_context(
                running_program("user", "add", name, "--users", str(file), "--address", address)
            )
            for name, address in (("a", "10.1.0.0/16"), ("b", "10.2.0.0/16"), ("c", "10.3.0.0/16"))
        ]
        assert [each.wait()[0] for each in at_once] == [0, 0, 0]
    assert {user.name for user in read_users_file(file)[0].users} == {"a", "b", "c"}


def test_unrelated_text_stays_unchanged(file: Path) -> None:
    text = (
        "# Ours.\n\n[[users]]\nname = 'a'   # the first\ntoken = 't'\nmax-connections = 3\n\n"
        "[users.permissions]\npublish = ['orders eu.#']\n# The end.\n\n"
        "[[users]]\nname = 'b'\ntoken = 'u'\n"
    )
    file.write_text(text)
    assert run("add", "b", "--change", "--users", str(file), stdin="x\n")[0] == 0
    assert file.read_text().startswith(text[: text.index("[[users]]\nname = 'b'")])
    assert run("add", "a", "--change", "--users", str(file), stdin="x\n")[0] == 0
    after = file.read_text()
    assert "max-connections = 3\n\n[users.permissions]\npublish = ['orders eu.#']" in after
    assert "token = 't'" not in after
    assert run("rm", "b", "--users", str(file))[0] == 0
    assert [user.name for user in read_users_file(file)[0].users] == ["a"]


NKEY = "UB43KVROR7TFJ6KAPCYRF2FJROTZAH4FHLTJLPWX4DRZCC5NASLGJBFE"


def test_nkey_is_added_and_checked(file: Path) -> None:
    assert run("add", "shop", "--nkey", NKEY, "--users", str(file))[0] == 0
    (user,) = read_users_file(file)[0].users
    assert (user.name, user.nkey, user.password) == ("shop", NKEY, "")
    status, output = run("add", "other", "--nkey", "SUABCD", "--users", str(file))
    assert status != 0
    assert "a seed begins with S" in output
    assert [user.name for user in read_users_file(file)[0].users] == ["shop"]


def test_new_secret_replaces_all_secrets(file: Path) -> None:
    other_settings = "max-connections = 3\n[users.permissions]\npublish = [\n  'orders',\n]\n"
    file.write_text(
        f"[[users]]\nname = 'a'\n'nkey' = '{NKEY}'\ntoken = \"\"\"t\"\"\"\npassword = 'p'\n"
        "addresses = [  # Here,\n  '10.0.0.0/8',\n\n  # and there.\n  '::/0',\n]\n"
        f"certificate = 'CN=a'\n{other_settings}"
    )
    assert run("add", "a", "--change", "--users", str(file), stdin="new\n")[0] == 0
    (found,) = read_users_file(file)[0].users
    assert verify_password(found.password, "new")
    shown = (found.nkey, found.token, found.certificates, found.addresses)
    assert shown == ("", "", (), ())
    assert file.read_text().endswith(other_settings)
    assert "10.0.0.0" not in file.read_text()


def test_comment_before_user_belongs_to_user(file: Path) -> None:
    file.write_text(
        "# All of them.\n\n[[users]]\nname = 'a'\ntoken = 't'\n"
        "# b stays,\n# whatever comes.\n[[users]]\nname = 'b'\ntoken = 'u'\n"
    )
    assert run("rm", "a", "--users", str(file))[0] == 0
    begins = "# All of them.\n\n# b stays,\n# whatever comes.\n[[users]]\nname = "
    assert file.read_text().startswith(begins)
    assert run("add", "b", "--change", "--users", str(file), stdin="x\n")[0] == 0
    assert file.read_text().startswith(begins)


@pytest.mark.parametrize("name", ["\U0001f600", "zoë", 'a"b\\c'])
def test_names_can_have_any_letters(file: Path, name: str) -> None:
    users_option = ("--users", str(file))
    assert run("add", name, *users_option, "--token")[0] == 0
    assert run("add", name, *users_option, "--change", "--token")[0] == 0
    assert [user.name for user in read_users_file(file)[0].users] == [name]
    assert run("rm", name, *users_option)[0] == 0


def test_undecodable_names_are_rejected(file: Path) -> None:
    assert run("add", "a\udcff", "--users", str(file), "--token")[0] == 2
    assert not file.exists()


def test_byte_order_mark_and_crlf_are_accepted(file: Path) -> None:
    text = "[[users]]\r\nname = 'a'\r\ntoken = 't'\r\n"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert run("add", "b", "--users", str(file), "--address", "10.0.0.0/8")[0] == 0
    after = file.read_bytes()
    assert after.startswith(text.encode())
    assert after.count(b"\n") == after.count(b"\r\n") == 7
    assert [user.name for user in read_users_file(file)[0].users] == ["a", "b"]


def test_invalid_file_stays_unchanged(file: Path) -> None:
    file.write_text("[[users]]\nname = 'a'\nbad = 1\n")
    status, output = run("add", "b", "--users", str(file), stdin="x\n")
    assert status == 1
    assert "users[0]: 'bad' is unknown; did you mean" in output or "'bad' is unknown" in output
    assert "bad = 1" in file.read_text()
    assert [path.name for path in file.parent.iterdir()] == ["users.toml"]


def test_empty_list_allows_no_subject(file: Path) -> None:
    file.write_text('[[users]]\nname = "a"\ntoken = "t"\n[users.nats]\npublish = []\n')
    (user,) = read_users_file(file)[0].users
    assert user.subject_permissions == SubjectPermissions(publish_allow=())


def test_device_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert run("add", "ada", "--users", str(pipe), stdin="x\n") == (
        1,
        f"simplebus: {pipe} is not a file\n",
    )
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize(
    "text",
    ['users = [{ name = "ada", token = "t" }]\n', '[["users"]]\nname = "ada"\ntoken = "t"\n'],
)
def test_users_of_another_form_are_not_overlooked(file: Path, text: str) -> None:
    file.write_text(text)
    sentence = f"simplebus: {file} has a form that simplebus user cannot change; edit it by hand\n"
    for words in (["rm", "ada"], ["add", "ada"], ["add", "grace"]):
        assert run(*words, "--users", str(file), stdin="x\n") == (1, sentence)
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["", "--token"], "name: a user name has 1 to 200 printable characters, got ''"),
        (["ada", "--nkey", ""], "user 'ada' cannot authenticate: expected a password, token"),
        (["ada", "--certificate", ""], "certificate: '' is not a name"),
        (["ada", "--address", "300.0.0.1"], "addresses[0]: '300.0.0.1' does not appear"),
    ],
)
def test_invalid_user_is_described_without_a_line(
    file: Path, words: list[str], sentence: str
) -> None:
    status, output = run("add", *words, "--users", str(file))
    assert status == 2
    assert output.startswith(f"simplebus: {sentence}")
    assert not file.exists()


def test_empty_password_is_rejected(file: Path) -> None:
    assert run("add", "a", "--users", str(file), stdin="\n")[0] == 2
    assert not file.exists()


def test_secrets_are_not_command_line_arguments() -> None:
    for command in ("add", "rm", "ls"):
        text = CliRunner().invoke(app, ["user", command, "--help"], terminal_width=200).output
        assert "--password" not in text


def test_permissions_table_limits_users() -> None:
    found = parse_users(
        [
            {
                "name": "till",
                "token": "t",
                "max-connections": 3,
                "permissions": {
                    "publish": {"allow": ["orders eu.#", "7"], "deny": "orders eu.test"},
                    "subscribe": "orders",
                    "admin": ["inquire", "purge dead.*"],
                    "wildcards": False,
                },
                "nats": {"publish": "metrics.>"},
            },
            {"name": "ada", "password": "x"},
        ]
    )
    till, ada = found.users
    assert till.connections == 3
    assert till.permissions == Permissions(
        PermissionRules(
            (PermissionRule("orders", "eu.#"), PermissionRule("7")),
            (PermissionRule("orders", "eu.test"),),
        ),
        PermissionRules((PermissionRule("orders"),)),
        ((AdminRight.INQUIRE, "*"), (AdminRight.PURGE, "dead.*")),
        wildcards=False,
    )
    assert till.subject_permissions == SubjectPermissions(publish_allow=("metrics.>",))
    assert ada.permissions is None


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({}, "users[0]: 'name' is missing"),
        ({"name": "a", "permissions": {"publish": ["a..b c..d"]}}, "users[0].permissions.publish"),
        ({"name": "a", "permissions": {"admin": "delete"}}, "users[0].permissions.admin: 'delete'"),
        ({"name": "a", "addresses": "10.0.0.300"}, "users[0].addresses: '10.0.0.300'"),
        ({"name": "a", "nkey": "U"}, "users[0].nkey: nkey 'U'"),
        ({"name": "a", "nkey": "SUABCD"}, "users[0].nkey: nkey: a seed begins with S"),
        ({"name": "a", "nats": {"publish": "a..b"}}, "users[0].nats.publish: 'a..b'"),
        ({"name": 7}, "users[0].name: expected a text"),
    ],
)
def test_invalid_permissions_print_one_sentence(table: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_users([table])
    assert sentence in str(caught.value)


MANY = """[[users]]
name = "a"
password = "$argon2id$broken"
addresses = ["10.0.0.0/33"]
[users.permissions]
publish = ["or ders eu..x"]
admin = ["purg"]

[[users]]
nam = "b"
token = "sha256:xyz"

[[users]]
name = "a"
token = "t"

[[users]]
name = "nobody"
"""


def test_all_errors_of_users_file_are_reported_with_lines(file: Path) -> None:
    file.write_text(MANY)
    with pytest.raises(ConfigError) as caught:
        read_users_file(file)
    beginnings = [
        (3, "users[0].password: begins with $argon2 but is not a hash"),
        (4, "users[0].addresses[0]: '10.0.0.0/33' does not appear to be"),
        (6, "users[0].permissions.publish[0]: pattern "),
        (7, "users[0].permissions.admin[0]: 'purg' is not a right"),
        (9, "users[1]: 'name' is missing"),
        (10, "users[1]: 'nam' is unknown; did you mean 'name'?"),
        (11, "users[1].token: expected 64 hexadecimal digits"),
        (14, "users[2].name: there is another user 'a'"),
        (17, "users[3]: user 'nobody' cannot authenticate: expected a password, token, nkey,"),
    ]
    for message, (line, sentence) in zip(caught.value.messages, beginnings, strict=True):
        assert message.startswith(f"{file}:{line}: {sentence}"), message
    file.write_text("x = 1\n[[users]\n")
    with pytest.raises(ConfigError, match=r"users.toml:2: is not TOML: "):
        read_users_file(file)


def test_file_readable_by_others_is_reported(file: Path) -> None:
    file.write_text("[[users]]\nname = 'a'\ntoken = 't'\n")
    file.chmod(0o644)
    assert "every user may read it" in read_users_file(file)[1]
    file.chmod(0o640)  # A group of its own, as the unit has it.
    assert read_users_file(file)[1] == ""


def test_token_bucket_starts_full_and_refills() -> None:
    buckets = KeyedTokenBuckets(2, 0.5)
    assert [buckets.take_token("a", 0.0) for _ in range(3)] == [True, True, False]
    assert buckets.take_token("b", 0.0)
    assert not buckets.take_token("a", 1.0)
    assert buckets.take_token("a", 2.1)
    buckets.remove_full(100.0)
    assert len(buckets) == 0


def test_connections_are_counted_per_address() -> None:
    addresses = AddressLimits(2)
    assert addresses.register_connection("a", 0.0) is None
    assert addresses.register_connection("a", 0.0) is None
    assert addresses.register_connection("a", 0.0) is not None
    assert addresses.register_connection("b", 0.0) is None
    addresses.remove_connection("a")
    assert addresses.register_connection("a", 0.0) is None
    rates = AddressLimits(0, 0.1)
    assert rates.register_connection("a", 0.0) is None
    assert rates.register_connection("a", 0.0) is not None
    assert rates.register_connection("a", 20.0) is None


def test_loopback_hosts_are_recognized() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "bus.example", "10.0.0.1")))


def test_credential_options_override_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*ENVIRONMENT_VARIABLES.values(), CREDENTIALS_VARIABLE):
        monkeypatch.setenv(name, "")
    found: list[Access] = []

    def command() -> None:
        found.append(Access.from_environment())

    monkeypatch.setenv("SIMPLEBUS_PASSWORD", "x")
    files = {name: file.with_name(f"{name}.pem") for name in ("ca", "cert", "key")}
    options = {f"tls_{name}": path for name, path in files.items()}
    with_client_options(command)(user="ada", credentials=None, **options)
    shown = {name: str(path) for name, path in files.items()}
    assert found == [Access(user="ada", password="x", **shown)]


def test_users_file_without_users_admits_nobody(file: Path) -> None:
    file.write_text("# Nobody yet.\n")
    found, warning = read_users_file(file)
    assert warning == f"{file} has no users: no client can connect"
    assert found.to_users() is not None
    assert merge_users([found, ConfiguredUsers()]).to_users() is not None
    assert merge_users([ConfiguredUsers()]).to_users() is None
    assert parse_users([]).to_users() is not None


@pytest.mark.parametrize(
    ("text", "is_open"), [("", True), ("[serve]\nport = 1\n", True), ("users = []\n", False)]
)
def test_configuration_without_users_admits_everybody(
    text: str, is_open: bool, tmp_path: Path
) -> None:
    config = tmp_path / "bus.toml"
    config.write_text(text)
    plan = build_plan(parse_arguments(["--config", str(config)]))
    assert (plan.options.users is None) is is_open


def test_undecodable_password_is_rejected(file: Path) -> None:
    result = CliRunner().invoke(app, ["user", "add", "ada", "--users", str(file)], input=b"p\xff\n")
    assert result.exit_code == 2
    assert "the password is not valid UTF-8" in result.output
    assert not file.exists()


def test_invalid_name_is_reported_once(file: Path) -> None:
    file.write_text('[[users]]\nname = ""\npassword = "x"\ntoken = "y"\naddresses = "10.0.0.0/8"\n')
    status, output = run("ls", "--users", str(file))
    assert status == 1
    assert output.count("a user name has 1 to 200 printable characters") == 1
    assert f"{file}:2: users[0].name: " in output
