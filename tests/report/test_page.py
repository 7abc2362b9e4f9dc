"""The report as a file: self-contained, small, safe; test_browser.py has what a browser draws of it."""

import base64
import errno
import hashlib
import json
import re

import pytest
from synthetic_runs import CLASSES, write_run

from holdfast.core.errors import HoldfastError
from holdfast.report import figure, forgetting_figures, write_report
from holdfast.report.figures import FIGURES, build_figure
from holdfast.report.loading import group_runs, load_runs


def model_of(page):
    return json.loads(re.search(r'id="model">(.*?)</script>', page, re.S)[1])


def built_strip(paths):
    return build_figure("strip", group_runs(load_runs(paths))).panels


@pytest.fixture(scope="module")
def page(compared, tmp_path_factory):
    return write_report(compared, tmp_path_factory.mktemp("page") / "new" / "report.html").read_text()


def test_the_page_loads_nothing_else(page):
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", page)
    assert "@import" not in page
    assert "url(" not in page


def test_its_policy_allows_its_own_script_and_style_only(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; ")
    for tag in ("script", "style"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_it_contains_every_figure_or_the_reason_for_its_absence(page):
    model = model_of(page)
    shown = {figure["name"] for figure in model["figures"]}
    left_out = {title for title, _ in model["missing"]}
    assert shown | {name for name, kind in FIGURES.items() if kind.title in left_out} == set(FIGURES)
    assert shown == set(FIGURES) - {"stages", "domains"}
    assert all(figure["reading"] and figure["summary"] for figure in model["figures"])
    assert len(model["leaderboard"]["rows"]) == 3
    assert len(model["incidents"]["rows"]) == 6
    assert model["incidents"]["counts"] == "6 x nan"


def test_the_same_runs_give_the_same_bytes(compared, tmp_path):
    first = write_report(compared[:2], tmp_path / "a.html").read_bytes()
    assert first == write_report(compared[:2], tmp_path / "b.html").read_bytes()


def test_200_rounds_of_100_clients_stay_under_5_mib(tmp_path):
    path = write_run(tmp_path / "big", rounds=200, clients=100, clients_per_round=100)
    out = write_report([path], tmp_path / "report.html")
    assert out.stat().st_size < 2 * 1024**2
    steps = next(f for f in model_of(out.read_text())["figures"] if f["name"] == "strip")["panels"][0][
        "steps"
    ]
    assert len(steps) == 199  # every round can be chosen


def test_a_long_comparison_thins_the_rounds_of_the_slider(compared, monkeypatch):
    whole = built_strip(compared)
    monkeypatch.setattr(forgetting_figures, "MAX_CELLS", 600)
    thinned = built_strip(compared)
    assert [len(panel.steps) for panel in whole] == [23, 23, 23]
    for panel in thinned:
        assert 2 <= len(panel.steps) < 6
        assert (panel.steps[0].name, panel.steps[-1].name) == ("round 2", "round 24")


def test_names_cannot_become_markup(tmp_path):
    evil = "</script><script>alert(1)</script>"
    path = write_run(
        tmp_path / "x", f"<img src=x onerror=alert(2)>{evil}", classes=[evil, *CLASSES[1:]], rounds=3
    )
    page = write_report([path], tmp_path / "report.html").read_text()
    assert page.count("<script") == page.count("</script") == 2
    assert "<img" not in page
    assert model_of(page)["figures"][1]["panels"][0]["steps"][0]["rows"][0] == evil


def test_a_path_that_cannot_be_written_is_one_sentence(compared, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HoldfastError, match=r"cannot write .*report.html: a file exists"):
        write_report(compared[:1], tmp_path / "file" / "report.html")


def test_a_report_that_cannot_be_written_leaves_the_old_one(compared, tmp_path, monkeypatch):
    out = write_report(compared[:1], tmp_path / "report.html")
    before = out.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("holdfast.core.files.write_all", full)
    for write in (write_report, lambda runs, out: figure("accuracy", runs, out)):
        place = out if write is write_report else out.with_suffix(".svg")
        with pytest.raises(HoldfastError, match="no space is left"):
            write(compared[:2], place)
    assert out.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
