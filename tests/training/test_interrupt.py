"""An interrupt keeps the last complete round; runs continue, also for more rounds, with the same bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import traceback
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.training import interrupt

DIGITS = hf.load("digits")
SMALL = {"lr": 0.1, "clients_per_round": 3, "seed": 0, "local_test_samples": 40}


@pytest.fixture(scope="module")
def federation():
    return hf.federate(DIGITS, hf.Dirichlet(alpha=0.3), clients=5, seed=0)


@pytest.fixture(autouse=True)
def default_handler():
    """Whoever runs the tests in the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def press(times, round=2):
    """An ``on_round`` that presses Ctrl-C after a round."""

    def on_round(record):
        for _ in range(times if record["round"] == round else 0):
            os.kill(os.getpid(), signal.SIGINT)

    return on_round


def same(one, other, but=("seconds",)):
    """Whether two runs have the same bits: weights and records, without the times."""
    weights = [run.model.state_dict() for run in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    texts = [
        [json.dumps({k: v for k, v in r.items() if k not in but}, default=repr) for r in run.records]
        for run in (one, other)
    ]
    return texts[0] == texts[1]


def test_the_run_so_far_is_returned(federation):
    with pytest.warns(hf.HoldfastWarning, match=r"interrupted after round 3 of 9; .* give out='runs/x'"):
        run = hf.train("fedavg", "linear", federation, rounds=9, on_round=press(1), **SMALL)
    assert run.interrupted
    assert [record["round"] for record in run.records] == [1, 2, 3]
    assert same(run, hf.train("fedavg", "linear", federation, rounds=3, **SMALL))


def test_an_interrupt_in_the_last_round_is_none(federation):
    run = hf.train("fedavg", "linear", federation, rounds=2, on_round=press(1), **SMALL)
    assert not run.interrupted


def test_a_second_interrupt_is_short(federation):
    with pytest.raises(KeyboardInterrupt) as caught:
        hf.train("fedavg", "linear", federation, rounds=9, on_round=press(2), **SMALL)
    assert len(traceback.extract_tb(caught.tb)) == 2  # this line, and where `train` raises
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("method", ["scaffold", "fedproc"])
def test_an_interrupt_leaves_a_checkpoint_at_once(federation, tmp_path, method, engine):
    settings = SMALL | {"rounds": 5, "engine": engine}
    with pytest.warns(hf.HoldfastWarning, match="interrupted after round 3 of 5; .*holdfast.resume"):
        hf.train(method, "linear", federation, out=tmp_path / "run", on_round=press(1), **settings)
    assert hf.RunDirectory.open(tmp_path / "run").load_checkpoint().round == 3
    with pytest.raises(hf.HoldfastError, match="has no final model yet"):
        hf.Run.open(tmp_path / "run")
    run = hf.resume(tmp_path / "run")
    assert same(run, hf.train(method, "linear", federation, **settings))
    assert not run.interrupted


def test_an_interrupt_while_a_checkpoint_is_written_changes_nothing(federation, tmp_path, monkeypatch):
    save = hf.RunDirectory.save_checkpoint

    def interrupted(self, round, *arguments):
        if round == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return save(self, round, *arguments)

    monkeypatch.setattr(hf.RunDirectory, "save_checkpoint", interrupted)
    with pytest.warns(hf.HoldfastWarning, match="interrupted after round 2 of 5"):
        hf.train(
            "scaffold", "linear", federation, rounds=5, checkpoint_seconds=0, out=tmp_path / "run", **SMALL
        )
    monkeypatch.undo()
    assert same(hf.resume(tmp_path / "run"), hf.train("scaffold", "linear", federation, rounds=5, **SMALL))


def test_a_handler_of_the_program_stays(federation):
    pressed = []
    signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    run = hf.train("fedavg", "linear", federation, rounds=4, on_round=press(1), **SMALL)
    assert (len(run.records), pressed) == (4, [1])
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_comparison_stops_and_goes_on(tmp_path):
    experiment = hf.Experiment(clients=5, model="linear", rounds=3, evaluate_locals=False)
    whole = hf.compare(["fedavg", "fedprox"], experiment, 1)
    with pytest.raises(KeyboardInterrupt, match="the same call continues"), pytest.warns(hf.HoldfastWarning):
        hf.compare(["fedavg", "fedprox"], experiment, 1, out=tmp_path, on_round=press(1, round=1))
    with pytest.raises(KeyboardInterrupt):  # now in the last round of a run, which is finished first
        hf.compare(["fedavg", "fedprox"], experiment, 1, out=tmp_path, on_round=press(1, round=3))
    assert hf.RunDirectory.open(tmp_path / "fedavg/seed-0").finished
    assert not (tmp_path / "fedprox/seed-0").exists()
    again = hf.compare(["fedavg", "fedprox"], experiment, 1, out=tmp_path)
    assert [row.accuracy for row in again.rows] == [row.accuracy for row in whole.rows]


def test_a_comparison_in_memory_cannot_go_on():
    experiment = hf.Experiment(clients=5, model="linear", rounds=3, evaluate_locals=False)
    lost = r"nothing of it is kept: give out='runs/mine' for one"
    with pytest.raises(KeyboardInterrupt, match=lost), pytest.warns(hf.HoldfastWarning):
        hf.compare(["fedavg", "fedprox"], experiment, 1, on_round=press(1, round=1))


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_has_not_begun_is_not_continued(tmp_path, monkeypatch, begun):
    def interrupted(experiment, out, **_):
        if begun:
            hf.RunDirectory.create(out, experiment.describe())
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hf.Experiment, "run", interrupted)
    done = CliRunner().invoke(app, ["run", "--data", "digits", "--clients", "3", "--out", "runs/x"])
    assert done.exit_code == 130
    advice = "stopped; continue with: holdfast resume runs/x" if begun else "stopped before the first round"
    assert done.stderr == f"holdfast: {advice}\n"


