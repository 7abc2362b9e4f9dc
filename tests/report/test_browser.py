"""The report in a browser: its drawings and its controls."""

import json

import pytest
from browsing import EVIL, MARKS, PICTURE
from synthetic_runs import CLASSES, read_records, write_records, write_run

from holdfast.report import write_report

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(compared, tmp_path_factory):
    return write_report(compared, tmp_path_factory.mktemp("report") / "report.html").as_uri()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_figure_has_marks(opened, report, theme):
    page = opened(report, color_scheme=theme)
    figures = page.eval_on_selector_all("[data-figure]", "all => all.map(f => f.dataset.figure)")
    assert len(figures) == 12
    marks = page.evaluate(MARKS)
    assert len(marks) > 30
    assert min(marks) > 60
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 23, 29)"
    assert dark == (theme == "dark")


def test_stream_figures_have_marks(opened, streamed, tmp_path):
    page = opened(write_report(streamed, tmp_path / "report.html").as_uri())
    assert {"stages", "domains"} <= set(
        page.eval_on_selector_all("[data-figure]", "a => a.map(f => f.dataset.figure)")
    )
    assert min(page.evaluate(MARKS)) > 60
    before = page.evaluate(PICTURE, "partition")
    page.locator("[data-figure=partition] input[type=range]").press("ArrowRight")
    assert page.locator("[data-figure=partition] output").inner_text() == "stage 1"
    assert page.evaluate(PICTURE, "partition") != before


def test_the_slider_chooses_a_round(opened, report):
    page = opened(report)
    slider, label = (
        page.locator("[data-figure=strip] input[type=range]"),
        page.locator("[data-figure=strip] output"),
    )
    assert label.inner_text() == "round 24"
    last = page.evaluate(PICTURE, "strip")
    slider.press("ArrowLeft")
    assert label.inner_text() == "round 23"
    assert slider.get_attribute("aria-valuetext") == "round 23"
    assert page.evaluate(PICTURE, "strip") != last
    slider.press("End")
    assert page.evaluate(PICTURE, "strip") == last


def test_legends_hide_and_show_by_mouse_and_by_keyboard(opened, report):
    page = opened(report)
    button = page.locator("[data-figure=accuracy] .key button", has_text="fedntd").first
    before = page.evaluate(PICTURE, "accuracy")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    hidden = page.evaluate(PICTURE, "accuracy")
    assert hidden != before
    button.press("Space")
    assert button.get_attribute("aria-pressed") == "true"
    assert page.evaluate(PICTURE, "accuracy") == before


def test_hovering_and_arrow_keys_show_the_recorded_values(opened, report, compared):
    page = opened(report)
    finals = [read_records(path)[-1]["accuracy"] for path in compared[:2]]
    expected = f"{100 * sum(finals) / 2:.1f} %"
    plot = page.locator("[data-figure=accuracy] .plot").first
    plot.focus()
    page.keyboard.press("End")
    announced = page.locator("[role=status]").last.inner_text()
    assert announced.startswith("round 24: ")
    assert f"fedavg {expected}" in announced
    page.mouse.move(0, 0)
    box = page.locator("[data-figure=accuracy] .u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    tip = page.locator(".tooltip")
    assert tip.is_visible()
    assert "round 24" in tip.inner_text()
    assert expected in tip.inner_text()
    page.locator("[data-figure=classes] .plot").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    first = read_records(compared[0])[0]["class_accuracy"][1]
    assert page.locator("[role=status]").last.inner_text() in (
        f"round 1: class automobile {100 * value / 200:.1f} %" for value in (round(first * 200),)
    )


def test_a_value_of_another_round_is_labelled_with_its_round(opened, tmp_path):
    paths = [write_run(tmp_path / name, name, rounds=rounds) for name, rounds in (("long", 9), ("short", 4))]
    records = read_records(paths[1])
    records[1]["accuracy"] = None
    write_records(paths[1], records)
    page = opened(write_report(paths, tmp_path / "report.html").as_uri())
    page.locator("[data-figure=accuracy] .plot").first.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert (
        f"short (round 3) {100 * records[2]['accuracy']:.1f} %"
        in page.locator("[role=status]").last.inner_text()
    )
    page.keyboard.press("ArrowRight")
    assert f"short {100 * records[2]['accuracy']:.1f} %" in page.locator("[role=status]").last.inner_text()
    page.keyboard.press("End")
    assert "short" not in page.locator("[role=status]").last.inner_text()


def test_dragging_zooms_and_a_double_click_goes_back(opened, report):
    page = opened(report)
    scale = """() => {
        const { min, max } = window.holdfastPage.views.get('accuracy').views[0].view.plot.scales.x;
        return [min, max];
    }"""
    assert page.evaluate(scale) == [1, 24]
    over = page.locator("[data-figure=accuracy] .u-over").first
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.25, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, middle, steps=5)
    page.mouse.up()
    low, high = page.evaluate(scale)
    assert 5 < low < 8
    assert 11 < high < 14
    page.mouse.dblclick(box["x"] + box["width"] * 0.4, middle)
    assert page.evaluate(scale) == [1, 24]
    plot = page.locator("[data-figure=accuracy] .plot").first
    plot.focus()
    page.keyboard.press("+")
    low, high = page.evaluate(scale)
    assert high - low == pytest.approx(11.5)
    page.keyboard.press("Escape")
    assert page.evaluate(scale) == [1, 24]
    # A heat map zooms by columns.
    columns = (
        "() => { const v = window.holdfastPage.views.get('classes').views[0].view; return v.to - v.from; }"
    )
    page.locator("[data-figure=classes] .plot").first.focus()
    page.keyboard.press("+")
    assert page.evaluate(columns) == 12
    page.keyboard.press("0")
    assert page.evaluate(columns) == 24


