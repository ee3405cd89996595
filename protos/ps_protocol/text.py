"""Decides how text from outside is shown, so that no character of it moves a cursor, forges a line of a log, or hides;
and what of it is a number.
"""

from __future__ import annotations

_MOST_DIGITS = 18
"""A number of so many fits into 64 bits."""


def printable(text: str, keep: str = "") -> str:
    r"""``text`` with every character that is not printed as itself written as its escape, such as ``\x1b`` or ``\n``.

    Those are control and format characters, line and paragraph separators, and lone surrogates, but for the characters
    in ``keep``. Repeating it changes nothing.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else _escape(each) for each in text)


def whole_number(text: str) -> int | None:
    """The number from 0 that ``text`` is, in 1 to 18 ASCII digits and nothing else; None: it is no such number."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
