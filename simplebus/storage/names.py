"""How the files of a journal are called, and which of them are still of use.

Rule 1: this file knows names and sequences, never files.

    simplebus.json                            what this directory is, and of which bus
    lock                                      held by the server that uses it
    reserve                                   space for letting go of segments on a full disk
    classes/00007/00000000000000000000.log    messages of class 7, from sequence 0 on
    classes/00007/00000000000000065536.log    a segment goes up to where the next one begins
    state/00000000000000000003.log            positions, names: the highest number counts
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

STAMP = "simplebus.json"
LOCK = "lock"
RESERVE = "reserve"
CLASSES = "classes"
STATE = "state"
DROPPED = ".dropped"
"""What the names of files end with that recovery has given up."""

_FILE = re.compile(r"([0-9]{20})\.log")
_FOLDER = re.compile(r"[0-9]{5}")


def file_name(number: int) -> str:
    """Of a segment by its first sequence, of a file in `state` by its number."""
    return f"{number:020}.log"


def file_number(name: str) -> int | None:
    """The other way; None for what is no such file."""
    found = _FILE.fullmatch(name)
    return int(found[1]) if found else None


def folder_name(class_id: int) -> str:
    """Of a class."""
    return f"{class_id:05}"


def class_id_of(name: str) -> int | None:
    """The other way; None for what is no such folder."""
    return int(name) if _FOLDER.fullmatch(name) and int(name) <= 0xFFFF else None


def unneeded(firsts: Iterable[int], floor: int) -> list[int]:
    """Which of a class's segments, given by their first sequences, hold nothing at or above
    `floor`. Never the last one: it tells how far the class has come."""
    ordered = sorted(firsts)
    return [first for first, following in pairwise(ordered) if following <= floor]
