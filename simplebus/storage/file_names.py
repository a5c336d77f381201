"""Names of the files of a journal. No file is accessed here.

simplebus.json                            format of the directory, and identity of the bus
lock                                      locked by the server that uses the directory
reserve                                   space for removals on a full disk
classes/00007/00000000000000000000.log    messages of class 7, from sequence 0 on
classes/00007/00000000000000065536.log    a segment ends where the next one begins
state/00000000000000000003.log            positions and names: the highest intact one counts
classes/00007/….log.dropped, .dropped-2   damaged files and parts of files, not read any more
classes/00007/….log.new                   repaired file that will replace the damaged one
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
"""Suffix of a file with data that recovery could not use."""
DRAFT = ".new"
"""Suffix of a file that is being written and will replace another one."""
_DROPPED = re.compile(r"([0-9]{20})\.log\.dropped(?:-([0-9]{1,9}))?")
_FOLDER = re.compile(r"[0-9]{5}")


def file_name(number: int) -> str:
    """Return the name of a segment by its first sequence, or of a state file by its number."""
    return f"{number:020}.log"


def file_number(name: str) -> int | None:
    """Return the number in a file name; None if it is another file."""
    found = _FILE.fullmatch(name)
    return int(found[1]) if found else None


def dropped_name(number: int, place: int) -> str:
    """Return the name of an ignored file. `place`, from 1, distinguishes files of one number."""
    return file_name(number) + DROPPED + (f"-{place}" if place > 1 else "")


def dropped_number(name: str) -> tuple[int, int] | None:
    """Return the number and place in the name of an ignored file; None if it is another file."""
    found = _DROPPED.fullmatch(name)
    return (int(found[1]), int(found[2] or 1)) if found else None


def folder_name(class_id: int) -> str:
    """Return the directory name of a class."""
    return f"{class_id:05}"


def class_id_of(name: str) -> int | None:
    """Return the class id of a directory name; None if it is another directory."""
    return int(name) if _FOLDER.fullmatch(name) and int(name) <= 0xFFFF else None


def removable_segments(firsts: Iterable[int], floor: int) -> list[int]:
    """Return the segments of a class, by first sequence, that contain nothing from `floor` on.

    The last segment is never returned, because it records the head of the class.
    """
    ordered = sorted(firsts)
    return [first for first, following in pairwise(ordered) if following <= floor]
