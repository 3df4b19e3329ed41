"""Sheets as HTML tables: complete without scripts, ready for the one that sorts them."""

from __future__ import annotations

from html import escape
from typing import Final

from gradsync.bench.stats import FASTER, SLOWER
from gradsync.bench.tables import Column, Row, Sheet

_LONG: Final = 60  # characters, from which a cell is broken into lines
_MARKS: Final = {FASTER: "▲ ", SLOWER: "▼ "}


def html_table(sheet: Sheet, *, name: str) -> str:
    """The table in a box that scrolls when it is too wide, its title as caption, and its notes."""
    columns = [c for c in sheet.columns if any(row.get(c.key) is not None for row in sheet.rows)]
    if not columns:
        return ""
    rows = "\n".join(_row(columns, row) for row in sheet.rows)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in sheet.notes)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{escape(name)}">'
        f'<table class="sortable"><caption id="{escape(name)}"><span>{escape(sheet.title)}</span>'
        "</caption>\n"
        f"<thead><tr>{''.join(_head(column, sheet) for column in columns)}</tr></thead>\n"
        f"<tbody>\n{rows}\n</tbody></table></div>{notes}"
    )


def _head(column: Column, sheet: Sheet) -> str:
    is_number = all(_is_number(row.get(column.key, 0)) for row in sheet.rows)
    kind = ' class="number"' if is_number else ""
    return f'<th scope="col"{kind}>{escape(column.title or column.key)}</th>'


def _row(columns: list[Column], row: Row) -> str:
    return f"<tr>{''.join(_cell(column, row) for column in columns)}</tr>"


def _cell(column: Column, row: Row) -> str:
    """``data-value`` is what the script sorts by, where that is not the text."""
    value = row.get(column.key)
    if value is None:
        return "<td></td>"
    shown = escape(column.show(value))
    if column.key == "verdict":
        kind = {FASTER: "faster", SLOWER: "slower"}.get(str(value), "")
        return f'<td class="{kind}">{_MARKS.get(str(value), "")}{shown}</td>'
    if _is_number(value):
        return f'<td class="number" data-value="{value}">{shown}</td>'
    return f'<td class="prose">{shown}</td>' if len(shown) > _LONG else f"<td>{shown}</td>"


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
