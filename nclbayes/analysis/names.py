"""Names that others have given, as they can be shown: on a page, in a picture, on a terminal."""

from __future__ import annotations

import unicodedata


def plain(text: str, keep: str = "") -> str:
    r"""A text in which every character can be seen.

    Characters that would steer a terminal, turn the direction of writing, or belong in no file of text (control
    characters, halves of surrogate pairs) are written as Python writes them in a string.

    Args:
        text: The text.
        keep: Characters that may stay, such as ends of lines.

    Returns:
        The same, if it has none of those.

    Example:
        >>> from nclbayes.analysis.names import plain
        >>> print(plain("digits"), plain("\x1b[31mred"))
        digits \x1b[31mred
    """
    return "".join(c if _is_seen(c) or c in keep else c.encode("unicode_escape").decode("ascii") for c in text)


def _is_seen(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"  # spaces of all widths