def test_the_leaderboard_sorts_and_the_numbers_open(opened, report):
    page = opened(report)
    names = lambda: page.eval_on_selector_all("#leaderboard tbody th", "all => all.map(c => c.textContent)")  # noqa: E731
    assert names()[0] == "flashback"
    page.get_by_role("button", name="final accuracy").click()
    page.get_by_role("button", name="final accuracy").press("Enter")
    assert names()[-1] == "flashback"
    assert page.locator("#leaderboard th[aria-sort=ascending]").count() == 1
    page.locator("[data-figure=partition] summary").click()
    rows = page.locator("[data-figure=partition] .numbers table").first.locator("tbody tr")
    rows.first.wait_for()  # the toggle event comes a moment later
    assert rows.count() == 20


def test_the_theme_can_be_switched(opened, report):
    page = opened(report, color_scheme="light")
    before = page.evaluate(PICTURE, "classes")
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate(PICTURE, "classes") != before


def test_a_narrow_screen_does_not_scroll_sideways(opened, report):
    page = opened(report, viewport={"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert min(page.evaluate(MARKS)) > 60


def test_a_narrow_table_keeps_words_whole(opened, tmp_path):
    settings = ("server_epochs", "temperature", "learning_rate", "gamma", "weighting", "smoothing")
    paths = [
        write_run(tmp_path / name, name, rounds=2, **dict.fromkeys(settings, number))
        for number, name in enumerate(("flashback", "fedavg"))
    ]
    address = write_report(paths, tmp_path / "report.html").as_uri()
    page = opened(address, viewport={"width": 390, "height": 800})
    cell = page.locator("section > .scroll > table:not(.board) td", has_text="flashback").first
    assert cell.bounding_box()["height"] < 40  # one line
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_paper_is_white_and_no_figure_is_wider_than_it(opened, report):
    page = opened(report, color_scheme="dark")
    before = page.evaluate(PICTURE, "classes")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function("() => document.querySelector('.uplot').clientWidth < 400")
    widths = page.eval_on_selector_all(
        ".plot :is(canvas, svg), table", "all => all.map(e => e.getBoundingClientRect().right)"
    )
    left = page.locator("main").bounding_box()["x"]
    assert max(widths) - left <= 681
    for host in page.locator(".panels .plot").all():  # and none overlaps its neighbour
        assert host.evaluate("e => e.firstElementChild.getBoundingClientRect().width <= e.clientWidth + 1")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert min(page.evaluate(MARKS)) > 60
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.wait_for_function(f"before => ({PICTURE})('classes') === before", arg=before)
    assert page.evaluate("document.documentElement.dataset.theme") is None


def test_circles_of_a_large_federation_are_drawn_at_once(opened, tmp_path):
    classes = [str(number) for number in range(100)]
    path = write_run(tmp_path / "x", rounds=2, clients=100, clients_per_round=3, classes=classes, probe=False)
    federation = json.loads((path / "federation.json").read_text())
    federation["label_counts"] = [[client + label for label in range(100)] for client in range(100)]
    (path / "federation.json").write_text(json.dumps(federation))
    page = opened(write_report([path], tmp_path / "report.html").as_uri())
    # Every circle is sized relative to the largest one, which is searched for once.
    assert (
        page.evaluate("""() => {
        const view = window.holdfastPage.views.get('partition').views[0].view, counts = view.panel.steps[0].counts;
        let read = 0;
        view.panel.steps[0].counts = new Proxy(counts, { get: (rows, key) => (read++, rows[key]) });
        view.paint();
        return read;
    }""")
        < 3 * 100 * 100
    )


def test_plots_have_text_alternatives_and_can_be_reached_by_keyboard(opened, report):
    page = opened(report)
    for plot in page.locator(".plot").all():
        assert plot.get_attribute("role") == "img"
        assert len(plot.get_attribute("aria-label")) > 40
        assert plot.get_attribute("tabindex") == "0"


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_single_round_and_flat_curves_are_drawn(opened, tmp_path, value):
    path = write_run(tmp_path / "flat", rounds=2, clients_per_round=2)
    record = read_records(path)[0]
    flat = {
        "accuracy": value,
        "class_accuracy": [value] * 10,
        "in_local": value,
    }
    flat |= {"local_in": [value] * 2, "local_forgetting": [value] * 2, "weight_divergence": [value] * 2}
    flat |= {"locals": {"class_accuracy": [[value] * 10] * 2, "accuracy": [value] * 2}, "loss": value}
    for rounds in (1, 2):
        write_records(path, [{**record, **flat, "round": number + 1} for number in range(rounds)])
        page = opened(write_report([path], tmp_path / f"{rounds}.html").as_uri())
        assert page.locator("[data-figure]").count() >= 5
        assert page.locator("[data-figure] .summary").first.inner_text()


def test_names_stay_names_in_the_report(opened, tmp_path):
    path = write_run(tmp_path / "x", EVIL, classes=[EVIL, *CLASSES[1:]], rounds=4)
    page = opened(write_report([path], tmp_path / "report.html").as_uri())
    page.locator("[data-figure=classes] .plot").first.focus()
    page.keyboard.press("ArrowRight")
    assert EVIL in page.locator(".tooltip").inner_text()
    assert page.evaluate("window.pwned") is None
