"""The reference is complete: every public name, command, option, setting and partition."""

import importlib.util
import re
from dataclasses import fields
from types import ModuleType

import pytest
from blocks import ROOT
from typer.testing import CliRunner

import holdfast.api as api
from holdfast import models
from holdfast.cli import app
from holdfast.core.settings import ExperimentSettings
from holdfast.data.partitions.naming import PARTITIONS
from holdfast.methods import METHODS
from holdfast.tasks.registry import TASKS

API = (ROOT / "docs/api.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The hook of MkDocs that makes the pages."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/hooks/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented(text: str) -> set[str]:
    """The names that directives of mkdocstrings document."""
    members = re.findall(r"members: \[(.*?)\]", text)
    return {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)", text, re.MULTILINE)} | {
        name.strip() for listed in members for name in listed.split(",")
    }


def test_every_public_name_is_on_the_api_page() -> None:
    classes_of_methods = {kind.__name__ for kind in METHODS.values()}
    assert set(api.__all__) - classes_of_methods <= documented(API)
    assert {name for name in models.__all__ if name not in ("MODELS", "Output")} <= documented(API)
    assert {task.__name__ for task in TASKS.values()} <= documented(API)


def test_every_method_is_on_the_api_page(reference: ModuleType) -> None:
    assert reference.METHOD_CLASSES in API
    assert {kind.__name__ for kind in METHODS.values()} <= documented(reference.method_classes())


def test_every_command_and_option_of_help_is_on_its_page(reference: ModuleType) -> None:
    page, settings = reference.command_line(), reference.settings()
    runner = CliRunner()
    listed = re.findall(r"^│ (\w+) {2,}\w", runner.invoke(app, ["--help"]).output, re.MULTILINE)
    assert {"run", "compare", "flower", "doctor"} <= set(listed)
    groups = {group.typer_instance.info.name for group in app.registered_groups}
    assert "flower" in groups
    found = 0
    for command in listed:
        if command in groups:
            continue
        (section,) = re.findall(rf"^### holdfast {command}\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
        help = runner.invoke(app, [command, "--help"]).output
        for option in set(re.findall(r"^│ (?:\* +)?(--[a-z-]+)", help, re.MULTILINE)) - {"--help"}:
            setting = option[2:].replace("-", "_")
            found += 1
            assert option in section or f'id="{setting}"' in settings, f"{command} {option}"
    assert found > 300
    assert "### holdfast flower new" in page


def test_every_setting_has_its_row(reference: ModuleType) -> None:
    page = reference.settings()
    for field in fields(ExperimentSettings):
        assert page.count(f'<span id="{field.name}"></span>`{field.name}`') == 1
        assert page.count(f'id="{field.name}"') == 1
    assert "| a whole number, at least 1 | `100` | no |" in page  # rounds
    assert "| auto, sequential, vectorized or ray. |" in page


def test_every_partition_has_its_picture(reference: ModuleType) -> None:
    page = reference.partitions()
    assert re.findall(r"^## (\S+)$", page, re.MULTILINE) == list(PARTITIONS)


def test_links_of_the_repositorys_pages_lead_to_the_site(reference: ModuleType) -> None:
    written = "[a](docs/own.md#x), [b](CHANGELOG.md), [c](SECURITY.md#y), [d](https://x.org)"
    expected = "[a](../own.md#x), [b](changelog.md), [c](trust.md#y), [d](https://x.org)"
    assert reference.links_within_site(written) == expected
