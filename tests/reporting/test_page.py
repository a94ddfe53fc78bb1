import re

import pytest

from comlrl_stages.artifacts import open_work
from comlrl_stages.reporting.page import Figure, Page, Section, Table, render
from comlrl_stages.reporting.responses import visible
from comlrl_stages.stages import report

from .chromium import visit
from .synthetic import make_experiment


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of the made-up experiment; one response holds script tags, emoji and control characters."""
    results = tmp_path_factory.mktemp("project") / "results"
    settings, inputs = make_experiment(results)
    with open_work("report", {}, inputs, {"report": results / "demo" / "report"}) as work:
        report.run(settings, work)
    return results / "demo" / "report" / "report.html"


def test_the_browser_has_no_complaint_and_asks_for_nothing_but_the_page(page):
    seen = visit(page)
    assert (seen.errors, seen.failed) == ([], [])
    assert seen.requests == [page.as_uri()]


def test_nothing_in_the_page_names_another_host(page):
    html = page.read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href|url|@import)\s*[=(]?\s*["']?(?:https?:)?//""", html)
    assert "<script>" not in html and ' onerror="console' not in html


def test_hostile_responses_are_shown_as_text_and_never_run(page):
    seen = visit(
        page,
        "document.querySelectorAll('script, img, iframe').length",
        "document.querySelector('.answer details .say:not(.head)').textContent",
        "[...document.querySelectorAll('details')].every(d => d.querySelector('summary'))",
    )
    elements, text, whole = seen.values
    assert elements == 0 and whole
    assert text.startswith("<script>console.error('ran')</script><img src=x onerror=")
    assert "👩‍🚀🌊 a[U+2028]b[U+2029]c[U+202E]d ␀␛[31m &amp; </details></p>" in text


@pytest.mark.parametrize("width", [1280, 420])
def test_the_page_itself_never_scrolls_sideways(page, width):
    assert visit(page, "document.documentElement.scrollWidth", width=width).values == [width]


def test_every_entry_of_the_contents_leads_somewhere_and_every_figure_is_described(page):
    seen = visit(
        page,
        "[...document.querySelectorAll('nav a')].filter(a => !document.querySelector(a.getAttribute('href'))).length",
        "[...document.querySelectorAll('figure .plot')].map(p => p.getAttribute('aria-label').length > 20 && "
        "p.querySelector('svg') !== null && p.parentElement.querySelector('figcaption').textContent.length > 40)",
        "(ids => ids.length - new Set(ids).size)([...document.querySelectorAll('[id]')].map(e => e.id))",
    )
    dangling, described, doubled = seen.values
    assert dangling == 0 and doubled == 0
    assert len(described) == 8 and all(described)


def test_figures_follow_the_dark_theme(page):
    ink = "getComputedStyle(document.querySelector('#results .plot svg text')).fill"
    assert visit(page, ink).values == ["rgb(29, 33, 38)"]
    assert visit(page, ink, dark=True).values == ["rgb(230, 232, 235)"]


def test_all_text_is_escaped():
    evil = "<script>alert(1)</script>"
    figure = Figure("f", "<svg></svg>", f'"{evil}', evil)
    section = Section("s", evil, evil, figures=[figure], tables=[(evil, Table([evil], [[evil]]))])
    html = render(Page(evil, evil, [evil], [(evil, evil)], [evil], [section]))
    assert "<script" not in html and html.count("&lt;script&gt;") >= 12
    assert "<svg></svg>" in html


def test_control_characters_are_made_visible_and_line_breaks_kept():
    assert visible("a\nb\tc") == "a\nb\tc"
    assert visible("\x00\x1b\x7f\u202e\u2028\ufeff") == "␀␛[U+007F][U+202E][U+2028][U+FEFF]"
    assert visible("👩‍🚀 é 中") == "👩‍🚀 é 中"
