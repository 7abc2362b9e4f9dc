"""The dashboard's server: its responses, its refusals, its speed."""

import asyncio
import json
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient
from synthetic_runs import read_records, write_records, write_run

from holdfast.core.errors import HoldfastError
from holdfast.report.dashboard import LIVE_FIGURES, MAX_COMPARED_RUNS, Pages, create_app, serve


@pytest.fixture
def root(tmp_path):
    runs = tmp_path / "runs"
    write_run(runs / "fedavg", "fedavg", rounds=4)
    write_run(runs / "nested" / "fedntd", "fedntd", rounds=4)
    (runs / "broken").mkdir()
    (runs / "broken" / "experiment.yaml").write_text("a: [")
    (runs / "half").mkdir()
    (runs / "half" / "experiment.yaml").write_text("method: {name: fedavg}")
    write_run(tmp_path / "outside", rounds=2)
    (runs / "link").symlink_to(tmp_path / "outside")
    return runs


@pytest.fixture
def client(root):
    return TestClient(create_app(root), base_url="http://127.0.0.1")


def test_runs_are_listed_with_their_state(client):
    listed = {run["name"]: run for run in client.get("/api/runs").json()}
    assert set(listed) == {"fedavg", "nested/fedntd", "broken", "half"}
    assert listed["fedavg"]["state"] == "finished"
    assert listed["fedavg"]["rounds"] == 4
    assert listed["broken"]["state"] == "corrupt"
    assert listed["broken"]["problem"]


def test_figures_of_a_selection_and_what_is_wrong_with_the_rest(client):
    answer = client.get("/api/figures", params={"run": ["fedavg", "nested/fedntd", "broken", "half"]}).json()
    assert {figure["name"] for figure in answer["figures"]} >= {"accuracy", "classes", "strip"}
    assert [row["label"] for row in answer["leaderboard"]["rows"]] == ["fedavg", "fedntd"]
    problems = dict(answer["problems"])
    assert set(problems) == {"broken", "half"}
    assert "no finished round" in problems["half"]
    assert client.get("/api/figures", params={"run": "half"}).json()["figures"] is None


@pytest.mark.parametrize(
    "name",
    ["../outside", "/etc", "..", ".", "", "fedavg/../../outside", "link", "fedavg\0", "nested", "a" * 5000],
)
def test_names_outside_of_the_root_are_refused(client, name):
    answer = client.get("/api/figures", params={"run": name}).json()
    assert answer["figures"] is None
    assert len(answer["problems"]) == 1


@pytest.mark.parametrize(
    "path", ["/assets/../page.py", "/assets/%2e%2e%2fpage.py", "/assets/report.js", "/metrics"]
)
def test_only_named_files_are_served(client, path):
    assert client.get(path).status_code == 404


def test_nothing_can_be_changed(client, root):
    before = sorted((file, file.stat().st_mtime_ns) for file in root.rglob("*"))
    for path in ("/", "/api/runs", "/api/figures", "/assets/page.css"):
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            assert client.request(method, path).status_code == 405
    client.get("/api/figures", params={"run": "fedavg"})
    assert sorted((file, file.stat().st_mtime_ns) for file in root.rglob("*")) == before


def test_every_response_is_isolated_from_other_sites(client):
    for path in ("/", "/api/runs", "/assets/page.js", "/nowhere"):
        headers = client.get(path).headers
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_another_sites_name_for_this_machine_is_refused(client):
    assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 400


def test_listening_elsewhere_needs_a_token(root):
    for host in ("0.0.0.0", "192.168.1.5", "::", "example.org"):
        with pytest.raises(HoldfastError, match="set a token"):
            create_app(root, host)
    with pytest.raises(HoldfastError, match="token is empty"):
        create_app(root, "0.0.0.0", "")
    create_app(root, "::1")


def test_the_token_is_required_everywhere_and_removed_from_the_address(root):
    client = TestClient(
        create_app(root, "0.0.0.0", "s3cret"), base_url="http://box:1", follow_redirects=False
    )
    for path in ("/", "/api/runs", "/assets/page.css", "/api/events", "/?token=wrong", "/?token="):
        assert client.get(path).status_code == 401
    assert client.get("/api/runs", headers={"authorization": "Bearer s3cret"}).status_code == 200
    answer = client.get("/?token=s3cret")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=strict" in answer.headers["set-cookie"]
    assert client.get("/api/runs").status_code == 200  # the cookie is kept


def test_too_many_runs_at_once_are_refused(client):
    answer = client.get("/api/figures", params={"run": [f"r{number}" for number in range(101)]})
    assert answer.status_code == 400
    assert "at most 100 runs" in answer.json()["error"]


def test_bad_roots_and_busy_ports_are_one_sentence(root, tmp_path):
    with pytest.raises(HoldfastError, match="not a directory"):
        create_app(tmp_path / "nowhere")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(HoldfastError, match="try another port"),
    ):
        serve(root, port=taken.getsockname()[1])


