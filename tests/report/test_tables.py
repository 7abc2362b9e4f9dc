"""The leaderboard, against arithmetic on the records."""

import csv

import numpy as np
import pytest
from synthetic_runs import read_records, write_records, write_run

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.report.loading import group_runs, load_runs
from holdfast.report.tables import baseline_of, leaderboard, table


def test_csv_has_means_deviations_and_costs(compared):
    rows = {row["method"]: row for row in csv.DictReader(table(compared, "csv").splitlines())}
    runs = [read_records(path) for path in compared[2:4]]  # fedntd
    finals = np.array([run[-1]["accuracy"] for run in runs])
    row = rows["fedntd"]
    assert float(row["final accuracy (%)"]) == pytest.approx(100 * finals.mean())
    assert float(row["final accuracy (%) deviation"]) == pytest.approx(
        100 * abs(finals[0] - finals[1]) / np.sqrt(2)
    )
    accuracy = [np.array([record["class_accuracy"] for record in run]) for run in runs]
    forgotten = np.mean([np.mean(a[:-1].max(axis=0) - a[-1]) for a in accuracy])
    assert float(row["forgetting (%)"]) == pytest.approx(100 * forgotten)
    assert float(row["seconds"]) == pytest.approx(24 * 1.7)
    assert float(row["sent (MB)"]) == pytest.approx(24 * 8)
    assert row["seeds"] == "2"


def test_rounds_to_target_count_to_95_percent_of_the_best_method(compared):
    rows = {row["method"]: row for row in csv.DictReader(table(compared, "csv").splitlines())}
    curves = {path.name: [record["accuracy"] for record in read_records(path)] for path in compared}
    best = max(
        np.mean([max(curves[f"{m}-{s}"]) for s in range(2)]) for m in ("fedavg", "fedntd", "flashback")
    )
    first = [
        1 + next((i for i, a in enumerate(curves[f"flashback-{s}"]) if a >= 0.95 * best), -9)
        for s in range(2)
    ]
    assert min(first) > 1
    assert float(rows["flashback"]["rounds to target"]) == np.mean(first)
    assert rows["fedavg"]["rounds to target"] == ""


def test_markdown_and_latex_set_the_best_in_bold_and_escape_names(tmp_path):
    paths = [
        write_run(tmp_path / "a", "a_b|c&d%", keeps=0.2, rounds=5),
        write_run(tmp_path / "b", "good", keeps=0.9, rounds=5),
    ]
    markdown = table(paths, "markdown")
    assert r"a\_b\|c&d%" in markdown
    assert markdown.splitlines()[2].startswith("| good |")  # best final accuracy first
    assert markdown.splitlines()[2].count("**") >= 2
    latex = table(paths, "latex")
    assert r"a\_b|c\&d\%" in latex
    assert r"\textbf{" in latex
    assert latex.count(r"\\") == 3


def test_what_is_equal_as_it_is_shown_is_equally_good(tmp_path):
    paths = [write_run(tmp_path / name, name, rounds=3) for name in "abc"]
    for path, sent in zip(paths, (5_000_000, 5_000_001, 9_000_000), strict=True):
        records = [record | {"bytes_up": sent} for record in read_records(path)]
        write_records(path, records)
    rows = table(paths, "markdown").splitlines()[2:5]
    assert [("**27.0**" in row, "| 39.0 |" in row) for row in rows] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    assert all("**" not in row for row in table(paths[:2], "markdown").splitlines()[2:4])


def test_a_single_seed_has_no_deviation_and_no_p(tmp_path):
    text = table([write_run(tmp_path / "one", rounds=4)])
    assert "±" not in text.splitlines()[2]
    assert "| p |" not in text


def test_p_is_a_paired_t_test_against_the_baseline(tmp_path):
    from scipy.stats import ttest_rel

    paths = [
        write_run(tmp_path / f"{method}-{seed}", method, keeps=keeps, seed=seed, rounds=6)
        for method, keeps in (("low", 0.2), ("high", 0.9))
        for seed in range(4)
    ]
    finals = {path.name: read_records(path)[-1]["accuracy"] for path in paths}
    expected = ttest_rel(*([finals[f"{m}-{s}"] for s in range(4)] for m in ("low", "high"))).pvalue
    rows = {row["method"]: row for row in csv.DictReader(table(paths, "csv").splitlines())}
    assert float(rows["high"]["p"]) == pytest.approx(expected)
    difference = np.mean([finals[f"high-{s}"] - finals[f"low-{s}"] for s in range(4)])
    assert float(rows["high"]["difference (%)"]) == pytest.approx(100 * difference)
    assert rows["low"]["p"] == rows["low"]["difference (%)"] == ""  # the first method given
    assert "p: paired t-test against low over shared seeds." in table(paths)


def test_fedavg_is_the_baseline_wherever_it_is_in_the_order(tmp_path):
    paths = [
        write_run(tmp_path / f"{method}-{seed}", method, seed=seed, rounds=3)
        for method in ("fedprox", "fedavg", "fedntd")
        for seed in range(2)
    ]
    assert baseline_of(group_runs(load_runs(paths))).label == "fedavg"
    assert baseline_of(group_runs(load_runs(paths[4:] + paths[:2]))).label == "fedntd"


@pytest.mark.parametrize("methods", [("fedavg", "fedprox:mu=1"), ("fedprox:mu=1", "fedavg")])
def test_the_leaderboard_of_a_comparison_has_its_differences_and_p_values(tmp_path, methods):
    experiment = hf.Experiment(
        clients=4,
        clients_per_round=2,
        model="linear",
        rounds=3,
        lr=0.1,
        device="cpu",
        partition="dirichlet:0.3",
    )
    compared = hf.compare(methods, experiment, 3, out=tmp_path)
    expected = {row.method.partition(":")[0]: (row.difference, row.p_value) for row in compared.rows}
    assert expected[methods[0].partition(":")[0]] == (None, None)
    for paths in ([tmp_path], compared.paths, compared.paths[::-1]):
        board = leaderboard(group_runs(load_runs(paths)))
        found = {
            group.runs[0].method: (test.difference, test.p_value)
            for group, test in zip(board.groups, board.tests, strict=True)
        }
        assert found.keys() == expected.keys()
        for method, values in expected.items():
            assert found[method] == (values if None in values else pytest.approx(values))


def test_stream_and_domain_columns_appear_where_recorded(streamed):
    head = table(streamed).splitlines()[0]
    for name in ("A_loc (%)", "A_glo minority (%)", "worst domain (%)"):
        assert name in head


def test_an_unknown_format_is_one_sentence(compared):
    with pytest.raises(HoldfastError, match="did you mean markdown"):
        table(compared, "markdwn")
