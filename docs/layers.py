"""Draws the picture of the layers from the table on the page about the architecture."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
PAGE, PICTURE = DOCS / "architecture.md", DOCS / "images" / "layers.svg"

WIDTH, ROW, GAP, BOX, PAD = 720, 46, 8, 100, 10


def layers() -> list[tuple[tuple[str, ...], str]]:
    """The folders of each layer, from the top down, and what they are.

    Returns:
        One pair a row of the table.
    """
    rows = re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [(tuple(re.findall(r"`(\w+)`", folders)), text) for folders, text in rows]


def picture() -> str:
    """The picture: one band a layer; dark on light inside the bands, so that it can stand on any page.

    Returns:
        SVG.
    """
    rows = layers()
    height = len(rows) * (ROW + GAP) - GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" role="img">',
        f'<g stroke="#7f8fa6" stroke-width="2" fill="none"><path d="M 10 8 V {height - 6}"/>'
        f'<path d="M 4 {height - 14} l 6 8 l 6 -8"/></g>',
    ]
    for i, (folders, text) in enumerate(rows):
        top, x = i * (ROW + GAP), 24
        parts.append(f'<rect x="{x}" y="{top}" width="{WIDTH - x}" height="{ROW}" rx="6" fill="#e3eaf4"/>')
        for k, folder in enumerate(folders):
            left = x + PAD + k * (BOX + PAD)
            middle = left + BOX / 2
            parts.append(f'<rect x="{left}" y="{top + 8}" width="{BOX}" height="{ROW - 16}" rx="4" fill="#2f5d9b"/>')
            parts.append(
                f'<text x="{middle:g}" y="{top + ROW / 2 + 5:g}" font-size="14" text-anchor="middle" fill="#fff">'
                f"{escape(folder)}</text>"
            )
        lines = _wrapped(text, WIDTH - x - PAD - len(folders) * (BOX + PAD) - PAD)
        for k, line in enumerate(lines):
            y = top + ROW / 2 + 4 + 15 * (k - (len(lines) - 1) / 2)
            parts.append(
                f'<text x="{WIDTH - PAD}" y="{y:g}" font-size="12.5" text-anchor="end" fill="#1d2733">'
                f"{escape(line)}</text>"
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _wrapped(text: str, width: float) -> list[str]:
    """The text in lines that fit, by a guess at the width of a letter."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if len(longer) * 6.6 <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
