"""The report in headless Chromium: it opens, works and stays harmless."""

import csv
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from test_report import HOSTILE, make_run

from device_runs import add_devices
from fedp3.report import write_report
from score_runs import regression_runs

sync_api = pytest.importorskip("playwright.sync_api")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MB = 1_000_000
HANGS = 180_000  # milliseconds: a guard against hanging, not a limit of speed
TEXTS = (
    "h1",
    "nav a",
    "dt",
    ".cards small",
    ".pill",
    ".pill.open",
    ".sort",
    "td",
    "caption",
    ".reasons li",
    "figcaption",
    "svg .tick",
    ".legend li",
    ".config .differs dd",
    "code",
    ".facts dd",
    ".toggle",
    "output",
    ".headline p",
    ".headline .caution",
    ".help summary",
    ".csv",
    ".glossary dt",
    ".glossary dd",
)
# All text that is shown in less than 11 pixels of the screen.
SMALL = """() => [...document.querySelectorAll("body *")].filter(e => {
  if (e.checkVisibility && !e.checkVisibility()) return false;
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || !e.getClientRects().length) return false;
  const matrix = e instanceof SVGElement ? e.getScreenCTM() : { a: 1, b: 0 };
  return parseFloat(getComputedStyle(e).fontSize) * Math.hypot(matrix.a, matrix.b) < 11;
}).map(e => `${e.tagName} ${e.textContent.slice(0, 20)}`)"""


@dataclass
class Opened:
    """A page and what it did."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        message = (
            f"no browser: none of {', '.join(BROWSERS)} is installed "
            "(on Debian: apt-get install chromium)"
        )
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Opened]]:
    """`visit(path, scheme)` opens a page.

    When the test ends, nothing may have failed, and only the file itself may have been requested.
    """
    visited: list[tuple[Opened, str]] = []

    def go(path: Path, scheme: str = "light") -> Opened:
        page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
        opened = Opened(page)
        page.on(
            "console",
            lambda m: opened.errors.append(m.text) if m.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda e: opened.errors.append(str(e)))
        page.on("dialog", lambda d: (opened.errors.append(f"dialog {d.message}"), d.dismiss()))
        page.on("request", lambda r: opened.requests.append(r.url))
        page.goto(path.as_uri(), timeout=HANGS)
        visited.append((opened, page.url))
        return opened

    yield go
    for opened, url in visited:
        assert opened.errors == []
        assert opened.requests == [url]
        opened.page.close()


def column(page: Any, k: int, table: str = "#clients-0") -> list[str]:
    cells: list[str] = page.locator(f"{table} tbody tr:visible").evaluate_all(
        "(rows, k) => rows.map(r => r.cells[k].textContent)", k
    )
    return cells


def contrast(page: Any, query: str) -> float:
    """The contrast of an element's text to what lies behind it, as WCAG counts it."""
    ratio: float = page.locator(query).first.evaluate(
        """e => {
          const light = css => {
            const [r, g, b] = css.match(/[\\d.]+/g).map(v => v / 255)
              .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
            return .2126 * r + .7152 * g + .0722 * b;
          };
          const style = getComputedStyle(e);
          const ink = light(e instanceof SVGElement ? style.fill : style.color);
          const background = element => getComputedStyle(element).backgroundColor;
          let behind = e;
          while (background(behind) === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
          const ground = light(background(behind));
          return (Math.max(ink, ground) + .05) / (Math.min(ink, ground) + .05);
        }"""
    )
    return ratio


