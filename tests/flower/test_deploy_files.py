"""The containers' commands, carried out by hand on loopback, in the order of docs/howto/containers.md."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import BIN, end, free_port, wait_until

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/howto/containers.md").read_text()
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())

pytestmark = pytest.mark.skipif(not os.environ.get("HOLDFAST_CHAOS"), reason="minutes long: make test-chaos")


class Machine:
    """Runs the services' commands as processes, with the mounts' folders in the place of the containers' paths."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {"8000": str(free_port())}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("app", "keys", "runs", "homes"):
            (folder / name).mkdir()

    def mounts(self, service: str) -> dict[str, str]:
        """Folders and files of this machine by the paths that they have in the container."""
        volumes = (volume.split(":") for volume in COMPOSE["services"][service]["volumes"])
        return {
            target: str(self.folder / (source if source.startswith(".") else f"volumes/{service}"))
            for source, target, *_ in volumes
        }

    def here(self, service: str, text: str) -> str:
        for inside, outside in sorted(self.mounts(service).items(), key=lambda item: -len(item[0])):
            text = text.replace(inside, outside)
        assert "/srv/fl" not in text, f"{service} uses a path that is not mounted: {text}"
        text = re.sub(r"(?<![\w-])(superlink|0\.0\.0\.0)(?=:8000|$)", "127.0.0.1", text)
        return text.replace("8000", self.ports["8000"]).replace("--port=9094", f"--port={free_port()}")

    def environment(self, service: str) -> dict[str, str]:
        home = self.folder / "homes" / service
        home.mkdir(exist_ok=True)
        if service == "operator":
            config = (ROOT / "deploy/flower.toml").read_text()
            (home / "config.toml").write_text(
                config.replace("superlink:8000", f"127.0.0.1:{self.ports['8000']}").replace(
                    "/srv/fl/keys", f"{self.folder}/keys"
                )
            )
        return os.environ | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
        }

    def up(self, service: str) -> None:
        for target in self.mounts(service).values():
            if "/volumes/" in target:
                Path(target).mkdir(parents=True)
            assert Path(target).exists(), f"{service} is started before {target} exists"
        command = [self.here(service, word) for word in COMPOSE["services"][service]["command"]]
        with open(self.folder / f"{service}.log", "wb") as log:
            self.running[service] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=self.environment(service),
                cwd=self.folder,
                start_new_session=True,
                executable=shutil.which(command[0], path=str(BIN)),
            )
        if service == "superlink":  # the others wait until it is healthy
            check: list[str] = COMPOSE["services"][service]["healthcheck"]["test"][2:]
            words = [sys.executable, *(word.replace("8000", self.ports["8000"]) for word in check)]
            wait_until(lambda: subprocess.run(words, capture_output=True).returncode == 0, 60)

    def run(self, words: list[str]) -> None:
        command = [self.here("operator", word) for word in words]
        done = subprocess.run(
            command,
            env=self.environment("operator"),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def _steps() -> list[list[str]]:
    block: Any = re.search(r"```sh\n(cd deploy\n.*?)```", PAGE, re.DOTALL)
    return [shlex.split(line) for line in block[1].splitlines()]


def test_the_page_s_commands_train_a_federation(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with ExitStack() as stack:
        stack.callback(lambda: [end(process) for process in machine.running.values()])
        for step in _steps():
            match step:
                case ["docker", "compose", "up", "--detach", *services]:
                    for service in services:
                        machine.up(service)
                case ["docker", "compose", "run", "--rm", "operator", *command]:
                    machine.run(command)
                case _:
                    assert step[0] in ("cd", "mkdir") or step == ["docker", "compose", "build"]
    assert (tmp_path / "runs/first/model.safetensors").exists()
    assert list((tmp_path / "runs/first").glob("*.html"))
    assert len((tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()) == 5
