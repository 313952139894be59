"""Make `debian-sections.csv.gz`, or one like it, from a package index of Debian.

``apt-cache dumpavail | python -m tests.data.debian_sections sections.csv.gz`` writes the one-line descriptions of
packages with the section of each: of the sections below, and of each at most 500, drawn by a seed.
``apt-cache dumpavail | python -m tests.data.debian_sections --check FILE`` says how much of a file is in an index.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent / "debian-sections.csv.gz"
SECTIONS = (
    *("admin", "database", "editors", "electronics", "fonts", "games", "graphics", "hamradio", "httpd", "kernel"),
    *("localization", "mail", "math", "net", "science", "sound", "tex", "text", "video", "web"),
)
MOST = 500


def described(index: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Section and description of each package of an index; double quotes become single ones."""
    fields: dict[str, str] = {}
    for line in (*index, "\n"):
        name, colon, value = line.partition(": ")
        if not line.strip():
            if {"Section", "Description"} <= fields.keys():
                yield fields["Section"], fields["Description"].replace('"', "'")
            fields = {}
        elif colon and not line.startswith(" "):
            fields[name] = value.strip()


def chosen(pairs: Iterable[tuple[str, str]], seed: int = 0) -> list[tuple[str, str]]:
    """Those of the sections above, each text once in its section, at most so many of each, shuffled."""
    found: dict[str, set[str]] = {section: set() for section in SECTIONS}
    for section, text in pairs:
        if section in found:
            found[section].add(text)
    draw, rows = random.Random(seed), []
    for section, texts in found.items():
        rows += [(section, text) for text in draw.sample(sorted(texts), min(MOST, len(texts)))]
    draw.shuffle(rows)
    return rows


def read(path: Path = HERE) -> list[tuple[str, str]]:
    """The lines of a file: section and description."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return [(row["section"], row["description"]) for row in csv.DictReader(file)]


def write(path: Path, rows: Iterable[tuple[str, str]]) -> None:
    """Write them; the same lines make the same bytes."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("section", "description"), *rows])
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        known, rows = set(described(sys.stdin)), read(given.path)
        print(f"{sum(row in known for row in rows)} of {len(rows)} lines are in the index")
    else:
        write(given.path, chosen(described(sys.stdin)))


if __name__ == "__main__":
    main()
