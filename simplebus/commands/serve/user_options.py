"""Users of all listeners, from the users file and the configuration file."""

from __future__ import annotations

from pathlib import Path

from simplebus.config.errors import ConfigError
from simplebus.config.file import ConfigFile
from simplebus.config.users import ConfiguredUsers, merge_users, read_users_file


def configured_users(
    path: Path | None, file: ConfigFile | None
) -> tuple[ConfiguredUsers, tuple[str, ...]]:
    """Return the users of the users file and the configuration file, and warnings.

    Raises:
        ValueError: If a user is invalid.
    """
    groups, warnings = [] if file is None else [file.users], tuple[str, ...]()
    if path is not None:
        try:
            users_of_file, warning = read_users_file(path)
        except ConfigError as error:
            raise ConfigError(*(f"--users: {each}" for each in error.messages)) from None
        warnings = (warning,) if warning else ()
        groups.append(users_of_file)
    return merge_users(groups) if groups else ConfiguredUsers(), warnings
