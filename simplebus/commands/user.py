"""The commands about users: a file of [[users]], written anew as a whole or not at all.

Rule 1: a secret is asked for on the terminal or read from standard input. It is never an argument,
which whoever lists processes would read, and never shown again.
Rule 2: what is not about the user that is changed stays as it stands in the file, to the letter.
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

from simplebus.config.mistakes import ConfigError
from simplebus.config.parse import option
from simplebus.console.errors import fail

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help=(
        "Who may connect: users in a file, for [bold]simplebus serve --users FILE[/bold].\n\n"
        "What each may do is written there by hand, as tables of its own; without, a user may do "
        "everything.\n\n\b\n"
        "  simplebus user add ada\n"
        "  simplebus user add scanner --token\n"
        "  simplebus user rm ada"
    ),
)

_FILE = Path("users.toml")
_HEAD = re.compile(r"^[ \t]*\[\[[ \t]*users[ \t]*\]\][ \t]*(#.*)?$", re.MULTILINE)
_PATIENCE_SECONDS = 30.0
_SECRET_BYTES_MAX = 4096
_TOKEN_BYTES = 32
# What OWASP asks for at least: about 30 ms, and 19 MiB for one check at a time.
_COSTS = (2, 19 * 1024, 1)
"""Rounds, KiB of memory, threads."""

File = Annotated[
    Path,
    option(
        "--users",
        "The file. It is made if it is not there, for its owner alone.",
        metavar="FILE",
        parser=Path,
    ),
]
Name = Annotated[
    str, typer.Argument(metavar="NAME", show_default=False, help="What the user is called.")
]


@app.command(
    help=(
        "Add a user; with --change, give one that is there another secret.\n\n"
        "The password is asked for on the terminal; where there is none, it is the first line of "
        "standard input. With --token there is no password: a token is made and printed, once."
    )
)
def add(
    name: Name,
    users: File = _FILE,
    token: Annotated[
        bool, typer.Option("--token", help="Make a token instead of asking for a password.")
    ] = False,
    certificate: Annotated[
        str,
        typer.Option(
            "--certificate",
            metavar="NAME",
            show_default=False,
            help="Whoever shows a certificate with this name is the user: an email address, a DNS "
            "name, or a subject such as CN=ada,OU=shops. No password is asked for.",
        ),
    ] = "",
    change: Annotated[
        bool,
        typer.Option(
            "--change",
            help="Give a user that is there another secret, in place of those it has. What it may "
            "do stays.",
        ),
    ] = False,
    address: Annotated[
        list[str] | None,
        typer.Option(
            "--address",
            metavar="NETWORK",
            show_default=False,
            help="Whoever comes from there, such as 10.1.0.0/16, and does not say who it is is the "
            "user: clients of version 1 cannot. No password is asked for.",
        ),
    ] = None,
) -> None:
    _found(_parts(users), name, users, change=change)  # Before anything is asked for.
    lines = [f"name = {_text(name)}"]
    made = ""
    if token:
        from simplebus.core.users.passwords import hash_token

        made = secrets.token_urlsafe(_TOKEN_BYTES)
        lines.append(f"token = {_text(hash_token(made))}")
    elif not (certificate or address):
        lines.append(f"password = {_text(_hash(_asked_for()))}")
    if certificate:
        lines.append(f"certificate = {_text(certificate)}")
    if address:
        lines.append(f"addresses = [{', '.join(map(_text, address))}]")
    block = "[[users]]\n" + "\n".join(lines) + "\n"
    with _alone(users):
        parts = _parts(users)
        at = _found(parts, name, users, change=change)
        if at is None:
            before = parts.pop() if len(parts) == 1 and not parts[0] else ""
            gap = "\n" if parts and not parts[-1].endswith("\n\n") and parts[-1].strip() else ""
            parts += [before + gap + block]
        else:
            parts[at] = _with_secrets(parts[at], lines)
        _write(users, "".join(parts))
    if made:
        typer.echo(made)
    typer.echo(f"{name} is {'added' if at is None else 'changed'} in {users}", err=True)


@app.command("rm", help="Take a user away.")
def remove(name: Name, users: File = _FILE) -> None:
    with _alone(users):
        parts = _parts(users)
        at = _place(parts, name, users)
        if at is None:
            fail(f"{users}: there is no user {name!r}")
        del parts[at]
        _write(users, "".join(parts))
    typer.echo(f"{name} is taken out of {users}", err=True)


@app.command("ls", help="List the users, how each shows who it is, and whether it is restricted.")
def list_users(users: File = _FILE) -> None:
    from simplebus.config.users import read_users

    if not users.exists():
        fail(f"{users}: there is no such file; simplebus user add makes it")
    try:
        found, warning = read_users(users)
    except ConfigError as error:
        fail(str(error))
    if warning:
        typer.echo(f"simplebus: {warning}", err=True)
    for user in found.users:
        shows = [
            what
            for what, there in (
                ("password", user.password),
                ("token", user.token),
                ("nkey", user.nkey),
                ("certificate", user.certificates),
                ("address", user.addresses),
            )
            if there
        ]
        may = "everything" if user.permissions is None else "some"
        typer.echo(f"{user.name}\t{', '.join(shows) or 'nothing'}\t{may}")


def _asked_for() -> str:
    """A password, from the terminal or standard input."""
    try:
        if sys.stdin.isatty():
            said: str = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
        else:
            said = sys.stdin.readline(_SECRET_BYTES_MAX + 2).rstrip("\r\n")
        said.encode()  # What is no text may have been read as halves of characters.
    except UnicodeError:
        fail("a password is text in UTF-8, and this is none", status=2)
    if not 0 < len(said) <= _SECRET_BYTES_MAX:
        fail(f"a password has 1 to {_SECRET_BYTES_MAX} characters, got {len(said)}", status=2)
    return said


def _hash(password: str) -> str:
    from argon2 import PasswordHasher

    rounds, memory, threads = _COSTS
    hasher = PasswordHasher(time_cost=rounds, memory_cost=memory, parallelism=threads)
    return hasher.hash(password)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Nobody else changes the file meanwhile: of two who read it, one would undo the other's."""
    import fcntl
    import time

    try:
        folder = os.open(Path(os.path.realpath(path)).parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}")
    try:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    fail(f"{path} is being changed by somebody else")
                time.sleep(0.02)
        yield
    finally:
        os.close(folder)


