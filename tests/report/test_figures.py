"""The content of the figures, against arithmetic on the records."""

import json
from itertools import pairwise

import numpy as np
import pytest
import yaml
from synthetic_runs import CLASSES, read_records, write_records, write_run

from holdfast.core.errors import HoldfastError
from holdfast.report.curves import NotRecorded
from holdfast.report.figures import FIGURES, build_figure
from holdfast.report.loading import group_runs, load_runs
from holdfast.report.panels import Line, cell_bytes, rounded, thin


def built(name, paths):
    return build_figure(name, group_runs(load_runs(paths)))


def test_runs_that_differ_only_in_seed_are_one_group(compared):
    groups = group_runs(load_runs(compared))
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("fedavg", 2),
        ("fedntd", 2),
        ("flashback", 2),
    ]
    assert len({group.colour for group in groups}) == 3


def test_labels_name_what_differs(tmp_path):
    paths = [write_run(tmp_path / f"b{beta}", "fedntd", rounds=3, beta=beta, tau=1.0) for beta in (0.3, 1.0)]
    assert [group.label for group in group_runs(load_runs(paths))] == [
        "fedntd (beta=0.3)",
        "fedntd (beta=1.0)",
    ]


def test_labels_name_the_data_where_methods_did_not_learn_the_same(tmp_path):
    paths = [write_run(tmp_path / method, method, rounds=3) for method in ("fedavg", "fedntd")]
    assert [group.label for group in group_runs(load_runs(paths))] == ["fedavg", "fedntd"]
    experiment = yaml.safe_load((paths[1] / "experiment.yaml").read_text()) | {
        "data": {"name": "svhn"},
        "lr": 0.5,
    }
    (paths[1] / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    assert [group.label for group in group_runs(load_runs(paths))] == [
        "fedavg (data=cifar10)",
        "fedntd (data=svhn)",
    ]


def test_accuracy_is_the_mean_over_seeds_with_a_sample_deviation(compared):
    line = built("accuracy", compared).panels[0].lines[0]
    table = np.array([[record["accuracy"] for record in read_records(path)] for path in compared[:2]])
    np.testing.assert_allclose(line.y, table.mean(axis=0))
    np.testing.assert_allclose(line.high - line.y, np.abs(table[0] - table[1]) / np.sqrt(2), atol=1e-12)
    assert line.x.tolist() == list(range(1, 25))


def test_seeds_of_different_length_are_averaged_where_they_are_known(tmp_path):
    paths = [write_run(tmp_path / f"s{seed}", seed=seed, rounds=4) for seed in range(2)]
    lines = (paths[1] / "metrics.jsonl").read_text().splitlines()
    (paths[1] / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    line = built("accuracy", paths).panels[0].lines[0]
    assert line.x.tolist() == [1, 2, 3, 4]
    assert line.y[3] == pytest.approx(read_records(paths[0])[3]["accuracy"])


def test_heat_map_has_a_row_a_class_and_a_column_a_round(compared):
    panel = built("classes", compared).panels[1]  # fedntd, seed 0
    assert list(panel.steps[0].rows) == CLASSES
    expected = np.array([record["class_accuracy"] for record in read_records(compared[2])]).T
    np.testing.assert_allclose(panel.steps[0].values, expected)


def test_the_class_that_was_forgotten_most_is_named_with_its_best_round(compared, tmp_path):
    accuracy = np.array([record["class_accuracy"] for record in read_records(compared[0])])
    lost = accuracy.max(axis=0) - accuracy[-1]
    best, weakest = accuracy[:, lost.argmax()], accuracy[-1].argmin()
    assert built("classes", compared[:1]).summary == (
        f"Forgotten most: fedavg: {CLASSES[lost.argmax()]} ({best.max():.1%} in round {best.argmax() + 1}, "
        f"{best[-1]:.1%} at the end). Weakest class at the end: fedavg: {CLASSES[weakest]} "
        f"({accuracy[-1, weakest]:.1%})."
    )
    assert "Forgotten most" not in built("classes", [write_run(tmp_path / "one", rounds=1)]).summary


def test_runs_are_named_apart_and_counted_once(tmp_path):
    paths = [
        write_run(tmp_path / method / f"seed-{s}", method, seed=s, rounds=2)
        for method in "ab"
        for s in (0, 1)
    ]
    names = ["a/seed-0", "a/seed-1", "b/seed-0", "b/seed-1"]
    assert [run.name for run in load_runs(paths)] == names
    assert [run.name for run in load_runs([tmp_path, tmp_path / "a", paths[0]])] == names
    assert [run.name for run in load_runs(paths[:1])] == ["seed-0"]


def test_a_data_set_in_a_file_is_shown_by_its_name(tmp_path):
    path = write_run(tmp_path / "x", rounds=2)
    experiment = yaml.safe_load((path / "experiment.yaml").read_text()) | {
        "data": "/somewhere/private/mine.npz"
    }
    (path / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    assert load_runs([path])[0].dataset == "mine.npz"


def test_a_partition_that_differs_by_seed_is_labelled_with_its_seed(tmp_path):
    paths = [write_run(tmp_path / f"s{seed}", seed=seed, rounds=2) for seed in (4, 5)]
    assert built("partition", paths).panels[0].title == "Seed 4: Samples per client and class"
    assert built("partition", paths[:1]).panels[0].title == "Samples per client and class"
    (paths[1] / "federation.json").write_text((paths[0] / "federation.json").read_text())
    assert built("partition", paths).panels[0].title == "Samples per client and class"


def test_strip_shows_the_model_before_every_local_and_the_model_after(compared):
    panel = built("strip", compared).panels[0]
    records, counts = (
        read_records(compared[0]),
        json.loads((compared[0] / "federation.json").read_text())["label_counts"],
    )
    step = next(step for step in panel.steps if step.name == "round 10")
    np.testing.assert_allclose(step.values[0], records[8]["class_accuracy"])
    np.testing.assert_allclose(step.values[1:-1], records[9]["locals"]["class_accuracy"])
    np.testing.assert_allclose(step.values[-1], records[9]["class_accuracy"])
    held = [[counts[client][c] > 0 for c in range(10)] for client in records[9]["participants"]]
    np.testing.assert_array_equal(step.marked[1:-1], held)
    assert step.rows[1] == f"client {records[9]['participants'][0]}"
    assert panel.steps[0].name == "round 2"  # round 1 has no model before it


def test_local_models_are_compared_with_the_global_model_before_on_the_same_samples(tmp_path):
    path = write_run(tmp_path / "x", rounds=6)
    records = read_records(path)
    for record in records:  # as tested on a part of the test set, where the global model has another accuracy
        record["locals"]["global_before"] = [0.1 * record["round"]] * 10
        record["locals"]["global_after"] = [0.9] * 10
    for record in records[:4]:  # and the global model was tested on all of it in the last two rounds only
        del record["accuracy"], record["class_accuracy"]
    write_records(path, records)
    strip = built("strip", [path])
    assert [step.name for step in strip.panels[0].steps] == ["round 5", "round 6"]
    np.testing.assert_allclose(strip.panels[0].steps[0].values[0], 0.5)
    np.testing.assert_allclose(strip.panels[0].steps[0].values[-1], 0.9)
    lost = [
        (0.1 * record["round"] - np.array(record["locals"]["class_accuracy"])).clip(0).mean()
        for record in records[4:]
    ]
    assert f"fedavg {np.mean(lost):.1%}" in strip.summary
    degrees = built("forgetting-degree", [path]).panels
    assert degrees[1].lines[0].x.tolist() == [2, 3, 4, 5, 6]


def test_an_untested_round_is_not_replaced_by_an_earlier_one(tmp_path):
    path = write_run(tmp_path / "x", rounds=6)
    records = read_records(path)
    del records[3]["accuracy"], records[3]["class_accuracy"]
    write_records(path, records)
    steps = built("strip", [path]).panels[0].steps
    assert [step.name for step in steps] == ["round 2", "round 3", "round 6"]


def test_forgetting_counts_losses_only_and_its_distribution_ends_at_one(compared):
    panels = built("forgetting", [compared[0]]).panels
    accuracy = np.array([record["class_accuracy"] for record in read_records(compared[0])])
    lost = np.array(
        [max(0.0, a - b) for a, b in zip(accuracy[:-1].ravel(), accuracy[1:].ravel(), strict=True)]
    )
    expected = lost.reshape(-1, 10).mean(axis=1)
    np.testing.assert_allclose(panels[0].lines[0].y, expected)
    cdf = panels[1].lines[0]
    assert cdf.y[-1] == 1.0
    middle = np.median(expected)
    assert cdf.y[np.searchsorted(cdf.x, middle, side="right") - 1] == pytest.approx(0.5, abs=0.05)
    local = panels[2].lines[0]
    np.testing.assert_allclose(
        local.y, [np.mean(record["local_forgetting"]) for record in read_records(compared[0])[1:]]
    )


def test_forgetting_degree_by_what_the_client_holds(compared):
    bars = built("forgetting-degree", [compared[0]]).panels[0]
    records = read_records(compared[0])
    counts = np.array(json.loads((compared[0] / "federation.json").read_text())["label_counts"])
    found = {"missing": [], "non-dominant": [], "dominant": []}
    for before, now in pairwise(records):
        for client, after in zip(now["participants"], now["locals"]["class_accuracy"], strict=True):
            for c in range(10):
                a, b, share = before["class_accuracy"][c], after[c], counts[client, c] / counts[client].sum()
                if a >= 0.01:
                    name = "missing" if share == 0 else "non-dominant" if share < 0.05 else "dominant"
                    found[name].append(max(-1.0, (a - b) / (a + 1e-5)))
    expected = [np.median(found[name]) for name in bars.categories]
    np.testing.assert_allclose(bars.bars[0].values, expected)
    assert bars.bars[0].values[0] > 0 > bars.bars[0].values[2]


def test_divergence_pairs_each_client_with_its_own_distance(compared):
    panels = built("divergence", [compared[0]]).panels
    records = read_records(compared[0])
    far = np.concatenate([record["distribution_distance"] for record in records])
    moved = np.concatenate([record["weight_divergence"] for record in records])
    np.testing.assert_allclose(panels[0].point_sets[0].x, far)
    np.testing.assert_allclose(panels[0].point_sets[0].y, moved)
    assert f"{np.corrcoef(far, moved)[0, 1]:.2f}" in built("divergence", [compared[0]]).summary


def test_features_are_shown_by_class_and_by_client_with_the_pairs(compared):
    by_class, by_client, pairs = built("features", [compared[0]]).panels
    probe = json.loads((compared[0] / "probe.json").read_text())
    places, labels, clients = (np.array(probe[key]) for key in ("tsne", "labels", "clients"))
    for panel, numbers_, wanted in ((by_class, labels, 3), (by_client, clients, 2)):
        cloud = panel.point_sets[wanted]
        np.testing.assert_array_equal(np.c_[cloud.x, cloud.y], places[numbers_ == wanted])
    assert by_class.point_sets[3].name == "cat"
    counts = np.array(probe["pairs"]["positive"])
    np.testing.assert_allclose(pairs.lines[0].y[:-1], counts / counts.sum())
    middle = np.arange(-0.975, 1, 0.05)
    assert f"fedavg {np.average(middle, weights=counts):.2f} and" in built("features", [compared[0]]).summary


def test_stream_accuracy_by_stage_is_the_mean_of_the_last_ten_epochs(streamed):
    panel = built("stages", [streamed[0]]).panels[0]
    records = read_records(streamed[0])
    expected = [
        np.mean([r["stream"]["A_sel"] for r in records if r["stage"] == stage][-10:]) for stage in range(5)
    ]
    assert panel.lines[0].x.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(panel.lines[0].y, expected)


def test_stream_accuracy_on_all_classes_and_on_each_task(streamed):
    panels = built("stages", [streamed[0]]).panels
    records = read_records(streamed[0])
    ends = [record for record in records if record["stage"] == 4]
    assert panels[1].lines[0].x.tolist() == [5, 10, 15, 20, 25, 30]
    np.testing.assert_allclose(panels[1].lines[1].y, [record["stream"]["A_glo_t"] for record in ends])
    expected = [np.mean(record["stream"]["task_accuracy"], axis=0) for record in records[25:30]]
    np.testing.assert_allclose(panels[3].steps[0].values, expected)


def test_forgetting_and_transfer_of_each_client_at_the_end(streamed):
    panel = built("stages", [streamed[0]]).panels[-1]
    last = read_records(streamed[0])[-1]["stream"]["transfer"]
    assert panel.categories == [str(values["client"]) for values in last]
    assert [bar.name for bar in panel.bars] == ["forgetting", "backward transfer", "forward transfer"]
    np.testing.assert_allclose(panel.bars[0].values, [values["average_forgetting"] for values in last])
    assert np.isnan(panel.bars[2].values[0])


def test_every_figure_is_built_from_some_run(compared, streamed):
    for name in FIGURES:
        paths = streamed if name in ("stages", "domains") else compared
        figure = built(name, paths)
        assert figure.summary
        assert figure.panels


def test_figures_without_their_records_raise_the_reason(tmp_path):
    path = write_run(tmp_path / "plain", rounds=3, probe=False)
    lines = read_records(path)
    for record in lines:
        for key in ("locals", "local_in", "local_out", "in_local", "out_local", "local_forgetting"):
            del record[key]
    write_records(path, lines)
    (path / "federation.json").unlink()
    for name in (
        "strip",
        "forgetting-degree",
        "in-out-local",
        "features",
        "feature-drift",
        "partition",
        "stages",
    ):
        with pytest.raises(NotRecorded, match=r"\w"):
            built(name, [path])
    assert len(built("forgetting", [path]).panels) == 2  # global only


def test_a_strip_needs_a_second_round(tmp_path):
    with pytest.raises(NotRecorded, match="a second round"):
        built("strip", [write_run(tmp_path / "one", rounds=1)])


def test_missing_records_of_a_stream_are_named_with_the_option_for_them(tmp_path):
    path = write_run(tmp_path / "stream", rounds=5, stream=True)
    lines = read_records(path)
    for record in lines:
        for key in ("stream", "weight_divergence"):
            del record[key]
    write_records(path, lines)
    for name in ("stages", "divergence"):
        with pytest.raises(NotRecorded, match=r"train with --evaluate-locals"):
            built(name, [path])
    with pytest.raises(NotRecorded, match="did not train on a stream"):
        built("stages", [write_run(tmp_path / "static", rounds=2)])


def test_rounds_without_evaluation_leave_no_gap(tmp_path):
    path = write_run(tmp_path / "sparse", rounds=9)
    lines = read_records(path)
    for record in lines:
        if record["round"] % 3:
            for key in ("accuracy", "class_accuracy", "loss"):
                record[key] = None
    write_records(path, lines)
    assert built("accuracy", [path]).panels[0].lines[0].x.tolist() == [3, 6, 9]
    assert built("classes", [path]).panels[0].columns == ["3", "6", "9"]


def test_unknown_figures_and_empty_runs_are_clear_errors(tmp_path, compared):
    with pytest.raises(HoldfastError, match="did you mean accuracy"):
        built("acuracy", compared)
    with pytest.raises(HoldfastError, match="no run given"):
        load_runs([])
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "experiment.yaml").write_text(yaml.safe_dump({"method": {"name": "fedavg"}}))
    with pytest.raises(HoldfastError, match="no finished round"):
        load_runs([tmp_path / "new"])


def test_numbers_on_the_page():
    assert rounded(np.array([0.123456, np.nan, 2.0])) == [0.1235, None, 2.0]
    assert cell_bytes(np.array([[0.0, 0.5], [1.0, np.nan]])).tolist() == [[0, 100], [200, 255]]
    kept = thin(10_000, 600)
    assert len(kept) <= 600
    assert kept[0] == 0
    assert kept[-1] == 9_999


def test_a_band_on_the_page_is_as_exact_as_its_curve():
    mean, spread = np.array([2.307412, 0.114206]), np.array([0.0, 0.0012])
    page = Line("x", np.arange(2.0), mean, 0, mean - spread, mean + spread).to_json()
    np.testing.assert_allclose(np.array(page["high"]) - page["y"], spread, atol=2e-6)
