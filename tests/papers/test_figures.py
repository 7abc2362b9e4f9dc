"""The papers' figures: their declarations, what is stored for them, and the values that are drawn."""

import json

import numpy as np
import pytest
from paper_entries import entry

from holdfast.core.errors import HoldfastError
from holdfast.papers.cells import Cell, plan
from holdfast.papers.figure_panels import PANELS, draw_figure, figure_panels
from holdfast.papers.published import load_tables, select_tables
from holdfast.papers.recorded_curves import record_curves
from holdfast.papers.results import Results
from holdfast.papers.results_page import write_page
from holdfast.papers.sweep import Sweep

TABLES = load_tables()
FIGURES = {key: table for key, table in TABLES.items() if table.drawing is not None}


def lines(panel):
    return {line.name: line.y.tolist() for line in panel.lines}


def figure_on_page(folder, key):
    text = (folder / "docs" / "results" / f"{key.split('/')[0]}.md").read_text()
    return text.split(f'<a id="{key.replace("/", "-")}"></a>')[1].split("<a id=")[0]


def test_the_figures_of_four_papers_are_there_and_no_search_or_table_of_numbers():
    assert list(FIGURES) == [
        "fedntd/fig7", "fedka/fig2", "fedka/fig3", "fedka/fig6", "fedfa/fig3", "fedfa/fig10", "fedfa/fig11",
        "fedfa/fig12", "fedfa/fig13", "fedmlp/fig3", "fedmlp/fig4",
    ]  # fmt: skip
    for table in FIGURES.values():
        assert not table.is_search
        assert not table.published
        assert set(table.drawing.panels) <= set(PANELS)
        assert table.drawing.panels or table.drawing.swept
        assert set(table.drawing.classes) <= set(table.columns)
        assert table.drawing.shows.endswith(".")


@pytest.mark.parametrize("name", ["fedka/fig9", "fedka/figure3"])
def test_a_figure_that_does_not_exist_is_one_sentence(name):
    with pytest.raises(HoldfastError, match=f"unknown figure '{name}'"):
        select_tables(name)


def test_a_figure_is_selected_by_its_name_and_with_its_paper():
    assert [table.id for table in select_tables("fedka/fig3")] == ["fedka/fig3"]
    assert FIGURES["fedka/fig3"] in select_tables("fedka")


def test_figures_share_the_runs_that_have_the_same_settings():
    def hashes(name):
        return {cell.hash for cell in plan(TABLES[name])}

    assert hashes("fedka/fig2") < hashes("fedka/fig6")
    assert hashes("fedfa/fig10") < hashes("fedfa/table6")
    assert hashes("fedfa/fig11") <= hashes("fedfa/table7")
    assert hashes("fedfa/fig12") == hashes("fedfa/fig3")
    assert len(hashes("fedfa/fig13") & hashes("fedfa/fig3")) == 1


# What is stored -------------------------------------------------------------------------------------------


def records():
    """Two rounds; client 1 takes part in the second alone."""
    return [
        {
            "participants": [0],
            "locals": {"global_before": [0.5, 0.2], "class_accuracy": [[1.0, 0.0]]},
            "local_in": [0.9],
            "local_out": [None],
        },
        {
            "participants": [0, 1],
            "locals": {"global_before": [0.6, 0.4], "class_accuracy": [[1.0, 0.1], [0.3, 0.8]]},
            "local_in": [0.8, 0.6],
            "local_out": [0.2, 0.4],
        },
    ]


def test_the_curves_of_a_run_follow_from_its_records():
    federation = {"stages": 2, "label_counts": [[[3, 1], [0, 4]], [[3, 1], [0, 0]]]}
    names = ("before@1", "after@1", "local-in", "local-out", "label-counts")
    assert record_curves(names, records(), federation) == {
        "before@1": [[None, None], [0.6, 0.4]],
        "after@1": [[None, None], [0.3, 0.8]],
        "local-in": [0.9, pytest.approx(0.7)],
        "local-out": [None, pytest.approx(0.3)],
        "label-counts": [[3, 1], [0, 4]],
    }