def test_the_page_is_legible_in_light_and_dark(
    tmp_path: Path, visit: Callable[..., Opened]
) -> None:
    runs = [
        make_run(tmp_path / "a", reason="NaN"),
        make_run(tmp_path / "b", seed=1, finished=False, overrides=["local.steps=3"]),
    ]
    path = write_report(runs)
    grounds = []
    for scheme in ("light", "dark"):
        page = visit(path, scheme).page
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        for width in (1300, 400):
            page.set_viewport_size({"width": width, "height": 900})
            for query in TEXTS:
                assert contrast(page, query) >= 4.5, (scheme, width, query)
    assert grounds[0] != grounds[1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_large_enough_and_the_page_fits_on_every_screen(
    tmp_path: Path, visit: Callable[..., Opened], scheme: str
) -> None:
    for s in range(3):
        make_run(tmp_path / "many" / f"seed-{s}", seed=s, names=range(40))
    single = add_devices(make_run(tmp_path / "single", names=range(16)), deadline=30)
    pages = [
        write_report([single]),
        write_report([tmp_path / "many", single, make_run(tmp_path / "c")], tmp_path / "p.html"),
    ]
    for path in pages:
        page = visit(path, scheme).page
        for width in (1300, 1100, 800, 400, 360):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
            assert page.evaluate(SMALL) == [], width
            inside = page.locator("figure svg:visible text").evaluate_all(
                "texts => texts.every(t => { const a = t.getBoundingClientRect(), "
                "b = t.closest('figure').getBoundingClientRect(); "
                "return a.left >= b.left - 1 && a.right <= b.right + 1; })"
            )
            assert inside, width


def test_the_page_begins_with_its_headline_and_ends_with_a_glossary(
    tmp_path: Path, visit: Callable[..., Opened]
) -> None:
    page = visit(write_report([make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1)])).page
    assert page.locator("h1 + .headline p").first.inner_text().startswith("At ")
    assert "not decided" in page.locator(".headline").inner_text()
    words = page.locator(".glossary dt").all_text_contents()
    assert {"L_i", "P_i", "Q_i", "G", "D", "P", "C"} <= set(words)
    page.get_by_role("link", name="Glossary").click()
    assert page.locator("#glossary").evaluate("e => e.getBoundingClientRect().top < innerHeight")


def test_columns_are_explained_by_key_and_by_tap(tmp_path: Path, browser: Any) -> None:
    path = write_report([make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1)])
    context = browser.new_context(has_touch=True, viewport={"width": 400, "height": 800})
    page = context.new_page()
    page.goto(path.as_uri(), timeout=HANGS)
    helps = page.locator(".help")
    assert helps.count() == page.locator("table").count()
    for k in range(helps.count()):
        summary, meaning = helps.nth(k).locator("summary"), helps.nth(k).locator("dd").first
        assert meaning.is_hidden()
        summary.tap() if k % 2 else summary.press("Enter")
        assert meaning.is_visible()
        heads = helps.nth(k).locator("dt").all_text_contents()
        texts = helps.nth(k).locator("dd").all_text_contents()
        assert len(heads) == len(texts) and all(map(str.strip, texts))
    chart = page.locator("svg[data-chart=accuracy-0-narrow]")
    chart.scroll_into_view_if_needed()
    chart.tap()
    assert "round" in page.locator("#tip").inner_text(), "it stays after the finger is lifted"
    page.locator("h1").tap()
    assert page.locator("#tip").is_hidden()
    context.close()


def test_every_table_can_be_saved_as_csv(tmp_path: Path, visit: Callable[..., Opened]) -> None:
    names = ["=1+1", "a, b", HOSTILE, *range(3, 9)]
    for s in range(3):
        make_run(tmp_path / "a" / f"seed-{s}", names=names, seed=s, reason='a "quoted", reason')
    path = write_report([tmp_path / "a", make_run(tmp_path / "b", names=names)])
    page = visit(path).page
    tables, buttons = page.locator("table"), page.locator(".csv")
    assert tables.count() == buttons.count() >= 6
    for k in range(buttons.count()):
        with page.expect_download() as download:
            buttons.nth(k).click()
        name = download.value.suggested_filename
        rows = list(csv.reader(download.value.path().read_text().splitlines()))
        heads = [h for h in rows[0] if not h.endswith(", note")]
        shown = tables.nth(k).locator("thead th").all_text_contents()
        assert name.endswith(".csv") and [h.removesuffix(" (%)") for h in heads] == shown
        assert len(rows) - 1 == tables.nth(k).locator("tbody tr").count()
        assert all(len(row) == len(rows[0]) for row in rows)
        assert not any(cell[:1] in ("=", "@") for row in rows for cell in row)
        if name == "clients.csv":
            column_of = rows[0].index("Parameters")
            assert [row[column_of] for row in rows[1:]] == [str(1000 * i) for i in range(1, 10)]
            assert rows[1][0] == "1+1" and rows[2][0] == "a, b" and rows[3][0] == HOSTILE
            assert all(0 <= float(row[rows[0].index("G (%)")]) <= 100 for row in rows[1:])
        if name == "comparison.csv":
            assert rows[1][rows[0].index("G, note")].startswith("±") and "Seeds" in rows[0]


