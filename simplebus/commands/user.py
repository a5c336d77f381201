"""`simplebus user`: changes the users file, atomically.

Secrets are read from the terminal or standard input, because every user can list command lines. The
text of the file that does not concern the changed user is kept unchanged.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from simplebus.config.errors import ConfigError
from simplebus.config.parse import option
from simplebus.console.errors import fail

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help=(
        "Manage the users file of [bold]simplebus serve --users FILE[/bold].\n\n"
        "Permissions and limits are added to the file by hand; a user without permissions may do "
        "everything.\n\n\b\n"
        "  simplebus user add ada\n"
        "  simplebus user add scanner --token\n"
        "  simplebus user rm ada"
    ),
)

_FILE = Path("users.toml")
_HEAD = re.compile(r"^[ \t]*\[\[[ \t]*users[ \t]*\]\][ \t]*(#.*)?$", re.MULTILINE)
_LOCK_TIMEOUT_SECONDS = 30.0
_SECRET_BYTES_MAX = 4096
_TOKEN_BYTES = 32
# OWASP's minimum for argon2: about 30 ms and 19 MiB per check.
_COSTS = (2, 19 * 1024, 1)
"""Rounds, KiB of memory, threads."""

File = Annotated[
    Path,
    option(
        "--users",
        "Users file. It is created if missing, readable for its owner only.",
        metavar="FILE",
        parser=Path,
    ),
]
Name = Annotated[
    str, typer.Argument(metavar="NAME", show_default=False, help="Name of the user in the file.")
]


@app.command(
    help=(
        "Add a user; with --change, replace the secret of an existing user.\n\n"
        "The password is read from the terminal, or from the first line of standard input. With "
        "--token, a token is generated and printed once instead."
    )
)
def add(
    name: Name,
    users: File = _FILE,
    token: Annotated[
        bool, typer.Option("--token", help="Generate a token instead of reading a password.")
    ] = False,
    certificate: Annotated[
        str | None,
        typer.Option(
            "--certificate",
            metavar="NAME",
            show_default=False,
            help="Authenticate the user by a certificate with this name: an email address, a DNS "
            "name, or a subject such as CN=ada,OU=shops. No password is read.",
        ),
    ] = None,
    nkey: Annotated[
        str | None,
        typer.Option(
            "--nkey",
            metavar="KEY",
            show_default=False,
            help="Authenticate a NATS client by this public key, U and 55 more characters. No "
            "password is read.",
        ),
    ] = None,
    change: Annotated[
        bool,
        typer.Option(
            "--change",
            help="Replace all credentials of an existing user. Its permissions and limits stay.",
        ),
    ] = False,
    address: Annotated[
        list[str] | None,
        typer.Option(
            "--address",
            metavar="NETWORK",
            show_default=False,
            help="Treat clients from this network, such as 10.1.0.0/16, as the user if they send "
            "no credentials, which version 1 clients cannot. No password is read.",
        ),
    ] = None,
) -> None:
    _find_user(_read_parts(users), name, users, change=change)  # Before a password is read.
    lines = [f"name = {_text(name)}"]
    new_token = ""
    if token:
        from simplebus.core.users.passwords import hash_token

        new_token = secrets.token_urlsafe(_TOKEN_BYTES)
        lines.append(f"token = {_text(hash_token(new_token))}")
    if certificate is not None:
        lines.append(f"certificate = {_text(certificate)}")
    if nkey is not None:
        lines.append(f"nkey = {_text(nkey)}")
    if address:
        lines.append(f"addresses = [{', '.join(map(_text, address))}]")
    has_password = len(lines) == 1
    _check_user([*lines, 'password = "checked later"'] if has_password else lines)
    if has_password:
        lines.append(f"password = {_text(_hash(_read_password()))}")
    block = "[[users]]\n" + "\n".join(lines) + "\n"
    with _locked_folder(users):
        parts = _read_parts(users)
        index = _find_user(parts, name, users, change=change)
        if index is None:
            before = parts.pop() if len(parts) == 1 and not parts[0] else ""
            gap = "\n" if parts and not parts[-1].endswith("\n\n") and parts[-1].strip() else ""
            parts += [before + gap + block]
        else:
            parts[index] = _replace_secrets(parts[index], lines)
        _write(users, "".join(parts))
    if new_token:
        typer.echo(new_token)
    typer.echo(f"{'added' if index is None else 'changed'} {name} in {users}", err=True)


@app.command("rm", help="Remove a user.")
def remove(name: Name, users: File = _FILE) -> None:
    with _locked_folder(users):
        parts = _read_parts(users)
        index = _user_index(parts, name, users)
        if index is None:
            fail(f"{users}: there is no user {name!r}")
        del parts[index]
        _write(users, "".join(parts))
    typer.echo(f"removed {name} from {users}", err=True)


@app.command("ls", help="List the users, their kinds of credentials, and their permissions.")
def list_users(users: File = _FILE) -> None:
    from simplebus.config.users import read_users_file

    if not users.exists():
        fail(f"{users}: no such file; create it with simplebus user add")
    try:
        configured, warning = read_users_file(users)
    except ConfigError as error:
        fail(str(error))
    if warning:
        typer.echo(f"simplebus: {warning}", err=True)
    for user in configured.users:
        kinds = [
            kind
            for kind, value in (
                ("password", user.password),
                ("token", user.token),
                ("nkey", user.nkey),
                ("certificate", user.certificates),
                ("address", user.addresses),
            )
            if value
        ]
        restricted = user.permissions or user.subject_permissions
        permissions = "everything" if restricted is None else "some"
        typer.echo(f"{user.name}\t{', '.join(kinds) or 'nothing'}\t{permissions}")


def _read_password() -> str:
    """Read a password from the terminal or standard input."""
    try:
        if sys.stdin.isatty():
            password: str = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
        else:
            password = sys.stdin.readline(_SECRET_BYTES_MAX + 2).rstrip("\r\n")
        password.encode()  # Invalid UTF-8 may have been read as surrogates.
    except UnicodeError:
        fail("the password is not valid UTF-8", status=2)
    if not 0 < len(password) <= _SECRET_BYTES_MAX:
        fail(f"a password has 1 to {_SECRET_BYTES_MAX} characters, got {len(password)}", status=2)
    return password


def _hash(password: str) -> str:
    from argon2 import PasswordHasher

    rounds, memory, threads = _COSTS
    hasher = PasswordHasher(time_cost=rounds, memory_cost=memory, parallelism=threads)
    return hasher.hash(password)


@contextlib.contextmanager
def _locked_folder(path: Path) -> Iterator[None]:
    """Lock the file's directory, so that concurrent changes do not undo each other."""
    import fcntl
    import time

    try:
        folder = os.open(Path(os.path.realpath(path)).parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}")
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    fail(f"{path} is locked by another process")
                time.sleep(0.02)
        yield
    finally:
        os.close(folder)