def test_accuracy_by_task_is_the_mean_of_the_last_ten_epochs():
    values = np.arange(36) / 100  # 12 epochs of 3 stages
    stream = [{"stage": i % 3, "stream": {"A_sel": value}} for i, value in enumerate(values.tolist())]
    (curve,) = record_curves(["A_sel-by-task"], stream, {}).values()
    assert curve == pytest.approx(values.reshape(12, 3)[-10:].mean(0))


def test_a_run_without_the_curves_of_a_figure_is_run_for_it_and_then_has_them(tmp_path):
    settings = {"data": "digits", "partition": "iid", "clients": 3, "model": "mlp:8", "method": "fedavg", "rounds": 2,
                "evaluate_locals": True, "local_test_samples": 100}  # fmt: skip
    of_table = Cell("fedka/table0", "digits", "fedavg", 0, settings)
    of_figure = Cell(
        "fedka/fig0", "digits", "fedavg", 0, settings, curves=("before@2", "after@2", "local-in")
    )
    assert of_table.hash == of_figure.hash
    sweep = Sweep(tmp_path / "results", tmp_path / "work", "cpu")
    sweep.run([of_table], 1, print)
    assert Results(tmp_path / "results").get(of_figure) is None
    sweep.run([of_figure], 1, print)
    results = Results(tmp_path / "results")
    found = results.get(of_figure)
    assert np.array(found["curves"]["after@2"]).shape == (2, 10)
    assert len(found["curves"]["local-in"]) == 2
    assert "after@2" not in results.get(of_table)["curves"]  # a table keeps its own run
    assert json.loads((tmp_path / "results" / "fedka" / "fig0.json").read_text())["table"] == "fedka/fig0"


# What is drawn --------------------------------------------------------------------------------------------


def test_the_forgetting_degree_of_a_class_is_that_of_the_stored_accuracies(tmp_path):
    table, results = FIGURES["fedka/fig6"], Results(tmp_path)
    before, after = np.full((3, 10), 0.5), np.full((3, 10), 0.9)
    before[:, 4], after[:, 4] = [0.0, 0.4, 0.5], [0.3, 0.1, 0.6]
    for cell in plan(table):
        one = entry(cell, [0.1, 0.2, 0.3])
        lower = 0.0 if cell.row == "fedavg" else 0.1
        counts = np.zeros((10, 10), int).tolist()
        one["curves"] |= {
            "before@7": before.tolist(),
            "after@7": (after - lower).tolist(),
            "label-counts": counts,
        }
        results.add(cell, one)
    degree, accuracy = figure_panels(table, plan(table), results)
    assert degree.title == "CIFAR-10: client 7, class 4"
    # The first is (0 - 0.3) / ξ, which is drawn at -1.
    assert lines(degree)["FedAvg"] == pytest.approx([-1, 0.75, -0.2], abs=1e-3)
    assert lines(degree)["FedKA"] == pytest.approx([-1, 1.0, 0.0], abs=1e-3)
    assert lines(accuracy) == {
        "FedAvg": pytest.approx([0.3, 0.1, 0.6]),
        "FedKA": pytest.approx([0.2, 0.0, 0.5]),
    }


def test_every_class_of_a_client_has_a_line_with_its_samples(tmp_path):
    table, results = FIGURES["fedka/fig2"], Results(tmp_path)
    (cell,) = plan(table)
    one, counts = entry(cell, [0.1, 0.2]), np.zeros((10, 10), int)
    counts[7, :3] = [1906, 0, 23]
    after = np.tile(np.arange(10) / 10, (2, 1)).tolist()
    one["curves"] |= {
        "before@7": np.full((2, 10), 0.5).tolist(),
        "after@7": after,
        "label-counts": counts.tolist(),
    }
    results.add(cell, one)
    bubbles, degrees = figure_panels(table, [cell], results)
    np.testing.assert_array_equal(bubbles.counts[0], counts)
    drawn = lines(degrees)
    assert list(drawn)[:3] == ["class 0 (1,906)", "class 1 (0)", "class 2 (23)"]
    assert [line.dashed for line in degrees.lines][:3] == [False, True, False]
    assert drawn["class 2 (23)"] == pytest.approx([0.6, 0.6], abs=1e-3)


