"""Decides how text from outside is shown: no character of it moves a cursor, forges a line of a log, or hides."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    r"""``text`` with every character that is not printed as itself written as its escape, such as ``\x1b`` or ``\n``.

    Those are control and format characters, line and paragraph separators, and lone surrogates, but for the characters
    in ``keep``. Repeating it changes nothing.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
