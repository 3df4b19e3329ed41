"""The page in a real browser: light, dark, on a phone, sorted, and without scripts."""

from __future__ import annotations

import chromium
import pytest
import report_results as made

from gradsync.bench import files
from gradsync.bench.report import write_report

pytestmark = pytest.mark.skipif(chromium.FOUND is None, reason=chromium.WHY_NOT)

PHONE = 390
FIRST_TABLE = "document.querySelector('table.sortable')"
P50 = "th:nth-child(3) button"  # of the first table


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    files.write(folder / "before.json", made.bench(1, 2, 4))
    files.write(folder / "after.json", made.bench(1, 2, 4, speed=0.8))
    files.write(folder / "comm.json", made.bench_comm())
    paths = [folder / name for name in ("before.json", "after.json", "comm.json")]
    return write_report(paths, folder / "report.html").page


@pytest.fixture(scope="module")
def browser():
    with chromium.Chromium() as started:
        yield started


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, PHONE], ids=["wide", "phone"])
def test_it_opens_without_errors_requests_or_sideways_scrolling(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    assert browser.logged == []
    assert browser.requested == [page.resolve().as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    outside = browser.evaluate(
        "[...document.querySelectorAll('body *:not(.scroll *):not(svg *)')]"
        f".filter(e => e.getBoundingClientRect().right > {width} + 1).map(e => e.outerHTML)"
    )
    assert outside == []


def test_words_stay_inside_their_plot_and_can_be_read_on_a_phone(browser, page):
    browser.open(page, width=PHONE)
    lost = browser.evaluate(
        "[...document.querySelectorAll('svg')].flatMap(s => { const b = s.getBoundingClientRect();"
        "return [...s.querySelectorAll('text')].filter(t => { const r = t.getBoundingClientRect();"
        "return r.left < b.left - 1 || r.right > b.right + 1 || r.bottom > b.bottom + 1; })"
        ".map(t => t.textContent); })"
    )
    assert lost == []
    smallest = browser.evaluate(
        "Math.min(...[...document.querySelectorAll('svg text')].map(t =>"
        "parseFloat(getComputedStyle(t).fontSize) * t.ownerSVGElement.getScreenCTM().a))"
    )
    assert smallest >= 8


def test_dark_and_light_differ_and_words_stand_out_in_both(browser, page):
    seen = []
    for dark in (False, True):
        browser.open(page, dark=dark)
        colours = browser.evaluate(
            "[getComputedStyle(document.querySelector('figure')).backgroundColor,"
            "getComputedStyle(document.querySelector('svg .ink')).fill]"
        )
        ground, ink = (sum(map(int, c[4:-1].split(","))) for c in colours)
        assert abs(ground - ink) > 3 * 120
        seen.append(ground)
    assert seen[0] > 3 * 200 > 3 * 60 > seen[1]


def test_wide_tables_scroll_in_their_box_also_by_keyboard(browser, page):
    browser.open(page, width=PHONE)
    box = "document.querySelector('.scroll')"
    assert browser.evaluate(f"{box}.scrollWidth > {box}.clientWidth")
    browser.evaluate(f"{box}.focus()")
    assert browser.evaluate(f"document.activeElement === {box}")


def test_a_click_sorts_and_a_second_one_turns_the_order_around(browser, page):
    browser.open(page)
    before = column(browser)
    assert before != sorted(before)
    browser.click(P50)
    assert column(browser) == sorted(before)
    assert sort_of(browser) == "ascending"
    browser.click(P50)
    assert column(browser) == sorted(before, reverse=True)
    assert sort_of(browser) == "descending"
    assert browser.logged == []


def test_the_keyboard_sorts_too(browser, page):
    browser.open(page)
    browser.evaluate(f"document.querySelector('{P50}').focus()")
    browser.press("Enter", 13, "\r")
    assert column(browser) == sorted(column(browser))
    assert sort_of(browser) == "ascending"


def test_empty_cells_are_last_in_both_orders(browser, page):
    browser.open(page)
    count = browser.evaluate(f"{FIRST_TABLE}.tHead.rows[0].cells.length")
    for _ in range(2):
        browser.click(f"th:nth-child({count}) button")  # the verdict; torch's own has none
        cells = browser.evaluate(
            f"[...{FIRST_TABLE}.tBodies[0].rows].map(r => r.lastElementChild.textContent)"
        )
        assert cells[-3:] == ["", "", ""]
        assert all(cells[:-3])


def test_without_scripts_the_tables_are_there_and_no_button_does_nothing(browser, page):
    browser.open(page, scripts=False)
    assert browser.evaluate("document.querySelectorAll('button').length") == 0
    assert browser.evaluate(f"{FIRST_TABLE}.tBodies[0].rows.length") == 12
    assert browser.evaluate(f"{FIRST_TABLE}.tHead.rows[0].cells[2].textContent") == "p50"


def column(browser: chromium.Chromium) -> list[float]:
    cells: list[str] = browser.evaluate(
        f"[...{FIRST_TABLE}.tBodies[0].rows].map(r => r.cells[2].dataset.value)"
    )
    return [float(cell) for cell in cells]


def sort_of(browser: chromium.Chromium) -> str:
    found: list[str] = browser.evaluate(
        "[...document.querySelectorAll('th[aria-sort]')].map(h => h.getAttribute('aria-sort'))"
    )
    assert len(found) == 1
    return found[0]