def test_in_a_terminal_a_sentence_says_what_happens(monkeypatch):
    written = []
    monkeypatch.setattr(interrupt, "is_terminal", lambda: True)
    monkeypatch.setattr(os, "write", lambda _, data: written.append(data.decode()))
    with interrupt.deferred_interrupt() as outer, interrupt.deferred_interrupt() as inner:
        assert inner is outer
        os.kill(os.getpid(), signal.SIGINT)
        assert outer.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert written == [f"\n{interrupt.NOTE}\n"]


# More rounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedntd", {}),
        ("fedntd", {"evaluate_every": 2, "probe_every": 2}),  # round 3 is tested only because it is the last
        ("fedntd", {"evaluate_every": 2, "evaluate_locals": False}),
        ("fedavgm", {"engine": "sequential", "lr_decay": 0.9}),
        ("fedmlp", {"local_epochs": 2}),  # has personal models
    ],
)
def test_a_finished_run_for_more_rounds_is_one_begun_with_them(federation, tmp_path, method, options):
    settings = SMALL | options
    hf.train(method, "mlp:8", federation, rounds=3, out=tmp_path / "run", **settings)
    run = hf.resume(tmp_path / "run", rounds=6)
    whole = hf.train(method, "mlp:8", federation, rounds=6, out=tmp_path / "whole", **settings)
    assert same(run, whole)
    assert same(hf.Run.open(tmp_path / "run"), hf.Run.open(tmp_path / "whole"))
    assert run.experiment["rounds"] == hf.RunDirectory.open(tmp_path / "run").experiment["rounds"] == 6


