"""Parsing of many decimal numbers at once.

A valid number has 1 to 19 digits and fits into an int64. Nothing is raised for others, and only
the given bytes and PADDING_BYTES before them are read.
"""

from __future__ import annotations

import numpy as np

from simplebus.core.protocol.frames import Bytes, Flags, Integers, Words, unaligned

PADDING_BYTES = 24
"""Bytes that must precede every number in the buffer; their values do not matter."""
DIGITS_MAX = 19

_WORD: np.dtype[np.uint64] = np.dtype("<u8")
_SIZE = _WORD.itemsize
_EIGHT, _SIXTEEN, _THIRTY_TWO = np.uint64(8), np.uint64(16), np.uint64(32)
_TEN, _HUNDRED, _MYRIAD = np.uint64(10), np.uint64(100), np.uint64(10_000)
_PAIRS, _QUADS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
_ZEROS = np.uint64(0x3030303030303030)
_HIGH_HALVES = np.uint64(0xF0F0F0F0F0F0F0F0)
_SIXES = np.uint64(0x0606060606060606)
# Masks by the number of digits at the end of a word.
_LAST: Words = np.array([0] + [(1 << 64) - (1 << 8 * (_SIZE - n)) for n in range(1, 9)], np.uint64)
_MAX = np.uint64((1 << 63) - 1)


def parse_digits(digits: Words) -> Integers:
    """Return the numbers of up to eight digits in each word. Changes its argument.

    The first digit is in the lowest byte. Digits are values 0 to 9, with leading zeros.
    """
    above = digits >> _EIGHT
    digits *= _TEN
    digits += above
    digits &= _PAIRS
    above = digits >> _SIXTEEN
    digits *= _HUNDRED
    digits += above
    digits &= _QUADS
    above = digits >> _THIRTY_TWO
    digits *= _MYRIAD
    digits += above
    digits &= np.uint64(0xFFFFFFFF)
    return digits.view(np.int64)


def _parse_last_eight(words: Words, lengths: Integers, ends: Integers) -> tuple[Words, Flags]:
    """Return the numbers in the last eight digits that end at `ends`, and a flag for each that is
    valid.
    """
    digits = words[ends - _SIZE]
    digits ^= _ZEROS
    digits &= _LAST.take(np.minimum(lengths, _SIZE))
    # A byte is a digit value if its upper half and that of the value plus six are zero.
    non_digits = (digits | (digits + _SIXES)) & _HIGH_HALVES
    return parse_digits(digits).view(np.uint64), non_digits == 0


def parse_numbers(data: Bytes, begins: Integers, ends: Integers) -> tuple[Integers, Flags]:
    """Return the numbers in data[begins[i]:ends[i]], 0 for an invalid one, and a flag for each
    valid one.

    PADDING_BYTES bytes must precede each non-empty number.
    """
    lengths = ends - begins
    good: Flags = (lengths >= 1) & (lengths <= DIGITS_MAX)
    if not good.all():
        lengths = np.where(good, lengths, 0)
        ends = np.where(good, ends, PADDING_BYTES)
    words = unaligned(data, _WORD)
    total, are_digits = _parse_last_eight(words, lengths, ends)
    good &= are_digits
    for position in range(_SIZE, int(lengths.max(initial=0)), _SIZE):
        longer = np.flatnonzero(lengths > position)
        above, are_digits = _parse_last_eight(
            words, lengths[longer] - position, ends[longer] - position
        )
        good[longer] &= are_digits
        # No overflow: 19 digits fit into 64 bits. The limit of an int64 is checked below.
        total[longer] += above * np.uint64(10**position)
    good &= total <= _MAX
    return np.where(good, total, 0).view(np.int64), good


def parse_similar_numbers(data: Bytes, begins: Integers, ends: Integers) -> tuple[Integers, Flags]:
    """Return the result of `parse_numbers`, faster if most numbers are equal to the first one."""
    lengths = ends - begins
    size = int(lengths[0]) if lengths.size else 0
    if not 1 <= size <= _SIZE:
        return parse_numbers(data, begins, ends)
    last = unaligned(data, _WORD)[ends - _SIZE] & _LAST[size]
    different_indexes = np.flatnonzero((last != last[0]) | (lengths != size))
    if different_indexes.size * 2 > lengths.size:
        return parse_numbers(data, begins, ends)
    first = data[begins[0] : ends[0]].tobytes()
    is_good = first.isdigit()
    numbers = np.full(lengths.size, int(first) if is_good else 0, np.int64)
    good = np.full(lengths.size, is_good)
    if different_indexes.size:
        numbers[different_indexes], good[different_indexes] = parse_similar_numbers(
            data, begins[different_indexes], ends[different_indexes]
        )
    return numbers, good
