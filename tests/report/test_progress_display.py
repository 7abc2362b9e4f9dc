"""What training shows of its progress: in a terminal, in a notebook, in a log; never on stdout."""

import io
import json
import os
import pty
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

import holdfast as hf
from holdfast.report import progress_display as module
from holdfast.report.progress_display import LogLines, NotebookLine, TerminalBar, progress_display

PROGRAM = [sys.executable, "-m", "holdfast"]


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: now.seconds)
    return now


def record(round, **values):
    return {"round": round, **values}


def test_a_log_has_a_line_a_minute(clock, capsys):
    display = LogLines()
    display.start("fedavg on digits", 100)
    for number in range(1, 61):  # six seconds each
        clock.seconds += 6
        display.update(record(number, accuracy=number / 100) if number % 2 else record(number))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"fedavg on digits: round {n}/100, accuracy {n - 1}.0%, {left} left"
        for n, left in (
            (10, "9 min"),
            (20, "8 min"),
            (30, "7 min"),
            (40, "6 min"),
            (50, "5 min"),
            (60, "4 min"),
        )
    ]


def test_the_time_left_of_a_resumed_run_is_that_of_its_own_rounds(clock):
    display = LogLines(runs=3)
    display.start("fedavg, seed 0", 100)
    clock.seconds += 3600
    display.update(record(91))
    assert display.line() == "1/3 fedavg, seed 0: round 91/100, 9 h left"
    display.start("fedavg, seed 1", 10)
    clock.seconds += 2
    display.update(record(1, accuracy=None))
    assert display.line() == "2/3 fedavg, seed 1: round 1/10, 18 s left"
    display.update(record(10))
    assert display.line() == "2/3 fedavg, seed 1: round 10/10"


def test_a_closed_stderr_does_not_stop_a_run(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    display = LogLines()
    display.start("fedavg", 2)
    display.show()
    with progress_display() as other:
        assert isinstance(other, LogLines)


@pytest.fixture
def notebook(monkeypatch):
    """A notebook's kernel; returns what it displays."""
    shown = []

    def display(data, raw, display_id):
        shown.append(data["text/plain"])
        return SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))

    package, part = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = lambda: SimpleNamespace(kernel=object())
    part.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", part)
    return shown


def test_a_notebook_has_one_line_that_changes(notebook, clock, capsys):
    with progress_display() as display:
        assert isinstance(display, NotebookLine)
        display.start("fedavg on digits", 30)
        for number in range(1, 31):
            clock.seconds += 0.1
            display.update(record(number, accuracy=0.5))
    assert notebook[0] == ""
    assert notebook[1] == "fedavg on digits: round 2/30, accuracy 50.0%, 3 s left"
    assert notebook[-1] == "fedavg on digits: round 30/30, accuracy 50.0%"
    assert len(notebook) == 17  # every 0.2 seconds, and at the end
    assert capsys.readouterr() == ("", "")


def test_progress_can_be_turned_off(notebook):
    federation = hf.federate(hf.load("digits"), hf.IID(), clients=2, seed=0)
    settings = {"rounds": 1, "evaluate_locals": False}
    hf.train("fedavg", "linear", federation, progress=False, **settings)
    hf.compare(["fedavg"], hf.Experiment(clients=2, model="linear", **settings), 1, progress=False)
    assert notebook == []
    hf.train("fedavg", "linear", federation, **settings)
    hf.compare(["fedavg", "fedprox"], hf.Experiment(clients=2, model="linear", **settings), 1)
    shown = {line.partition(",")[0] for line in notebook if line}
    assert {"fedavg on digits: round 1/1", "2/2 fedprox"} <= shown


def test_a_terminal_has_a_bar(monkeypatch, clock):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, a terminal
    monkeypatch.setattr(module, "is_terminal", lambda: True)
    with progress_display(runs=2) as display:
        assert isinstance(display, TerminalBar)
        for method in ("fedavg", "fedntd"):
            display.start(f"{method} [brackets]", 7)
            clock.seconds += 1
            display.update(record(3, accuracy=0.25))
    for text in ("1/2 fedavg [brackets]", "2/2 fedntd [brackets]", "3/7", "accuracy 25.0%"):
        assert text in screen.getvalue()


def test_a_terminal_that_cannot_redraw_gets_lines(monkeypatch):
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setenv("TERM", "xterm")
    assert module.is_terminal()
    monkeypatch.setenv("TERM", "dumb")
    assert not module.is_terminal()


def test_the_command_prints_pure_json_beside_its_bar(tmp_path):
    ours, theirs = pty.openpty()
    command = [
        *PROGRAM,
        "run",
        "--clients",
        "3",
        "--model",
        "linear",
        "--rounds",
        "2",
        "--out",
        tmp_path / "run",
        "--json",
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=theirs, check=True, env=os.environ | {"TERM": "xterm"}
    )
    os.close(theirs)
    bar = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert json.loads(done.stdout)["rounds"] == 2
    assert "fedavg on digits" in bar