def test_an_extension_can_be_interrupted_anywhere(federation, tmp_path, monkeypatch):
    settings = SMALL | {"evaluate_every": 2}
    whole = hf.train("fedntd", "linear", federation, rounds=6, **settings)
    hf.train("fedntd", "linear", federation, rounds=3, out=tmp_path / "run", **settings)
    write = hf.RunDirectory.write

    def fails(self, name, data):
        if name == "experiment.yaml":
            raise OSError("power failure")
        write(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(hf.RunDirectory, "write", fails)
        with pytest.raises(OSError, match="power"):
            hf.resume(tmp_path / "run", rounds=6)
    shutil.copytree(tmp_path / "run", tmp_path / "former")
    assert len(hf.resume(tmp_path / "former").records) == 3  # still what it was
    with pytest.warns(hf.HoldfastWarning, match="interrupted after round 5 of 6"):
        hf.resume(tmp_path / "run", rounds=6, on_round=press(1, round=4))
    assert same(hf.resume(tmp_path / "run"), whole)


@dataclass(frozen=True)
class Mine(hf.FedAvg):
    """A method of one's own whose server step depends on the number of rounds, if asked to."""

    name: ClassVar[str] = "mine"
    anneals: bool = False

    def aggregate(self, server, mean, sums, context):
        share = server.round / context.rounds if self.anneals else 0.5
        return {k: server.params[k] + share * (mean[k] - server.params[k]) for k in mean}, {}


@pytest.mark.parametrize(
    ("method", "rounds", "said", "options"),
    [
        ("ccvr", 6, "from 3 to 6 rounds: .*ccvr has changed the model after the last round", {}),
        ("scaffold", 6, "the states of scaffold's clients were not kept after the last round", {}),
        ("fedproc", 6, "what fedproc computes depends on the number of rounds", {}),
        (Mine(anneals=True), 6, "what mine computes depends on the number of rounds", {}),
        (
            "fedavg",
            6,
            "the learning rates of cosine depend on the number of rounds",
            {"lr_schedule": "cosine"},
        ),
        ("fedavg", 6, "the noise of dp follows from the number of rounds", {"dp": "epsilon=80,delta=1e-5"}),
        ("fedavg", 2, "has 3 rounds already; rounds must be at least that, not 2", {}),
        ("fedavg", 0, "rounds is 0; it must be at least 1", {}),
    ],
)
def test_where_the_number_of_rounds_cannot_change(federation, tmp_path, method, rounds, said, options):
    settings = SMALL | options
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    hf.train(method, net, federation, rounds=3, out=tmp_path / "run", **settings)
    before = {
        path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file() and path.suffix
    }
    with pytest.raises(hf.HoldfastError, match=said):
        hf.train(method, net, federation, rounds=rounds, out=tmp_path / "run", resume=True, **settings)
    assert all(path.read_bytes() == content for path, content in before.items())


def test_streams_keep_their_rounds(tmp_path):
    stream = hf.Experiment(clients=4, model="linear", rounds=2, stream="2", partition="iid")
    stream.run(tmp_path / "run")
    with pytest.raises(hf.HoldfastError, match="the stages of a stream are distributed over its rounds"):
        hf.resume(tmp_path / "run", rounds=4)


def test_own_methods_and_models_go_on_from_python(federation, tmp_path):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    hf.train(Mine(), net, federation, rounds=2, out=tmp_path / "run", **SMALL)
    run = hf.train(Mine(), net, federation, rounds=4, out=tmp_path / "run", resume=True, **SMALL)
    assert same(run, hf.train(Mine(), net, federation, rounds=4, **SMALL))


def test_a_checkpoint_of_an_earlier_version_is_not_extended(federation, tmp_path):
    from holdfast.runs import checkpoint

    hf.train("fedavg", "linear", federation, rounds=2, out=tmp_path / "run", **SMALL)
    path = tmp_path / "run/checkpoint/checkpoint.json"
    manifest = json.loads(path.read_bytes())["checkpoint"]
    del manifest["meta"]["uses_rounds"]
    path.write_bytes(checkpoint._manifest_bytes(manifest))
    with pytest.raises(hf.HoldfastError, match="an earlier version wrote its checkpoint"):
        hf.resume(tmp_path / "run", rounds=4)
    assert len(hf.resume(tmp_path / "run").records) == 2


def test_fewer_rounds_than_planned_and_more_than_done(federation, tmp_path):
    with pytest.warns(hf.HoldfastWarning, match="interrupted after round 3 of 9"):
        hf.train("scaffold", "linear", federation, rounds=9, out=tmp_path / "run", on_round=press(1), **SMALL)
    run = hf.resume(tmp_path / "run", rounds=5)
    assert same(run, hf.train("scaffold", "linear", federation, rounds=5, **SMALL))


def test_the_command_trains_for_more_rounds(federation, tmp_path):
    hf.train("fedavg", "linear", federation, rounds=2, out=tmp_path / "run", **SMALL)
    done = CliRunner().invoke(app, ["resume", str(tmp_path / "run"), "--rounds", "4", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rounds"] == 4
    done = CliRunner().invoke(app, ["resume", str(tmp_path / "run"), "--rounds", "3"])
    assert (done.exit_code, "has 4 rounds already" in done.stderr) == (2, True)


def test_an_uncaught_second_interrupt_of_a_script_is_short(tmp_path):
    script = """
        import os, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
        import holdfast as hf
        federation = hf.federate(hf.load("digits"), hf.IID(), clients=2, seed=0)
        def press(record):
            os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)
        hf.train("fedavg", "linear", federation, rounds=3, on_round=press)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert len(done.stderr.splitlines()) < 10


@pytest.mark.parametrize("method", ["fedavg", "fedavgm+ema"])
def test_a_run_is_left_after_a_round_and_continues_with_the_same_bits(method, federation, tmp_path, recwarn):
    settings = {"rounds": 7, "lr_schedule": "cosine", **SMALL}
    for stop_after in (2, 2, 5):
        run = hf.train(
            method, "linear", federation, out=tmp_path / "x", resume=(tmp_path / "x").exists(),
            stop_after=stop_after, **settings,
        )  # fmt: skip
        assert run.interrupted
        assert [record["round"] for record in run.records] == list(range(1, stop_after + 1))
    whole = hf.train(method, "linear", federation, **settings)
    assert same(hf.train(method, "linear", federation, out=tmp_path / "x", resume=True, **settings), whole)
    beyond = hf.train(method, "linear", federation, out=tmp_path / "y", stop_after=9, **settings)
    assert not beyond.interrupted
    assert not recwarn.list


def test_a_run_that_is_to_be_left_needs_a_directory(federation):
    with pytest.raises(hf.HoldfastError, match="stop_after needs out"):
        hf.train("fedavg", "linear", federation, rounds=3, stop_after=2)
