"""The descriptions of packages that ship with the tests, and what made them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.data.debian_sections import MOST, SECTIONS, chosen, described, read, write

INDEX = """\
Package: one
Depends: two (>= 1), three
Description: A "quoted" game: with a colon
Tag: game::strategy,
 Section: not this one
Section: games

Package: two
Section: misc
Description: Of a section that is not taken

Package: three
Section: games

Package: four
Section: web
Description: A page
"""


def test_twenty_sections_and_no_text_twice_in_one() -> None:
    rows = read()
    counts = Counter(section for section, _ in rows)
    assert sorted(counts) == sorted(SECTIONS)
    assert (len(rows), min(counts.values()), max(counts.values())) == (7166, 136, MOST)
    assert len(set(rows)) == len(rows)
    assert all(text == text.strip() and 10 < len(text) < 100 for _, text in rows)


def test_an_index_is_read_by_its_fields() -> None:
    assert list(described(INDEX.splitlines(keepends=True))) == [
        ("games", "A 'quoted' game: with a colon"),
        ("misc", "Of a section that is not taken"),
        ("web", "A page"),
    ]


def test_what_is_chosen_is_written_and_read_again(tmp_path: Path) -> None:
    many = [("net", f"Server, number {k}") for k in range(MOST + 100)] * 2
    rows = chosen([*many, *described(INDEX.splitlines(keepends=True))])
    assert Counter(section for section, _ in rows) == {"net": MOST, "games": 1, "web": 1}
    assert rows == chosen([*described(INDEX.splitlines(keepends=True)), *many])
    write(tmp_path / "some.csv.gz", rows)
    assert read(tmp_path / "some.csv.gz") == rows