def _text(value: str) -> str:
    """Return a TOML string."""
    import json

    try:
        value.encode()
    except UnicodeEncodeError:
        fail(f"{value!r} is not valid UTF-8", status=2)
    # A JSON string is a TOML string, except for the character DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read_parts(path: Path) -> list[str]:
    """Return the file's text before the first user, then the text of each user.

    Comments directly before a user belong to that user.
    """
    if path.exists() and not path.is_file():
        fail(f"{path} is not a file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return [""]
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        fail(f"{path}: is not TOML: it is not UTF-8")
    user_count = _check(path, text)
    heads = [found.start() for found in _HEAD.finditer(text)]
    if len(heads) != user_count:
        fail(f"{path} has a form that simplebus user cannot change; edit it by hand")
    heads[1:] = [start - _remarks_size(text[:start]) for start in heads[1:]]
    return [text[a:b] for a, b in zip([0, *heads], [*heads, len(text)], strict=True)]


def _remarks_size(text: str) -> int:
    """Return the length of the comments at the end of the text."""
    size = 0
    for line in reversed(text.splitlines(keepends=True)):
        if not line.lstrip().startswith("#"):
            break
        size += len(line)
    return size


def _find_user(parts: list[str], name: str, path: Path, *, change: bool) -> int | None:
    """Return the index of the user's part; exit if it exists without `change` or is missing."""
    index = _user_index(parts, name, path)
    if index is not None and not change:
        fail(f"{path}: user {name!r} exists; replace its secret with --change")
    if index is None and change:
        fail(f"{path}: there is no user {name!r}")
    return index


def _user_index(parts: list[str], name: str, path: Path) -> int | None:
    """Return the index of the user's part, or None."""
    from simplebus.core import toml

    for index, part in enumerate(parts):
        if not _HEAD.search(part):
            continue
        try:
            (user,) = toml.loads(part)["users"]
        except (toml.TOMLDecodeError, ValueError, KeyError):
            fail(f"{path} has a form that simplebus user cannot change; edit it by hand")
        if user.get("name") == name:
            return index
    return None


_REPLACED_KEYS = {"name", "password", "token", "nkey", "certificate", "addresses"}


def _replace_secrets(part: str, lines: list[str]) -> str:
    """Return a user's part with its credentials replaced by `lines`."""
    head = _HEAD.search(part)
    assert head is not None
    entries, tail = _split_entries(part[head.end() :].removeprefix("\n"))
    kept_entries = "".join(text for key, text in entries if key not in _REPLACED_KEYS)
    return part[: head.end()] + "\n" + "\n".join(lines) + "\n" + kept_entries + tail


def _split_entries(text: str) -> tuple[list[tuple[str, str]], str]:
    """Return the keys of a table with their lines, and the text after the table.

    The key of comments is "".
    """
    from simplebus.core import toml

    entries: list[tuple[str, str]] = []
    entry, length = "", 0
    for line in text.splitlines(keepends=True):
        if not entry and line.lstrip().startswith("["):
            break
        length += len(line)
        entry += line
        try:
            keys = toml.loads(entry)
        except toml.TOMLDecodeError:
            continue  # The value has further lines.
        entries.append((next(iter(keys), ""), entry))
        entry = ""
    return [*entries, ("", entry)], text[length:]


def _check(path: Path, text: str) -> int:
    """Return the number of users in the text of a users file; exit if the text is invalid."""
    from simplebus.config.toml_document import parse_document
    from simplebus.config.users import parse_users

    try:
        return len(parse_users(parse_document(text, path)).users)
    except ConfigError as error:
        fail(str(error))


def _check_user(lines: list[str]) -> None:
    """Exit if a line of a user's table is invalid."""
    from simplebus.config.table_reader import TableReader
    from simplebus.config.users import read_users
    from simplebus.core import toml

    reader = TableReader(Path())
    read_users(reader, [toml.loads("\n".join(lines))])
    if errors := reader.errors.messages:
        fail("\n".join(e.removeprefix("users[0]").lstrip(".: ") for e in errors), status=2)


def _copy_ownership(file: int, status: os.stat_result) -> None:
    """Copy owner, group and mode of another file, without the rights of other users.

    Raises:
        OSError: If the owner or group cannot be set.
    """
    os.fchmod(file, 0o600)
    try:
        os.fchown(file, status.st_uid, status.st_gid)
    except PermissionError as error:
        raise OSError(error.errno, "the file belongs to another user or group") from None
    os.fchmod(file, stat.S_IMODE(status.st_mode) & 0o660)


def _line_end(path: Path) -> str:
    """Return the line end that a file uses."""
    try:
        return "\r\n" if b"\r\n" in path.read_bytes() else "\n"
    except OSError:
        return "\n"


def _write(path: Path, text: str) -> None:
    """Replace the file atomically.

    A new file is readable for its owner only; an existing file keeps its owner, group and mode.
    """
    _check(path, text)
    target = Path(os.path.realpath(path))
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with open(handle, "w", encoding="utf-8", newline=_line_end(target)) as file:
            with contextlib.suppress(FileNotFoundError):
                _copy_ownership(file.fileno(), target.stat())
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        fail(f"{path} cannot be written: {error.strerror}")