def test_tables_become_cards_on_a_phone_or_say_that_they_scroll(
    tmp_path: Path, visit: Callable[..., Opened]
) -> None:
    runs = [make_run(tmp_path / "a", names=range(30)), make_run(tmp_path / "b", names=range(30))]
    page = visit(write_report(runs)).page

    def hints() -> list[str]:
        found: list[str] = page.locator(".about").evaluate_all(
            "all => all.map(e => getComputedStyle(e, '::before').content)"
        )
        return found

    assert any("more rows" in hint for hint in hints())
    assert not any("more columns" in hint for hint in hints())
    page.set_viewport_size({"width": 400, "height": 900})
    for table in page.locator("table.stack").all():
        assert table.evaluate("t => t.scrollWidth <= t.parentNode.clientWidth")
        cell = table.locator("td").first
        label = cell.evaluate("e => getComputedStyle(e, '::before').content")
        assert label.strip('"') == cell.get_attribute("data-head")
    assert len([hint for hint in hints() if "more columns" in hint]) == 2  # clients of each run
    frame = page.locator(".scroll:has(#clients-0)")
    frame.evaluate("e => e.scrollTo(400, 0)")
    first = page.locator("#clients-0 tbody tr:first-child td:first-child")
    assert first.evaluate("e => e.getBoundingClientRect().left") < 30, "the client stays in view"


def test_spreads_are_bars_whose_colours_do_not_mix(
    tmp_path: Path, visit: Callable[..., Opened]
) -> None:
    for name, shift in (("a", 0), ("b", 5)):
        for s in range(3):
            make_run(tmp_path / name / f"seed-{s}", seed=s + shift)
    page = visit(write_report([tmp_path / "a", tmp_path / "b"])).page
    assert page.locator("polygon").count() == 0
    bars = page.locator("svg[data-chart=accuracy-0] path.bar")
    assert bars.count() == 2
    assert bars.evaluate_all("all => all.every(e => getComputedStyle(e).fill === 'none')")


def test_clients_sort_by_mouse_and_keyboard_with_unknown_values_last(
    tmp_path: Path, visit: Callable[..., Opened]
) -> None:
    folder = make_run(tmp_path / "a", names=range(12))
    result = (folder / "result.json").read_text()
    (folder / "result.json").write_text(
        result.replace('"7":', '"gone":')
    )  # client 7 was not scored
    page = visit(write_report([folder])).page
    heads = page.locator("#clients-0 th button").all_text_contents()
    assert column(page, 0) == [str(i) for i in range(12)]

    def number(text: str) -> float:
        return float(text.replace(",", "").split("\u00a0")[0])

    for name in ("Parameters", "G"):
        k, button = (
            heads.index(name),
            page.locator(f"#clients-0 th:nth-child({heads.index(name) + 1}) button"),
        )
        for press, state in (
            (button.click, "ascending"),
            (lambda b=button: b.press("Enter"), "descending"),
        ):
            press()
            assert page.locator("#clients-0 th[aria-sort]").evaluate_all(
                "e => e.map(t => t.ariaSort)"
            ) == [state]
            values = column(page, k)
            known = [number(v) for v in values if v != "–"]
            assert known == sorted(known, reverse=state == "descending")
            assert "–" not in values[: len(known)] and len(known) == (11 if name == "G" else 12)
    page.locator("#clients-0 th:first-child button").press("Enter")
    assert column(page, 0) == [str(i) for i in range(12)]  # 2 before 10


def test_clients_are_found_by_name_and_by_layer(
    tmp_path: Path, visit: Callable[..., Opened]
) -> None:
    page = visit(write_report([make_run(tmp_path / "a", names=range(12))])).page
    search = page.get_by_label("Search")
    search.fill("11")
    assert column(page, 0) == ["11"] and page.locator("output").text_content() == "1 of 12 clients"
    search.fill("FC2")
    shown = column(page, 0)
    assert 0 < len(shown) < 12 and all("fc2" in layers for layers in column(page, 2))
    search.fill("")
    assert len(column(page, 0)) == 12


