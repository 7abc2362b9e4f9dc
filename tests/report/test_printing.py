"""Figures for print, and drawings of federations."""

import io

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure as Drawing
from PIL import Image
from rich.console import Console
from synthetic_runs import write_run

from holdfast.core.errors import HoldfastError
from holdfast.report import draw_federation, federation_text, figure
from holdfast.report.figures import build_figure
from holdfast.report.loading import group_runs, load_runs
from holdfast.report.panels import Figure, Line, Lines
from holdfast.report.printing import _PAINTERS, draw

COUNTS = np.array([[100, 0, 0, 3], [0, 50, 50, 0], [25, 25, 25, 25]])
NAMES = ["zero", "one", "two", "three"]


def ink(path):
    """The share of pixels that are not white."""
    return np.mean(np.asarray(Image.open(path).convert("L")) < 250)


@pytest.mark.parametrize("name", ["accuracy", "strip", "forgetting-degree", "divergence", "partition"])
def test_every_kind_of_panel_is_drawn(name, compared, tmp_path):
    out = figure(name, compared[:1], tmp_path / f"{name}.png")
    assert ink(out) > 0.01
    assert min(Image.open(out).size) > 600  # print needs the pixels


@pytest.mark.parametrize("name", ["classes", "strip", "partition"])
def test_names_of_a_hundred_classes_do_not_overlap(name, tmp_path):
    classes = [str(number) for number in range(100)]
    path = write_run(tmp_path / "x", rounds=3, clients=60, clients_per_round=50, classes=classes, probe=False)
    panel = build_figure(name, group_runs(load_runs([path]))).panels[0]
    wide = 7.0 if name == "partition" else 3.4
    drawing = Drawing(figsize=(wide, 8.0), dpi=100, layout="constrained")
    axes = drawing.subplots()
    with matplotlib.rc_context({"font.size": 8}):
        _PAINTERS[type(panel)](axes, panel)
        drawing.draw_without_rendering()
    letters = 8 / 72 * 100  # pixels of a line of text
    for axis, side in ((axes.xaxis, 0), (axes.yaxis, 1)):
        ticks = axis.get_ticklocs()
        places = axes.transData.transform(np.column_stack([ticks, ticks]))[:, side]
        assert len(places) > 2
        assert np.abs(np.diff(places)).min() > letters
    if name == "strip":
        dots = next(marks for marks in axes.collections if len(marks.get_offsets()))
        assert len(dots.get_offsets()) == panel.steps[-1].marked.sum() > 0


def test_vector_files_hold_text_and_are_the_same_every_time(compared, tmp_path):
    first = figure("accuracy", compared[:2], tmp_path / "a.svg").read_bytes()
    assert first == figure("accuracy", compared[:2], tmp_path / "b.svg").read_bytes()
    assert b"Test accuracy of the global model" in first
    pdf = figure("accuracy", compared[:2], tmp_path / "a.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert pdf == figure("accuracy", compared[:2], tmp_path / "b.pdf").read_bytes()
    assert b"/Type3" not in pdf


def test_refusals_come_before_any_work(compared, tmp_path):
    with pytest.raises(HoldfastError, match=r"written as \.pdf, \.png, \.svg"):
        figure("accuracy", [tmp_path / "nowhere"], tmp_path / "fig.jpeg")
    with pytest.raises(HoldfastError, match=r"cannot be drawn.*stream"):
        figure("stages", compared[:1], tmp_path / "fig.png")


def test_a_federation_is_drawn_with_stages_and_domains(tmp_path):
    out = draw_federation(
        np.stack([COUNTS, COUNTS[::-1]]), NAMES, ["mnist", "svhn", "svhn"], out=tmp_path / "f.svg"
    )
    text = out.read_text()
    for word in ("Stage 0", "Stage 1", "svhn", "three"):
        assert word in text


def test_a_federation_in_the_terminal():
    def shown(*what):
        console = Console(file=io.StringIO(), width=100)
        console.print(federation_text(*what))
        return console.file.getvalue()

    lines = shown(COUNTS, NAMES).splitlines()
    assert "█  ·" in lines[1]  # client 0: most of class 0, a few of class 3
    assert lines[1].split()[-2:] == ["2", "103"]
    assert "3 clients hold 303 samples, 100 to 103 each, of 2 to 4 of 4 classes." in lines[-1]
    many = shown(np.ones((1000, 4), dtype=int), NAMES)
    assert len(many.splitlines()) < 50
    assert "40 of 1000 clients" in many
    assert "[bold]x" in shown(COUNTS, NAMES, ["[bold]x", "b", "c"])  # a name is not markup


def test_counts_of_the_wrong_shape_are_one_sentence(tmp_path):
    with pytest.raises(HoldfastError, match=r"not \[3, 4\]"):
        federation_text(COUNTS, NAMES[:3])
    with pytest.raises(HoldfastError, match="one domain for each of 3 clients"):
        draw_federation(COUNTS, NAMES, ["a"], out=tmp_path / "x.png")


@pytest.mark.parametrize("panels", [1, 3])
def test_names_in_a_legend_are_never_cut_off(panels, tmp_path):
    rounds = np.arange(3.0)
    names = [
        "fedavg",
        *(f"fedmlp:alpha={n},use_prototype=false,use_inter_task=false,x=true" for n in range(9)),
    ]
    lines = [Line(name, rounds, rounds, colour) for colour, name in enumerate(names)]
    panel = Lines("a panel", "round", "accuracy", lines)
    draw(Figure("accuracy", "", "", "", [panel] * panels, ""), tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as image:
        dark = np.asarray(image.convert("L")) < 200
    assert not dark[:, :10].any()  # margins all around: what is cut off would reach the edge
    assert not dark[:, -10:].any()
    assert not dark[-10:].any()
