"""The user's own code by reference: text, files, import paths and entry points, and what can be wrong with them."""

import hashlib
import importlib
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.core import own

MINE = """
from dataclasses import dataclass
from typing import ClassVar

import holdfast as hf


@dataclass(frozen=True)
class Mine(hf.Method):
    name: ClassVar[str] = "mine"
    beta: float = 0.1

    def proximal_mu(self):
        return self.beta
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("mine.py", ("mine.py", "")),
        ("./a/mine.py:Mine", ("./a/mine.py:Mine", "")),
        ("mine.py:Mine:beta=0.5,tau=2", ("mine.py:Mine", "beta=0.5,tau=2")),
        ("mine.py:beta=0.5", ("mine.py", "beta=0.5")),
        (r"C:\code\mine.py:Mine:beta=1", (r"C:\code\mine.py:Mine", "beta=1")),
        ("package.module:Mine", ("package.module:Mine", "")),
        ("package.module:Mine:beta=0.5", ("package.module:Mine", "beta=0.5")),
        ("fedntd", None),
        ("fedntd:beta=0.5", None),
        ("mlp:64,64", None),
        ("mixed-digits:mnist,usps", None),
        ("own.npz", None),
    ],
)
def test_a_reference_is_known_by_its_form(text: str, parts: tuple[str, str] | None) -> None:
    assert own.split(text) == parts


def test_a_reference_is_recorded_with_the_hash_of_its_file(mine: Path) -> None:
    code = own.find({"name": f"{mine}:Mine"}, "method")
    assert code is not None
    digest = hashlib.sha256(mine.read_bytes()).hexdigest()
    assert code.describe() == {"name": "mine.py:Mine", "file": str(mine), "sha256": digest}
    again = own.find(code.describe(), "method")
    assert again is not None
    assert again.value is code.value  # a file is executed once, so that its classes stay the same
    assert own.code_of(code.value) == code
    mine.write_text(MINE + "\n# a note\n")
    with pytest.raises(
        hf.HoldfastError, match=r"mine\.py', which the method comes from, has changed since it was"
    ):
        own.find(code.describe(), "method")
    other = own.find({"name": f"{mine}:Mine"}, "method")
    assert other is not None
    assert other.value is not code.value
    mine.unlink()
    with pytest.raises(hf.HoldfastError, match=r"the file '.*mine\.py' for the method does not exist"):
        own.find(code.describe(), "method")


def test_an_imported_module_is_not_executed_again(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(mine.parent)
    module = importlib.import_module("mine")
    code = own.code_of(module.Mine)
    assert code is not None
    assert code.describe()["file"] == str(mine)
    found = own.find(code.describe(), "method")
    assert found is not None
    assert found.value is module.Mine
    del sys.modules["mine"]


def test_a_module_in_a_package_is_found_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "ownpackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "base.py").write_text(MINE)
    (package / "methods.py").write_text("from .base import Mine\n\n\nclass Other(Mine):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    code = own.find({"name": "ownpackage.methods:Other"}, "method")
    assert code is not None
    digest = hashlib.sha256((package / "methods.py").read_bytes()).hexdigest()
    assert code.describe() == {"name": "ownpackage.methods:Other", "sha256": digest}
    assert own.code_of(code.value.__mro__[1]).describe()["name"] == "ownpackage.base:Mine"  # type: ignore[union-attr]
    with pytest.raises(hf.HoldfastError, match=r"ownpackage\.methods', .* has changed since it was recorded"):
        own.find(code.describe() | {"sha256": "0"}, "method")


def test_what_no_file_leads_to_has_no_reference() -> None:
    class Local(hf.FedAvg):
        pass

    assert own.code_of(Local) is None
    assert own.code_of(lambda seed: None) is None
    assert own.code_of(Local()) is None


@pytest.mark.parametrize(("end", "found"), [("", False), ('\nif __name__ == "__main__":\n    pass\n', True)])
def test_a_script_is_loaded_again_only_if_that_runs_nothing(
    mine: Path, monkeypatch: pytest.MonkeyPatch, end: str, found: bool
) -> None:
    mine.write_text(MINE + end)
    code = own.find({"name": str(mine)}, "method", lambda value: True)
    assert code is not None
    main = sys.modules[code.value.__module__]
    monkeypatch.setattr(main, "__name__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    script = type("Script", (), {"__module__": "__main__", "__qualname__": "Script"})
    monkeypatch.setattr(main, "Script", script, raising=False)
    assert (own.code_of(script) is not None) == found


@pytest.mark.parametrize(
    ("content", "reference", "sentence"),
    [
        ("import nothing_like_it\n", "", r"loaded: ModuleNotFoundError: No module named 'nothing_.* \(line 1\)"),
        ("\nx = 1 / 0\n", "", r"cannot be loaded: ZeroDivisionError: division by zero \(line 2\)"),
        ("\n\ndef f(:\n", "", r"cannot be loaded: SyntaxError: invalid syntax \(mine\.py, line 3\)"),
        ("raise SystemExit\n", "", r"cannot be loaded: SystemExit \(line 1\)"),
        (MINE, ":Mien", r"unknown name in .*mine\.py 'Mien'; did you mean Mine"),
        ("x = 1\n", ":Mine", r"there is no 'Mine' in .*mine\.py, which defines neither classes nor functions"),
        ("x = 1\n", "", r"mine\.py' has no method that can be selected without a name"),
        (MINE + "\n\nclass Other(Mine):\n    pass\n", "", r"several methods; name one: mine\.py:Mine or .*:Other"),
        ("def make():\n    pass\n", ":make", r"mine\.py:make is the function make; it must be a class that inherits"),
        ("Mine = 3\n", ":Mine", r"mine\.py:Mine is a int; it must be a class that inherits from holdfast\.Method"),
        (MINE, ":Mine:gamma=1", r"unknown option of mine\.py:Mine 'gamma'; known: beta"),
        (MINE, ":Mine:beta=much", r"mine: beta is 'much'; it must be a number"),
        (MINE.replace("= 0.1", ""), ":Mine", r"mine\.py:Mine needs beta: .* such as mine\.py:Mine:beta=1"),
        (MINE.replace("@dataclass(frozen=True)", ""), ":Mine:beta=1", r"no dataclass fields .*@dataclass\(frozen"),
        (
            "import holdfast as hf\nclass Mine(hf.Method):\n    def __init__(self, beta):\n        pass\n",
            "",
            "Mine has no dataclass fields for its options",
        ),
        (
            MINE + "\n    def __post_init__(self):\n        self.x = [][0]\n",
            "",
            r"mine\.py:Mine fails: IndexError: list index out of range",
        ),
        (MINE + "\n\nbest = Mine(beta=2.0)\n", ":best:beta=1", r"mine\.py:best is an object, whose options are fixed"),
        (MINE.replace('"mine"', '"a+b"'), "", r"the name of Mine is 'a\+b'; it must not contain"),
    ],
)  # fmt: skip
def test_one_sentence_on_what_is_wrong_with_a_file(
    mine: Path, content: str, reference: str, sentence: str
) -> None:
    mine.write_text(content)
    with pytest.raises(hf.HoldfastError, match=sentence) as error:
        hf.parse_method(f"{mine}{reference}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("no/such.py:Mine", r"the file '.*no/such\.py' for the method does not exist; .* mine\.py:Mine"),
        (
            "nowhere.at_all:Mine",
            "unknown method 'nowhere.at_all:Mine': there is no module 'nowhere.at_all' to import",
        ),
        ("json.decoder:Mine", r"unknown name in json\.decoder 'Mine'"),
        (
            "json:loads",
            r"json:loads is the function loads; it must be a class that inherits from holdfast\.Method",
        ),
        ("holdfast.methods.fedavg:FedAvg+fedavg", "names a method twice"),
    ],
)
def test_one_sentence_on_a_reference_that_leads_nowhere(text: str, sentence: str) -> None:
    with pytest.raises(hf.HoldfastError, match=sentence):
        hf.parse_method(text)


def test_installed_packages_have_entry_points(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(mine.parent)
    mine.with_name("installed_mine.py").write_text(MINE)
    points = [
        EntryPoint("pull", "installed_mine:Mine", "holdfast.methods"),
        EntryPoint("bad", "no:x", "holdfast.methods"),
    ]
    monkeypatch.setattr(
        own, "entry_points", lambda group: [point for point in points if point.group == group]
    )
    method = hf.parse_method("fedntd+pull:beta=0.5")
    described = hf.Experiment(method=method).describe()["method"]
    assert described["mine"]["name"] == "pull"
    assert described["mine"]["beta"] == 0.5
    assert hf.methods.method_from(described) == method
    listed = CliRunner().invoke(app, ["methods"])
    assert listed.exit_code == 0
    assert re.search(r"^pull +–", listed.output, re.MULTILINE)
    assert "the method 'bad' cannot be loaded: ModuleNotFoundError: No module named 'no'" in listed.output
    assert CliRunner().invoke(app, ["methods", f"{mine}:Mine"]).output.split()[1:] == [
        "hyper-parameter", "default", "meaning", "beta", "0.1",
    ]  # fmt: skip
    with pytest.raises(hf.HoldfastError, match="unknown method 'pul'; did you mean pull"):
        hf.parse_method("pul")
    with pytest.raises(hf.HoldfastError, match="the method 'bad' cannot be loaded: ModuleNotFoundError"):
        hf.parse_method("bad")


def test_references_from_elsewhere_are_looked_up_in_one_folder(mine: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with own.only_from(elsewhere, "copy it there"):
        with pytest.raises(
            hf.HoldfastError, match=r"the file '.*elsewhere/mine\.py' for the method does not exist"
        ):
            hf.parse_method(f"{mine}:Mine")
        (elsewhere / "mine.py").write_text(MINE.replace("0.1", "0.7"))
        assert hf.parse_method(f"{mine}:Mine").beta == 0.7  # type: ignore[attr-defined]
        with pytest.raises(hf.HoldfastError, match="cannot be loaded by its import path here; copy it there"):
            hf.parse_method("json:loads")
    with (
        own.only_from(None, "name one"),
        pytest.raises(hf.HoldfastError, match=r"no folder .* is configured here; name one"),
    ):
        hf.parse_method(f"{mine}:Mine")
    assert hf.parse_method(f"{mine}:Mine").beta == 0.1  # type: ignore[attr-defined]


def test_methods_add_up() -> None:
    assert hf.FedNTD() + hf.FedProx(mu=0.2) == hf.Stack(hf.FedNTD(), hf.FedProx(mu=0.2))
    three = hf.FedNTD() + hf.FedProx() + hf.FedAvgM()
    assert three == hf.FedNTD() + (hf.FedProx() + hf.FedAvgM()) == hf.parse_method("fedntd+fedprox+fedavgm")
    for other in ("fedprox", hf.FedProx, None):
        with pytest.raises(hf.HoldfastError, match=r"a part of a stack is .*; it must be a method"):
            hf.FedNTD() + other  # type: ignore[operator]