def test_a_run_can_be_hidden_from_the_charts(tmp_path: Path, visit: Callable[..., Opened]) -> None:
    page = visit(write_report([make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1)])).page
    button = page.get_by_role("button", name="b", exact=True)
    lines = page.locator("figure g.line.r1")
    assert lines.count() >= 7 and lines.first.is_visible()
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert not any(lines.nth(k).is_visible() for k in range(lines.count()))
    assert page.locator("figure g.line.r0").first.is_visible()
    page.locator("svg[data-chart=accuracy-0]").hover()
    assert page.locator("#tip p").count() == 1
    button.press("Enter")
    assert lines.first.is_visible()


def test_hovering_tells_the_values_under_the_pointer(
    tmp_path: Path, visit: Callable[..., Opened]
) -> None:
    page = visit(write_report([make_run(tmp_path / "a")])).page
    tip = page.locator("#tip")
    assert tip.is_hidden()
    chart = page.locator("svg[data-chart=accuracy-0]")
    box = chart.bounding_box()
    chart.hover(position={"x": box["width"] - 16, "y": box["height"] / 2})
    assert "round 6" in tip.inner_text() and tip.inner_text().count("%") == 3
    plan = page.locator("svg[data-grid=plan-0]")
    left, top, across, down = page.evaluate("data['plan-0'].box")
    scale = plan.bounding_box()["width"] / plan.evaluate("e => e.viewBox.baseVal.width")
    plan.hover(position={"x": scale * (left + 2.5 * across), "y": scale * (top + 1.5 * down)})
    text = tip.inner_text()
    assert (
        "client 2, layer fc2" in text
        and "keep" in text
        and "400\u00a0kB down, 200\u00a0kB up" in text
    )
    page.mouse.move(2, 2)
    assert tip.is_hidden()


def test_hostile_names_and_reasons_do_nothing(tmp_path: Path, visit: Callable[..., Opened]) -> None:
    names = [HOSTILE, *range(1, 6)]
    layers = (f"{HOSTILE}.w", "fc2", "fc3", "head")
    bad = tmp_path / "<img src=x onerror=window.hurt=1>"
    runs = [make_run(bad, names=names, layers=layers, reason=HOSTILE), make_run(tmp_path / "b")]
    page = visit(write_report(runs, tmp_path / "page.html")).page
    for query in ("svg[data-grid=plan-0]", "svg[data-chart=accuracy-0]"):
        page.locator(query).hover(position={"x": 260, "y": 20})
        assert page.locator("#tip").is_visible()
    page.locator("#find-0").fill("<img")
    assert HOSTILE in column(page, 0)
    assert page.evaluate("window.hurt") is None and page.locator("img").count() == 0
    assert page.locator("script").count() == 2


def test_the_policy_stops_markup_that_slipped_through(tmp_path: Path, browser: Any) -> None:
    path = write_report([make_run(tmp_path / "a")])
    html = path.read_text().replace("<main", f"<script>window.hurt=1</script>{HOSTILE}<main", 1)
    path.write_text(html)
    page = browser.new_page()
    page.goto(path.as_uri(), timeout=HANGS)
    assert page.locator("img").count() == 1  # it is there, and did nothing
    assert page.evaluate("window.hurt") is None
    page.close()


def test_five_hundred_clients_by_sixty_layers_open_from_under_two_mb(
    tmp_path: Path, visit: Callable[..., Opened]
) -> None:
    layers = [f"block{j // 4}.conv{j % 4}" for j in range(59)] + ["head"]
    folder = make_run(
        tmp_path / "big", names=range(500), layers=layers, rounds=300, eval_every=50, reason="stale"
    )
    about = json.loads((folder / "run.json").read_text())
    for i, client in enumerate(
        about["clients"]
    ):  # the worst case: no two clients and no two layers cost the same
        client["keep"] = {
            l: k if k == 1 else 0.1 + 0.8 * i / 500 for l, k in client["keep"].items()
        }
        client["layer_bytes"] = {
            l: [9 * (60 * i + j) ** 2, 7 * (i + 500 * j)] for j, l in enumerate(layers)
        }
    (folder / "run.json").write_text(json.dumps(about))
    path = write_report([folder])
    assert path.stat().st_size < 2 * MB
    page = visit(path).page
    assert len(column(page, 0)) == 500
    page.locator("#find-0").fill("499")
    assert column(page, 0) == ["499"]
    page.locator("svg[data-grid=plan-0]").hover()
    assert "layer" in page.locator("#tip").inner_text()