def follow(pages, names, enough):
    """The events of a stream up to the first for which ``enough(name, data)`` is true."""

    async def collect():
        found = []
        async for text in pages._stream(names):
            if text.startswith("event: "):
                name, data = text[7:].split("\ndata: ")
                found.append((name, json.loads(data)))
                if enough(*found[-1]):
                    return found

    with ThreadPoolExecutor(1) as apart:  # playwright has an event loop running in this thread
        return apart.submit(asyncio.run, asyncio.wait_for(collect(), 20)).result()


def append(path, record, whole=True):
    with open(path / "metrics.jsonl", "a") as file:
        line = json.dumps(record)
        file.write(line + "\n" if whole else line[: len(line) // 2])


def test_a_growing_run_sends_its_new_rounds(root):
    path = root / "fedavg"
    fifth = {**read_records(path)[-1], "round": 5}
    rounds = []

    def enough(name, model):
        if name == "figures":
            rounds.append(model["figures"][0]["panels"][0]["series"][0]["x"])
            if len(rounds) == 1:
                append(path, fifth)
        return len(rounds) == 2

    found = follow(Pages(root), ["fedavg"], enough)
    assert found[0][0] == "runs"
    assert rounds == [[1, 2, 3, 4], [1, 2, 3, 4, 5]]


def test_an_incomplete_line_is_ignored_and_a_truncated_file_is_read_again(root):
    pages, path = Pages(root), root / "fedavg"
    text = (path / "metrics.jsonl").read_text()
    rounds = lambda: len(pages._read("fedavg")[1].records)  # noqa: E731
    assert rounds() == 4
    append(path, {"round": 5}, whole=False)
    assert rounds() == 4
    (path / "metrics.new").write_text("".join(text.splitlines(keepends=True)[:2]))
    (path / "metrics.new").replace(path / "metrics.jsonl")
    assert rounds() == 2


def test_a_run_that_was_resumed_and_grew_past_the_read_position_is_read_again(root):
    pages, path = Pages(root), root / "fedavg"
    assert len(pages._read("fedavg")[1].records) == 4
    kept = read_records(path)[:2]
    again = [{**kept[1], "round": number, "seconds": {"total": 0.123456 * number}} for number in range(3, 9)]
    with open(path / "metrics.jsonl", "r+") as file:  # in place, as rewinding does
        file.truncate(0)
        file.write("".join(json.dumps(record) + "\n" for record in (*kept, *again)))
    assert [record["round"] for record in pages._read("fedavg")[1].records] == list(range(1, 9))
    assert pages._read("fedavg")[1].records[3]["seconds"]["total"] == 0.123456 * 4


def test_a_run_that_was_removed_and_created_again_is_read_again(root):
    pages = Pages(root)
    assert pages._read("fedavg")[1].method == "fedavg"
    shutil.rmtree(root / "fedavg")
    assert "no run" in pages._read("fedavg")[2]
    write_run(root / "fedavg", "fedntd", rounds=7)
    _, run, problem = pages._read("fedavg")
    assert (run.method, len(run.records), problem) == ("fedntd", 7, "")


def test_growth_is_noticed_in_the_largest_selection_that_is_allowed(tmp_path):
    names = [f"r{number}" for number in range(MAX_COMPARED_RUNS)]
    for name in names:
        write_run(tmp_path / name, rounds=1, clients=2, clients_per_round=1, probe=False)
    pages = Pages(tmp_path)
    before = pages._versions(names)
    assert pages._versions(names) == before
    append(tmp_path / "r0", {"round": 2, "accuracy": 0.5, "class_accuracy": [0.5] * 10})
    after = pages._versions(names)
    assert [old != new for old, new in zip(before, after, strict=True)] == [True] + [False] * 99


def test_500_runs_are_listed_within_a_second(tmp_path):
    model = write_run(tmp_path / "runs" / "r0", rounds=30)
    for number in range(1, 500):
        copy = tmp_path / "runs" / f"r{number}"
        copy.mkdir()
        for name in ("experiment.yaml", "metrics.jsonl"):
            (copy / name).write_bytes((model / name).read_bytes())
    client = TestClient(create_app(tmp_path / "runs"), base_url="http://127.0.0.1")
    started = time.process_time()  # CPU time, whatever else the machine does
    assert len(client.get("/api/runs").json()) == 500
    assert time.process_time() - started < 1.0


def test_thousands_of_rounds_answer_quickly_and_stay_small(tmp_path):
    path = write_run(tmp_path / "runs" / "long", rounds=2)
    record = read_records(path)[-1]
    write_records(path, [{**record, "round": number} for number in range(1, 3001)])
    pages = Pages(tmp_path / "runs")
    pages._model(["long"], LIVE_FIGURES)
    append(path, {**record, "round": 3001})
    started = time.process_time()
    _, model = pages._model(["long"], LIVE_FIGURES)
    assert time.process_time() - started < 1.0
    assert model["figures"][0]["panels"][0]["series"][0]["x"][-1] == 3001
    assert len(json.dumps(model)) < 300_000
