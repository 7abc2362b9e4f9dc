"""Flower's real processes on loopback, with TLS and node authentication; they end with the ``with`` block."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from proxy import Proxy

from holdfast.flower.certificates import write_certificates
from holdfast.flower.template import write_app

BIN = Path(sys.executable).parent
HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Deployment:
    """A SuperLink, its nodes, which reach it through a proxy, and an app that `holdfast flower new` wrote.

    ``isolated``: the server's tasks are handed out only to a process that knows a secret. ``database``: the
    SuperLink's state outlives it, at the price of a file that every call waits for.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        clients: int,
        app: str | None = None,
        isolated: bool = False,
        database: bool = True,
    ) -> None:
        self.folder, self.count, self.clients, self.isolated = folder, nodes, clients, isolated
        self.database = ["--database", f"{folder}/state.db"] if database else []
        self.link_port = free_port()
        self.proxy = Proxy(self.link_port)
        self.app = folder / "two-sites"
        write_app(self.app)
        if app is not None:
            (self.app / "two_sites" / "app.py").write_text(app)
        self.keys = folder / "keys"
        write_certificates(self.keys, ["localhost", "127.0.0.1"], [f"site{i}" for i in range(nodes)])
        self.link: subprocess.Popen[bytes] | None = None
        self.executor: subprocess.Popen[bytes] | None = None
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        home = folder / "home"
        home.mkdir()
        config = f'[superlink.tls]\naddress = "127.0.0.1:{self.link_port}"\n'
        (home / "config.toml").write_text(config + f'root-certificates = "{self.keys}/ca.crt"\n')
        source = HERE.parent.parent / "src"
        self.environment = os.environ | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(source),
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> Self:
        self.start_link()
        if self.isolated:
            self.executor = self.start(
                "executor", f"{BIN}/flower-superexec", "--root-certificates", f"{self.keys}/ca.crt",
                "--runtime-api-address", f"127.0.0.1:{self.link_port}",
                "--superexec-auth-secret-file", f"{self.keys}/superexec.secret",
            )  # fmt: skip
        for i in range(self.count):
            self.flwr("supernode", "register", f"{self.keys}/nodes/site{i}.pub", "tls", "--name", f"site{i}")
            self.start_node(i)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (*self.nodes.values(), self.executor, self.link):
            if process is not None:
                end(process)
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.proxy.close()

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a process in a new session, with its output in a log file."""
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                arguments,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def start_link(self) -> None:
        """The server."""
        secret = ["--isolation", "process", "--superexec-auth-secret-file", f"{self.keys}/superexec.secret"]
        self.link = self.start(
            "link", f"{BIN}/flower-superlink", "--ssl-ca-certfile", f"{self.keys}/ca.crt",
            "--ssl-certfile", f"{self.keys}/server.pem", "--ssl-keyfile", f"{self.keys}/server.key",
            "--enable-supernode-auth", "--host", "127.0.0.1", "--port", str(self.link_port),
            "--disable-runtime-dependency-installation", *self.database, *(secret if self.isolated else []),
        )  # fmt: skip
        wait_until(lambda: _listens(self.link_port), 60)

    def start_node(self, i: int, state: Path | None = None) -> None:
        """Site ``i``."""
        state = state or self.folder / f"state{i}"
        config = f'partition-id={i} num-partitions={self.count} state-dir="{state}" share-samples=true'
        config += f' code-dir="{self.folder}/code{i}"'
        self.nodes[i] = self.start(
            f"node{i}", f"{BIN}/flower-supernode", "--root-certificates", f"{self.keys}/ca.crt",
            "--superlink", f"127.0.0.1:{self.proxy.port}", "--auth-supernode-private-key", f"{self.keys}/nodes/site{i}",
            "--host", "127.0.0.1", "--port", str(free_port()), "--node-config", config,
        )  # fmt: skip

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [f"{BIN}/flwr", *arguments], env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, **config: Any) -> str:
        """Start a run and return its id."""
        text = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in config.items())
        output = self.flwr(
            "run", str(self.app), "tls", "--format", "json", "-c", f"clients={self.clients} {text}"
        )
        return str(json.loads(output[output.index("{") :])["run-id"])

    def status(self, run: str) -> str:
        output = self.flwr("ls", "tls", "--run-id", run, "--format", "json")
        return str(json.loads(output[output.index("{") :])["runs"][0]["status"])

    def finish(self, run: str, out: Path, seconds: float = 300) -> str:
        """Wait for the end of a run and return its status; polls the model file, which is faster than asking Flower."""
        ends = time.monotonic() + seconds
        asked = time.monotonic()
        while time.monotonic() < ends:
            if (out / "model.safetensors").exists() or time.monotonic() - asked > 20:
                asked = time.monotonic()
                status = self.status(run)
                if status.startswith("finished"):
                    return status
            time.sleep(0.3)
        raise TimeoutError(f"run {run} is not finished after {seconds} s; see the logs in {self.folder}")

    def asks_for_a_task(self) -> int:
        """The HTTP status of a request for a task without the secret."""
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.link_port}/v1/runtime/acquire-task",
            data=b"",
            headers={"Content-Type": "application/protobuf"},
        )
        trust = ssl.create_default_context(cafile=f"{self.keys}/ca.crt")
        try:
            with urllib.request.urlopen(request, context=trust, timeout=20) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as refusal:
            return refusal.code

    def memory(self) -> int:
        """Memory of all processes in bytes, with shared memory counted once."""
        total = 0
        for pid in self.processes():
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total

    def processes(self, name: str = "") -> list[int]:
        """Ids of this deployment's processes whose command contains ``name``; they share its home."""
        mine, found = f"FLWR_HOME={self.environment['FLWR_HOME']}\0".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    if mine in (entry / "environ").read_bytes() and name in (entry / "cmdline").read_text():
                        found.append(int(entry.name))
        return found


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and its children, which are in its session."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(8)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # children that outlived it


def wait_until(holds: Any, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > ends:
            raise TimeoutError
        time.sleep(0.2)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