def test_a_figure_over_settings_has_the_mean_of_the_last_ten_rounds_at_each_value(tmp_path):
    table, results = FIGURES["fedfa/fig3"], Results(tmp_path)
    cells = plan(table, rows=["fedavg", "fedfa"], seeds=2)
    for cell in cells:
        level = (
            0.3
            + 0.1 * (cell.row == "fedfa")
            + 0.01 * cell.settings["local_epochs"]
            + 0.1 * (cell.seed == 2022)
        )
        results.add(cell, entry(cell, [0.1] * 10 + [level] * 10))
    panels = {panel.title: panel for panel in figure_panels(table, cells, results)}
    assert list(panels) == ["clients per round", "batch size", "local epochs"]
    assert [line.x.tolist() for line in panels["clients per round"].lines] == [[5, 10, 20]] * 2
    assert panels["batch size"].lines[0].x.tolist() == [32, 64, 128]
    assert panels["local epochs"].lines[0].x.tolist() == [1, 5, 10, 20]
    assert lines(panels["local epochs"])["FedFA"] == pytest.approx([0.46, 0.5, 0.55, 0.65])
    assert lines(panels["batch size"])["FedAvg"] == pytest.approx([0.4, 0.4, 0.4])


def test_curves_of_each_column_have_a_line_for_each_method_with_runs(tmp_path):
    table, results = FIGURES["fedmlp/fig4"], Results(tmp_path)
    (cell,) = plan(table, ["cifar10:s=4"], ["fedmlp"])
    one = entry(cell, [0.1] * 5)
    one["curves"] |= {"A_sel-by-task": [0.9, 0.8, 0.7], "A_sel_t-by-task": [0.8, 0.6, None]}
    results.add(cell, one)
    every, minority = figure_panels(table, plan(table), results)
    assert lines(every) == {"FedMLP": [0.9, 0.8, 0.7]}
    np.testing.assert_array_equal(minority.lines[0].y, [0.8, 0.6, np.nan])
    assert every.lines[0].x.tolist() == [1, 2, 3]
    assert (every.x_label, every.y_label) == ("task", "A_sel")


def test_nothing_is_drawn_where_nothing_was_run(tmp_path):
    table = FIGURES["fedka/fig3"]
    assert draw_figure(table, plan(table), Results(tmp_path / "results"), tmp_path) is None
    assert not list(tmp_path.glob("*.svg"))
    write_page(tmp_path / "results", tmp_path / "docs" / "results.md")
    for key in FIGURES:
        of_figure = figure_on_page(tmp_path, key)
        assert f"## {key}: {FIGURES[key].title}" in of_figure
        assert "Not run." in of_figure
        assert "Ours:" not in of_figure


def test_a_figure_with_runs_is_on_the_page_with_what_both_show(tmp_path):
    table = FIGURES["fedfa/fig11"]
    for cell in plan(table, rows=["fedfa-lambda-0.9", "fedfa-lambda-0.9-random"]):
        Results(tmp_path / "results").add(cell, entry(cell, [0.2, 0.5]))
    write_page(tmp_path / "results", tmp_path / "docs" / "results.md")
    of_figure = figure_on_page(tmp_path, table.id)
    assert f"In the paper: {table.drawing.shows}" in of_figure
    assert "(../images/results/fedfa-fig11.svg)" in of_figure
    assert f"Ours: {table.drawing.ours}" in of_figure
    assert "Not run." not in of_figure
    drawn = (tmp_path / "docs" / "images" / "results" / "fedfa-fig11.svg").read_text()
    assert "λ = 0.9" in drawn
    assert "1 round FedAvg" not in drawn
    page = (tmp_path / "docs" / "results" / "fedfa.md").read_text()
    assert f"| [fedfa/fig11](#fedfa-fig11) | {table.title} | 2 of 3 |" in page
