"""How the files of a journal are called, and which of them are still of use.

Rule 1: this file knows names and sequences, never files.

    simplebus.json                            what this directory is, and of which bus
    lock                                      held by the server that uses it
    reserve                                   space for letting go of segments on a full disk
    classes/00007/00000000000000000000.log    messages of class 7, from sequence 0 on
    classes/00007/00000000000000065536.log    a segment goes up to where the next one begins
    state/00000000000000000003.log            positions, names: the highest number counts
    classes/00007/….log.dropped, .dropped-2   what was given up, and is not read any more
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
_FILE = re.compile(r"([0-9]{20})\.log")
DROPPED = ".dropped"
"""What is added to the name of a file that recovery has given up."""
_DROPPED = re.compile(r"([0-9]{20})\.log\.dropped(?:-([0-9]{1,9}))?")
_FOLDER = re.compile(r"[0-9]{5}")


def file_name(number: int) -> str:
    """Of a segment by its first sequence, of a file in `state` by its number."""
    return f"{number:020}.log"


def file_number(name: str) -> int | None:
    """The other way; None for what is no such file."""
    found = _FILE.fullmatch(name)
    return int(found[1]) if found else None


def dropped_name(number: int, place: int) -> str:
    """Of a file that recovery has given up; `place`, from 1 on, tells those of one number apart."""
    return file_name(number) + DROPPED + (f"-{place}" if place > 1 else "")


def dropped_number(name: str) -> tuple[int, int] | None:
    """The other way; None for what is no such file."""
    found = _DROPPED.fullmatch(name)
    return (int(found[1]), int(found[2] or 1)) if found else None


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
