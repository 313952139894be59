"""One page about an experiment: what was run, the numbers of each method, the pictures."""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from nclbayes.analysis import measures, plots
from nclbayes.analysis.names import plain
from nclbayes.analysis.record import Record
from nclbayes.storage import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Runs = Mapping[str, Sequence[Record]]
"""The records of each method, one a seed."""

_COLUMNS = (
    *("average accuracy", "forgetting", "backward transfer", "average loss", "calibration error"),
    *("log evidence", "seconds"),
)
_EVIDENCE = (
    "Log evidence: the sum over tasks of log p(data of the task | data of earlier ones), which is the log probability "
    "of all training examples, each task predicted before it was learnt. Higher is better, between runs on the same "
    "examples. It is estimated around the weights that were found (Laplace), and says nothing of what was forgotten. "
    "Only Laplace-NCL and diagonal NCL estimate it, where each example counts once (likelihood_weight=1)."
)
_ZOOM = 1.2
# Whatever a name may hold, a browser runs no script and loads nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_CSS = """
body { margin: 2rem auto; max-width: 1100px; padding: 0 1rem; color: #1a1a1a; background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1, h2, figcaption, .facts th, .facts td, tbody th { overflow-wrap: anywhere; }
h1 { font-size: 1.8rem; line-height: 1.25; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 0.75rem; border-bottom: 1px solid #ccc; }
.box { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.35rem 0.8rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
thead th { border-bottom: 2px solid #888; }
.numbers th + th, .numbers td { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.numbers thead th { white-space: normal; vertical-align: bottom; }
.numbers tbody th, .facts th { min-width: 9rem; }
.facts th { font-weight: 600; }
.facts td { white-space: pre-wrap; }
.note, figcaption { font-size: 0.85rem; color: #444; }
.pictures { display: flex; flex-wrap: wrap; gap: 1.5rem 1rem; align-items: flex-end; }
figure { margin: 0; max-width: 100%; }
img { max-width: 100%; height: auto; }
@media print { body { margin: 0; max-width: none; padding: 0; font-size: 11pt; } .box { overflow: visible; }
  table { font-size: 9pt; } .numbers td { white-space: normal; } th, td { padding: 0.2rem 0.4rem; }
  h2, .note { break-after: avoid; } tr, figure { break-inside: avoid; }
  .pictures { display: block; } figure { display: inline-block; margin: 0 0.5rem 1rem 0; } img { zoom: 0.75; } }
"""


def text_table(runs: Runs) -> list[list[str]]:
    """The numbers of each method: mean ± standard error over its records.

    Where some values are not finite, the mean is over the others, and "(3 of 4)" says how many those are. There is a
    column for the log evidence if any record has it.

    Args:
        runs: The records of each method, one a seed.

    Returns:
        The header and one row a method.

    Raises:
        SettingError: If a method has no records.

    Example:
        >>> from nclbayes import Record, Score
        >>> from nclbayes.analysis.report import text_table
        >>> record = Record(["a"])
        >>> record.add([Score(0.9, 0.3, 0.05, 100)], seconds=90)
        >>> for row in text_table({"ncl": [record]}):
        ...     print(row[0], row[1], row[2], row[-1], sep=" | ")
        Method | Seeds | Average accuracy (%) | Learning time (minutes)
        ncl | 1 | 90.0 | 1.50
    """
    measures.check_runs(runs)
    columns = _columns(runs)
    shown = [measures.MEASURES[what] for what in columns]
    table = [["Method", "Seeds", *(f"{measure.title} ({measure.unit})".capitalize() for measure in shown)]]
    for name, records in runs.items():
        unfinished = sum(not record.is_complete for record in records)
        seeds = f"{len(records)} ({unfinished} unfinished)" if unfinished else f"{len(records)}"
        numbers = [measures.MEASURES[what].write(measures.values_of(records, what)) for what in columns]
        table.append([name, seeds, *numbers])
    return table


def _columns(runs: Runs) -> list[str]:
    """What the table has."""
    has_evidence = any(math.isfinite(record.log_evidence) for records in runs.values() for record in records)
    return [what for what in _COLUMNS if what != "log evidence" or has_evidence]


def write_report(path: str | os.PathLike[str], title: str, runs: Runs, facts: Mapping[str, str]) -> Path:
    """Write a page of HTML that needs nothing else: no network, no other files, no scripts.

    It has the facts, the table of :func:`text_table`, pictures that compare the methods, and for each method the
    accuracies and losses of its first record.

    Args:
        path: The file; its folder is made if it is not there.
        title: What the page is called.
        runs: The records of each method, one a seed.
        facts: What was run, such as the task set, the steps and the versions.

    Returns:
        The file.

    Raises:
        SettingError: If a method has no records, or matplotlib is missing.
    """
    table = text_table(runs)
    parts = [f"<h1>{_shown(title)}</h1>"]
    if facts:
        parts += ["<h2>What was run</h2>", _facts_table(facts)]
    parts += ["<h2>Methods</h2>", _numbers_table(table), _notes(runs, table), *_comparison(runs)]
    for name, records in runs.items():
        parts += [f"<h2>{_shown(name)}</h2>", *_method(name, records)]
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{_shown(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
    )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, page + "\n".join(parts) + "\n</body>\n</html>\n")
    return target


def _shown(text: str) -> str:
    """Text as it stands between tags, or in an attribute: nothing in it is markup, and all of it can be seen."""
    return escape(plain(text, keep="\n\t"))


def _facts_table(facts: Mapping[str, str]) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{_shown(name)}</th><td>{_shown(str(value))}</td></tr>' for name, value in facts.items()
    )
    return f'<div class="box"><table class="facts"><tbody>\n{rows}\n</tbody></table></div>'


def _numbers_table(table: list[list[str]]) -> str:
    header = "".join(f'<th scope="col">{_shown(cell)}</th>' for cell in table[0])
    rows = "\n".join(
        f'<tr><th scope="row">{_shown(row[0])}</th>' + "".join(f"<td>{_shown(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in table[1:]
    )
    head = f"<thead><tr>{header}</tr></thead>"
    return f'<div class="box"><table class="numbers">{head}\n<tbody>\n{rows}\n</tbody></table></div>'


def _notes(runs: Runs, table: list[list[str]]) -> str:
    cells = [cell for row in table[1:] for cell in row[2:]]
    notes = ["After the last task learnt, over all tasks learnt."]
    if any(len(records) > 1 for records in runs.values()):
        notes.append("Mean ± standard error over seeds.")
    if any(" of " in cell for cell in cells):
        notes.append("(n of m): the number is not finite in the other seeds, which are left out of the mean.")
    if "-" in cells:
        notes.append("A dash: there is no finite value.")
    if "log evidence" in _columns(runs):
        notes.append(_EVIDENCE)
    return f'<p class="note">{_shown(" ".join(notes))}</p>'


def _comparison(runs: Runs) -> Iterator[str]:
    if not any(record.scores for records in runs.values() for record in records):
        return
    yield '<div class="pictures">'
    several = any(len(records) > 1 for records in runs.values())
    shade, dots = ("; the band is the standard error", "; small dots are seeds") if several else ("", "")
    yield _picture(plots.accuracy_by_method(runs), f"Average accuracy over the tasks learnt so far{shade}.")
    yield _picture(plots.compare_methods(runs), f"Average accuracy after the last task{dots}.")
    yield _picture(plots.compare_methods(runs, "forgetting"), "Forgetting: how far earlier tasks fell from their best.")
    yield "</div>"


def _method(name: str, records: Sequence[Record]) -> Iterator[str]:
    record = records[0]
    seed = f"Seed {record.about['seed']}" if "seed" in record.about else "The first seed"
    done, tasks = len(record.scores), len(record.tasks)
    if not record.scores:
        yield '<p class="note">No task has been learnt yet.</p>'
        return
    yield f'<p class="note">{_shown(f"{seed}, {done} of {tasks} tasks learnt.")}</p>'
    yield '<div class="pictures">'
    yield _picture(plots.accuracy_over_tasks(record), f"{name}: accuracy on each task from its own learning on.")
    yield _picture(plots.accuracy_matrix(record), f"{name}: accuracy after each task (rows) on each task (columns).")
    if any(record.losses):
        yield _picture(plots.loss_curves(record), f"{name}: training loss, smoothed.")
    yield "</div>"
    if not any(record.losses):
        yield '<p class="note">The training losses were not kept.</p>'


def _picture(figure: Figure, caption: str) -> str:
    """A picture inside the page: as an image of its own, so that the names inside two pictures cannot clash."""
    content = io.BytesIO()
    plots.write_to(figure, content, "svg")
    data = base64.b64encode(content.getvalue()).decode("ascii")
    width = round(float(figure.get_size_inches()[0]) * 96 * _ZOOM)
    text = _shown(caption)
    return (
        f'<figure><img src="data:image/svg+xml;base64,{data}" width="{width}" alt="{text}">\n'
        f"<figcaption>{text}</figcaption></figure>"
    )