def test_a_run_without_a_single_round_opens(tmp_path: Path, visit: Callable[..., Opened]) -> None:
    page = visit(write_report([make_run(tmp_path / "a", rounds=1, finished=False)])).page
    assert page.get_by_text("not evaluated yet").count() >= 1
    page.locator("svg[data-chart=accuracy-0]").hover()
    assert page.locator("#tip").is_hidden()


DEVICE_TEXTS = (
    ".legend li",
    "figcaption",
    "svg[data-spots] .tick",
    "svg[data-spots] .axis",
    "svg[data-spots] .missed",
    "#time h3",
    "#traffic td",
)


@pytest.mark.parametrize("width", [1300, 400])
def test_pictures_of_devices_are_legible_on_wide_and_narrow_screens(
    tmp_path: Path, visit: Callable[..., Opened], width: int
) -> None:
    folder = add_devices(make_run(tmp_path / "a", names=range(16)), deadline=30)
    path = write_report([folder])
    for scheme in ("light", "dark"):
        page = visit(path, scheme).page
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        for query in DEVICE_TEXTS:
            assert contrast(page, f"{query}:visible") >= 4.5, (scheme, query)
        for name in ("fleet-0", "timeline-0", "accuracy-per-time-0", "accuracy-per-energy-0"):
            kind = "chart" if name.startswith("accuracy") else "spots"
            shown = f"svg[data-{kind}={name}{'-narrow' if width == 400 else ''}]"
            hidden = f"svg[data-{kind}={name}{'' if width == 400 else '-narrow'}]"
            assert page.locator(shown).is_visible() and page.locator(hidden).is_hidden()
            heights = page.locator(f"{shown} text").evaluate_all(
                "(texts) => texts.filter(t => !t.getAttribute('transform'))"
                ".map(t => t.getBoundingClientRect().height)"
            )
            assert heights and min(heights) >= 11  # pixels on the screen, with the line's spacing
            inside = page.locator(f"{shown} text").evaluate_all(
                "(texts) => texts.every(t => { const a = t.getBoundingClientRect(), "
                "b = t.closest('figure').getBoundingClientRect(); "
                "return a.left >= b.left && a.right <= b.right; })"
            )
            assert inside


def test_hovering_tells_who_a_dot_and_a_bar_are(
    tmp_path: Path, visit: Callable[..., Opened]
) -> None:
    page = visit(write_report([add_devices(make_run(tmp_path / "a", names=range(16)))])).page
    tip = page.locator("#tip")
    for key in ("fleet-0", "timeline-0", "fleet-0-narrow", "timeline-0-narrow"):
        page.set_viewport_size({"width": 400 if key.endswith("narrow") else 1300, "height": 900})
        picture = page.locator(f"svg[data-spots={key}]")
        # the middle of the screen, where the header does not cover it
        picture.evaluate("e => e.scrollIntoView({block: 'center'})")
        spots = page.evaluate(f"data['{key}']")
        spots |= page.evaluate(f"data['{spots.get('texts_of', key)}']") | spots
        scale = picture.bounding_box()["width"] / picture.evaluate("e => e.viewBox.baseVal.width")
        k = len(spots["y"]) - 1
        x = spots["x"][k] if spots["x"] else 200
        picture.hover(position={"x": scale * x, "y": scale * spots["y"][k]})
        assert spots["titles"][k] in tip.inner_text()
        assert all(line in tip.inner_text() for line in spots["lines"][k])
    page.mouse.move(2, 2)
    assert tip.is_hidden()


@pytest.mark.parametrize("width", [1300, 400])
def test_a_score_that_is_no_share_has_no_percent_sign_on_any_screen(
    tmp_path: Path, visit: Callable[..., Opened], width: int
) -> None:
    page = visit(write_report(regression_runs(tmp_path / "runs"), tmp_path / "page.html")).page
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(SMALL) == []
    for name in ("score-0", "score-per-mb-0", "score-per-time-0"):
        chart = page.locator(f"svg[data-chart={name}{'-narrow' if width == 400 else ''}]")
        assert chart.is_visible()
        assert "RMSE" in chart.locator(".axis").all_text_contents()
        assert not [tick for tick in chart.locator(".tick").all_text_contents() if "%" in tick]
    assert not [text for text in column(page, 12) + column(page, 13) if "%" in text]  # G and P
    page.locator(f"svg[data-chart=score-0{'-narrow' if width == 400 else ''}]").hover()
    assert "%" not in page.locator("#tip").inner_text()
