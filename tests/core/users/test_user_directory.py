"""User directory: the current users, before and after a reload."""

from __future__ import annotations

from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import Permissions
from simplebus.core.users.user_directory import UserDirectory
from simplebus.core.users.users import User, Users


def test_without_authentication_no_user_is_found() -> None:
    directory = UserDirectory()
    assert directory.users is None
    assert directory.find_by_name("ada") is None
    assert directory.get_grants("ada") is None


def test_lookups_use_the_latest_users() -> None:
    directory = UserDirectory()
    free = User("ada", token=hash_token("ada"))
    limited = User("ada", token=hash_token("ada"), permissions=Permissions())
    directory.replace_users(Users([free]))
    assert directory.find_by_name("ada") is free
    assert directory.get_grants("ada") is None
    users = Users([limited])
    directory.replace_users(users)
    assert directory.find_by_name("ada") is limited
    assert directory.get_grants("ada") is users.get_grants(limited) is not None
    assert directory.get_grants("bob") is None
