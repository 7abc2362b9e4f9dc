"""Comparisons: fair, reusable, and told in numbers that can be checked by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import holdfast as hf
from holdfast.runs import RunDirectory
from holdfast.training import session

EXPERIMENT = hf.Experiment(
    clients=6, clients_per_round=3, model="linear", rounds=4, lr=0.1, device="cpu", partition="dirichlet:0.3"
)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("comparison")
    told = []
    found = hf.compare(
        ["fedavg", "fedntd:beta=2"],
        EXPERIMENT,
        3,
        out=out,
        on_start=lambda method, seed: told.append((method, seed)),
    )
    return out, found, told


def records(out, method, seed):
    return [
        json.loads(line)
        for line in (out / method / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
    ]


def test_rows_are_what_the_runs_recorded(compared):
    out, found, told = compared
    assert told == [(m, seed) for seed in range(3) for m in ("fedavg", "fedntd:beta=2")]
    folders = {"fedavg": "fedavg", "fedntd:beta=2": "fedntd-beta=2"}
    finals = {}
    for row in found.rows:
        runs = [records(out, folders[row.method], seed) for seed in range(3)]
        finals[row.method] = [run[-1]["accuracy"] for run in runs]
        assert row.accuracy == finals[row.method]
        for run, forgetting, megabytes in zip(runs, row.forgetting, row.megabytes, strict=True):
            by_class = np.array([r["class_accuracy"] for r in run])
            assert forgetting == pytest.approx((by_class[:-1].max(0) - by_class[-1]).mean())
            # 650 float32 numbers to and from each of 3 clients in each of 4 rounds
            assert megabytes == pytest.approx(650 * 4 * 3 * 4 * 2 / 1e6)
    first, second = found.rows
    assert first.difference is None
    difference = np.subtract(finals["fedntd:beta=2"], finals["fedavg"])
    assert second.difference == pytest.approx(difference.mean())
    assert second.p_value == pytest.approx(stats.ttest_1samp(difference, 0).pvalue)


def test_the_target_is_a_share_of_the_best_methods_highest(compared):
    out, found, _ = compared
    highest = [
        np.mean([max(r["accuracy"] for r in records(out, folder, seed)) for seed in range(3)])
        for folder in ("fedavg", "fedntd-beta=2")
    ]
    assert found.target == pytest.approx(0.95 * max(highest))
    run = [r["accuracy"] for r in records(out, "fedavg", 1)]
    expected = next((i + 1 for i, a in enumerate(run) if a >= found.target), None)
    assert found.rows[0].rounds_to_target[1] == expected


def test_methods_of_one_seed_share_everything_but_the_method(compared):
    out, *_ = compared
    for seed in range(3):
        pair = [RunDirectory.open(out / m / f"seed-{seed}") for m in ("fedavg", "fedntd-beta=2")]
        assert pair[0].experiment["hash"] == pair[1].experiment["hash"]
        participants = [[r["participants"] for r in run.records()] for run in pair]
        assert participants[0] == participants[1]
    hashes = {RunDirectory.open(out / "fedavg" / f"seed-{s}").experiment["hash"] for s in range(3)}
    assert len(hashes) == 3


def test_finished_runs_are_read_and_missing_ones_made(compared):
    out, found, _ = compared
    told = []
    again = hf.compare(
        ["fedavg", "fedntd:beta=2", "fedprox"], EXPERIMENT, 3, out=out, target=found.target,
        on_start=lambda method, seed: told.append(method),
    )  # fmt: skip
    assert set(told) == {"fedprox"}
    assert again.rows[:2] == found.rows
    with pytest.raises(hf.HoldfastError, match=r"another lr: 0\.1, not 0\.2"):
        hf.compare(["fedavg"], replace(EXPERIMENT, lr=0.2), 1, out=out)


def test_an_interrupted_comparison_goes_on(tmp_path, compared):
    class Stop(Exception):
        pass

    def stop(record):
        if record["round"] == 3:
            raise Stop

    often = replace(EXPERIMENT, checkpoint_seconds=0.0)
    with pytest.raises(Stop):
        hf.compare(["fedavg"], often, 1, out=tmp_path, on_round=stop)
    rounds = []
    found = hf.compare(
        ["fedavg"], often, 1, out=tmp_path, on_round=lambda record: rounds.append(record["round"])
    )
    assert rounds == [4]
    assert found.rows[0].accuracy == compared[1].rows[0].accuracy[:1]


def test_everyone_gets_public_data_when_one_method_needs_it(tmp_path):
    short = replace(EXPERIMENT, rounds=1)
    found = hf.compare(["fedavg", "flashback"], short, [4], out=tmp_path)
    assert "flashback learns from public data" in found.notes[0]
    publics = {RunDirectory.open(path).experiment["public"] for path in found.paths}
    assert publics == {0.025}
    held = hf.federate(hf.load("digits"), hf.Dirichlet(0.3), clients=6, seed=4, public=0.025)
    assert RunDirectory.open(found.paths[0]).experiment["hash"] == held.hash


@pytest.mark.parametrize(
    ("methods", "seeds", "sentence"),
    [
        ([], 1, "at least one method"),
        (["fedavg", "fedavg"], 1, "named twice"),
        (["fedavg"], 0, "at least 1 seed"),
        (["fedavg", "fedntt"], 1, "did you mean fedntd"),
    ],
)
def test_comparisons_that_cannot_be_made(methods, seeds, sentence):
    with pytest.raises(hf.HoldfastError, match=sentence):
        hf.compare(methods, EXPERIMENT, seeds)


@pytest.mark.parametrize("target", [50, 0, -0.1, float("nan")])
def test_a_target_is_a_fraction(target):
    with pytest.raises(hf.HoldfastError, match=r"above 0, and at most 1 for an accuracy: 0\.5"):
        hf.compare(["fedavg"], EXPERIMENT, 1, target=target)


def test_a_run_that_cannot_be_written_stops_the_comparison(tmp_path, monkeypatch):
    saved = []

    def full(self, tensors):
        saved.append(self.path.parent.name)
        raise hf.HoldfastError(f"{self.path} cannot be written: the disk is full")

    monkeypatch.setattr(RunDirectory, "save_model", full)
    with pytest.raises(hf.HoldfastError, match=r"fedavg.*the disk is full"):
        hf.compare(["fedavg", "fedprox:mu=1", "fedntd"], EXPERIMENT, 1, out=tmp_path)
    assert saved == [
        "fedavg",
        "fedprox-mu=1",
    ]  # the next run was over when the first one's end was waited for
    monkeypatch.undo()
    found = hf.compare(["fedavg", "fedprox:mu=1", "fedntd"], EXPERIMENT, 1, out=tmp_path)  # goes on
    assert all(RunDirectory.open(path).finished for path in found.paths)


def test_what_one_method_refuses_is_said_before_another_trains(tmp_path):
    rounds = []
    with pytest.raises(
        hf.HoldfastError, match="fedrep trains the head before the last 1 of the local epochs"
    ):
        hf.compare(["fedavg", "fedrep"], EXPERIMENT, 1, out=tmp_path / "runs", on_round=rounds.append)
    assert rounds == []
    assert not (tmp_path / "runs").exists()


def test_looking_for_refusals_makes_no_engine(monkeypatch):
    # On many cores an engine is many copies of the model: seconds, for a comparison of seven methods.
    made = []
    choose = session.choose_engine
    monkeypatch.setattr(session, "choose_engine", lambda *args: made.append(args[1].name) or choose(*args))
    hf.compare(["fedavg", "fedntd"], EXPERIMENT, 1)
    assert made == ["fedavg", "fedntd"]


# The result as an object ----------------------------------------------------------------------------------


def test_a_comparison_prints_as_a_table(compared):
    _, found, _ = compared
    header, first, second, *notes = repr(found).splitlines()
    assert notes == found.notes
    assert header.split()[:3] == ["method", "accuracy", "forgetting"]
    for line, row in zip((first, second), found.rows, strict=True):
        values = 100 * np.array(row.accuracy)
        assert line.startswith(f"{row.method} ")
        assert f"{values.mean():.2f} ± {values.std(ddof=1):.2f}" in line
    assert second.endswith(f"{found.rows[1].p_value:.3f}")
    ends = {line.index("±") for line in (first, second)}
    assert len(ends) == 1  # columns are aligned
    page = found._repr_html_()
    assert all(
        f">{cell}<" in page for cell in second.split("  ") if cell and "±" not in cell and " " not in cell
    )


def test_a_comparison_as_a_frame(compared):
    pytest.importorskip("pandas")
    _, found, _ = compared
    frame = found.to_frame()
    assert frame[["method", "seed"]].values.tolist() == [[r.method, s] for r in found.rows for s in range(3)]
    assert frame["accuracy"].tolist() == [value for row in found.rows for value in row.accuracy]


def test_a_comparison_is_drawn_with_its_own_labels(compared, tmp_path):
    out, found, _ = compared
    axes = found.plot().axes[0]
    assert [line.get_label() for line in axes.lines] == ["fedavg", "fedntd:beta=2"]
    for line, row in zip(axes.lines, found.rows, strict=True):
        assert line.get_ydata()[-1] == pytest.approx(np.mean(row.accuracy))
    page = found.report()
    assert page == out / "report.html"
    assert "fedntd:beta=2" in page.read_text()
    page.unlink()
    in_memory = hf.compare(
        {"a <b>": "fedavg", "c": "local"}, replace(EXPERIMENT, rounds=2), 1, progress=False
    )
    written = in_memory.report(tmp_path / "page.html").read_text()
    assert "a \\u003cb>" in written
    assert "a <b>" not in in_memory._repr_html_()
    with pytest.raises(
        hf.HoldfastError, match="unknown metric of these runs 'acuracy'; did you mean accuracy"
    ):
        in_memory.plot("acuracy")


def test_a_comparison_is_read_from_its_directory(tmp_path):
    with pytest.raises(hf.HoldfastError, match=r"holds no comparison: there are no runs in METHOD/seed-N"):
        hf.Comparison.open(tmp_path)
    methods, seeds = ["local", "fedntd:beta=2", "fedavg"], [3, 11]
    found = hf.compare(methods, replace(EXPERIMENT, rounds=2), seeds, out=tmp_path, progress=False)
    again = hf.Comparison.open(tmp_path)
    assert [row.method for row in again.rows] == ["local", "fedavg", "fedntd-beta=2"]  # the baseline first
    for row, before in zip(again.rows, (found.rows[0], found.rows[2], found.rows[1]), strict=True):
        assert replace(row, method=before.method) == before
    assert again.paths[:2] == [tmp_path / "local" / f"seed-{seed}" for seed in seeds]
    (tmp_path / "fedavg" / "seed-3" / "model.safetensors").unlink()
    with pytest.raises(hf.HoldfastError, match="seed-3 is not finished"):
        hf.Comparison.open(tmp_path)
