"""The files that `holdfast flower` writes: an app, keys and certificates."""

from __future__ import annotations

import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from holdfast.core.errors import HoldfastError
from holdfast.flower.certificates import write_certificates
from holdfast.flower.template import write_app

ROOT = Path(__file__).parents[2]


def test_the_example_is_the_template(tmp_path: Path) -> None:
    written = write_app(tmp_path / "flower")
    example = ROOT / "examples" / "flower"
    for path in written:
        assert (example / path.relative_to(tmp_path / "flower")).read_text() == path.read_text()


def test_the_components_of_the_app_exist(tmp_path: Path) -> None:
    write_app(tmp_path / "Two-Sites")
    config = tomllib.loads((tmp_path / "Two-Sites/pyproject.toml").read_text())
    assert config["project"]["name"] == "two-sites"
    for reference in config["tool"]["flwr"]["app"]["components"].values():
        module, _, name = reference.partition(":")
        text = (tmp_path / "Two-Sites" / f"{module.replace('.', '/')}.py").read_text()
        assert f"\n{name} = " in text


def test_every_key_of_the_config_is_understood(tmp_path: Path) -> None:
    from holdfast.flower import FlowerApp
    from holdfast.flower.app import AppConfig

    write_app(tmp_path / "app")
    config = tomllib.loads((tmp_path / "app/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    plan = AppConfig(FlowerApp(lambda n, r: None, lambda r: None), config)  # type: ignore[arg-type, return-value]
    assert plan.settings.rounds == 20
    assert plan.settings.clients_per_round is None
    assert plan.settings.deadline is None
    assert not plan.settings.evaluate_locals


@pytest.mark.parametrize("name", ["2 hospitals", "no.dots", "3d"])
def test_invalid_names_of_apps_raise_errors(name: str, tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="is not a valid name of a Python package"):
        write_app(tmp_path / name)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write_app(tmp_path / "app")
    with pytest.raises(HoldfastError, match="is not empty"):
        write_app(tmp_path / "app")


def test_certificates_and_keys_match(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["fl.example.org", "10.0.0.1"], ["berlin"])
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]
    private = load_ssh_private_key((tmp_path / "nodes/berlin").read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "nodes/berlin.pub").read_bytes())
    assert private.public_key() == public
    for secret in ("ca.key", "server.key", "nodes/berlin", "superexec.secret"):
        assert stat.S_IMODE((tmp_path / secret).stat().st_mode) == 0o600


def test_a_node_is_added_without_touching_the_others(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["localhost"], ["berlin"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    written = write_certificates(tmp_path, ["localhost"], ["berlin", "oslo"])
    assert [path.name for path in written] == ["oslo", "oslo.pub"]
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_commands(tmp_path: Path) -> None:
    def holdfast(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "holdfast", "flower", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    assert holdfast("new", "app").returncode == 0
    assert (tmp_path / "app/app/app.py").exists()
    assert holdfast("certificates", "keys", "--host", "localhost", "--node", "oslo").returncode == 0
    assert (tmp_path / "keys/nodes/oslo.pub").exists()
    again = holdfast("new", "app")
    assert again.returncode == 2
    assert "not empty" in again.stderr