def _text(value: str) -> str:
    """As TOML has it."""
    import json

    try:
        value.encode()
    except UnicodeEncodeError:
        fail(f"{value!r} is no text in UTF-8", status=2)
    # A JSON text is a TOML text, but for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parts(path: Path) -> list[str]:
    """A file: what stands in front of the first user, then a text for each. Remarks right in front
    of another one are about that."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return [""]
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path} cannot be read: {getattr(error, 'strerror', '') or error}")
    _check(path, text)
    heads = [found.start() for found in _HEAD.finditer(text)]
    heads[1:] = [start - _remarks_size(text[:start]) for start in heads[1:]]
    return [text[a:b] for a, b in zip([0, *heads], [*heads, len(text)], strict=True)]


def _remarks_size(text: str) -> int:
    """How many characters the remarks have with which it ends."""
    size = 0
    for line in reversed(text.splitlines(keepends=True)):
        if not line.lstrip().startswith("#"):
            break
        size += len(line)
    return size


def _found(parts: list[str], name: str, path: Path, *, change: bool) -> int | None:
    """Which part is the user's, which must be there to be changed, and must not be to be added."""
    at = _place(parts, name, path)
    if at is not None and not change:
        fail(f"{path}: there is a user {name!r}; --change gives it another secret")
    if at is None and change:
        fail(f"{path}: there is no user {name!r}")
    return at


def _place(parts: list[str], name: str, path: Path) -> int | None:
    """Which part is a user's."""
    from simplebus.core import toml

    for at, part in enumerate(parts):
        if not _HEAD.search(part):
            continue
        try:
            (user,) = toml.loads(part)["users"]
        except (toml.TOMLDecodeError, ValueError, KeyError):
            fail(f"{path} is not written as simplebus user can change it; change it by hand")
        if user.get("name") == name:
            return at
    return None


_OURS = {"name", "password", "token", "nkey", "certificate", "addresses"}


def _with_secrets(part: str, lines: list[str]) -> str:
    """A user's part with these lines instead of those that say how it shows who it is. What it may
    do stays."""
    head = _HEAD.search(part)
    assert head is not None
    own, others = _entries(part[head.end() :].removeprefix("\n"))
    kept = "".join(text for key, text in own if key not in _OURS)
    return part[: head.end()] + "\n" + "\n".join(lines) + "\n" + kept + others


def _entries(text: str) -> tuple[list[tuple[str, str]], str]:
    """What stands in a table up to the next one: each key, empty for remarks, with its text, which
    may take several lines; and the rest."""
    from simplebus.core import toml

    found: list[tuple[str, str]] = []
    entry, at = "", 0
    for line in text.splitlines(keepends=True):
        if not entry and line.lstrip().startswith("["):
            break
        at += len(line)
        entry += line
        try:
            keys = toml.loads(entry)
        except toml.TOMLDecodeError:
            continue  # It goes on.
        found.append((next(iter(keys), ""), entry))
        entry = ""
    return [*found, ("", entry)], text[at:]


def _check(path: Path, text: str) -> None:
    """Fail unless this is a file of users."""
    from simplebus.config.users import users_in

    try:
        users_in(text, path)
    except ConfigError as error:
        fail(str(error))


def _belong(file: int, like: os.stat_result) -> None:
    """Give a file the owner, the group and the mode of another one, without what others may do.
    Raises OSError where that cannot be."""
    os.fchmod(file, 0o600)
    try:
        os.fchown(file, like.st_uid, like.st_gid)
    except PermissionError as error:
        raise OSError(error.errno, "its owner, or its group, is somebody else") from None
    os.fchmod(file, stat.S_IMODE(like.st_mode) & 0o660)


def _line_end(path: Path) -> str:
    """How lines end in a file."""
    try:
        return "\r\n" if b"\r\n" in path.read_bytes() else "\n"
    except OSError:
        return "\n"


def _write(path: Path, text: str) -> None:
    """The whole file, or nothing: for its owner alone, or for whom the one that is there is for,
    which may be a group."""
    _check(path, text)
    target = Path(os.path.realpath(path))
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with open(handle, "w", encoding="utf-8", newline=_line_end(target)) as file:
            with contextlib.suppress(FileNotFoundError):
                _belong(file.fileno(), target.stat())
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        fail(f"{path} cannot be written: {error.strerror}")
