"""The dashboard in a browser: growing runs, lost connections, pages that stay open."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from browsing import EVIL, MARKS, PICTURE
from synthetic_runs import CLASSES, read_records, write_run

pytestmark = pytest.mark.browser

SOURCE = str(Path(__file__).parents[2] / "src")
PROGRAM = (
    "import sys; from pathlib import Path; from holdfast.report import serve;"
    "serve(Path(sys.argv[1]), port=int(sys.argv[2]), ready=lambda address: print(address, flush=True))"
)


def start_server(root, port=0):
    """A dashboard in another process, and its address."""
    server = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(root), str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    return server, server.stdout.readline().strip()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A root with valid and damaged runs, and the address of a dashboard in another process."""
    root = tmp_path_factory.mktemp("served")
    write_run(root / "short", "fedavg", rounds=5, finished=False)
    write_run(root / "other", "fedntd", keeps=0.7, rounds=12)
    write_run(root / "<img src=x onerror=window.pwned=1>", EVIL, classes=[EVIL, *CLASSES[1:]], rounds=3)
    (root / "broken").mkdir()
    (root / "broken" / "experiment.yaml").write_text("a: [")
    server, address = start_server(root)
    try:
        yield root, address
    finally:
        server.terminate()
        server.wait(10)


def choose(page, name):
    page.locator("table.runs tbody tr", has_text=name).locator("input").check()


def test_a_run_is_followed_without_reloading_while_it_trains_in_another_process(served, opened):
    root, address = served
    page = opened(address)
    page.evaluate("window.notReloaded = true")
    options = "run --data digits --clients 4 --clients-per-round 2 --rounds 100000 --model linear --method fedavg --out"
    training = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from holdfast.cli import main; main()",
            *options.split(),
            str(root / "training"),
        ],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    try:
        row = page.locator("table.runs tr", has_text="training")
        row.filter(has_text="running").wait_for(timeout=60_000)  # it appears in the list by itself
        choose(page, "training")
        page.wait_for_selector("[data-figure=accuracy] canvas", timeout=60_000)
        rounds = page.locator("#leaderboard tbody td:nth-child(3)")
        seen, before = int(rounds.inner_text()), page.evaluate(PICTURE, "classes")
        page.wait_for_function(
            f"() => Number(document.querySelector('#leaderboard tbody td:nth-child(3)').textContent) > {seen}",
            timeout=60_000,
        )
        assert training.poll() is None  # what arrived came from a run in progress
        page.wait_for_function(f"before => ({PICTURE})('classes') !== before", arg=before, timeout=60_000)
        assert page.evaluate("window.notReloaded")
    finally:
        training.kill()
        training.wait(10)


def test_runs_are_searched_sorted_compared_and_kept_in_the_address(served, opened):
    _, address = served
    page = opened(address)
    page.wait_for_selector("table.runs tbody tr")

    def names():
        return page.eval_on_selector_all(
            "table.runs tbody td:nth-child(2)", "all => all.map(c => c.textContent)"
        )

    assert {"other", "short", "broken"} < set(names())
    assert "corrupt" in page.locator("table.runs tbody tr", has_text="broken").inner_text()
    assert page.locator("table.runs tbody tr", has_text="broken").locator("input").is_disabled()
    page.locator("#search").fill("fedntd")
    assert names() == ["other"]
    page.locator("#search").fill("")
    page.get_by_role("button", name="run", exact=True).click()
    assert names() == sorted(names())
    choose(page, "other")
    choose(page, "short")
    page.wait_for_function("() => document.querySelectorAll('#leaderboard tbody tr').length === 2")
    page.get_by_role("navigation").get_by_text("Samples by client and class").click()
    assert page.evaluate("location.hash") == "#run=other&run=short"
    page.reload()
    page.wait_for_function("() => document.querySelectorAll('#leaderboard tbody tr').length === 2")
    assert min(page.evaluate(MARKS)) > 60


def test_names_of_runs_stay_whole_on_a_narrow_screen(served, opened):
    _, address = served
    page = opened(address, viewport={"width": 390, "height": 800})
    page.wait_for_selector("table.runs tbody tr")
    heights = page.eval_on_selector_all(
        "table.runs tbody td:nth-child(2)",
        "all => all.filter(c => c.textContent === 'other').map(c => c.getBoundingClientRect().height)",
    )
    assert len(heights) == 1
    assert heights[0] < 40  # one line
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_names_stay_names_in_the_dashboard(served, opened):
    _, address = served
    page = opened(address)
    choose(page, "<img src=x")
    page.wait_for_selector("[data-figure=classes] canvas")
    assert EVIL in page.locator("#leaderboard").inner_text()
    assert page.evaluate("window.pwned") is None


def add_round(path):
    """Append a round to a run's metrics, as training does."""
    last = read_records(path)[-1]
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({**last, "round": last["round"] + 1}) + "\n")
    return last["round"] + 1


SHOWS_ROUND = (
    "round => document.querySelector('#leaderboard tbody td:nth-child(3)')?.textContent === String(round)"
)


def test_a_page_reconnects_when_its_server_is_back(browser, tmp_path):
    path = write_run(tmp_path / "runs" / "x", rounds=4, finished=False)
    server, address = start_server(tmp_path / "runs")
    page = browser.new_page()  # a lost connection is written to its console
    try:
        page.goto(f"{address}#run=x")
        page.wait_for_function(SHOWS_ROUND, arg=4)
        server.kill()
        server.wait(10)
        page.wait_for_function(
            "() => document.querySelector('#live').textContent.startsWith('Connection lost')"
        )
        # A request that fails in between must not keep the page from reconnecting.
        with page.expect_event("requestfailed", lambda request: "/api/figures" in request.url):
            page.evaluate("dispatchEvent(new Event('hashchange'))")
        server, _ = start_server(tmp_path / "runs", int(address.rstrip("/").rsplit(":", 1)[1]))
        page.wait_for_function(SHOWS_ROUND, arg=4)
        page.wait_for_function(SHOWS_ROUND, arg=add_round(path))
    finally:
        page.close()
        server.kill()
        server.wait(10)


def test_a_refused_connection_is_retried(served, browser):
    _, address = served
    page = browser.new_page()
    refused = []

    def answer(route):
        refused.append(route.request.url)
        route.fulfill(status=503) if len(refused) == 1 else route.continue_()

    page.route("**/api/events*", answer)
    try:
        page.goto(address)
        page.wait_for_function(
            "() => document.querySelector('#live').textContent === 'Live.'", timeout=20_000
        )
        assert len(refused) == 2
    finally:
        page.close()


def test_a_page_left_open_does_not_leak_memory(browser, tmp_path):
    write_run(tmp_path / "runs" / "x", rounds=6)
    server, address = start_server(tmp_path / "runs")
    page = browser.new_page()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def listeners_and_nodes():
        session.send("HeapProfiler.collectGarbage")
        measured = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
        return measured["JSEventListeners"], measured["Nodes"]

    def redraw():  # figures with a slider are rebuilt, and the whole page after a new selection
        page.evaluate("""async () => {
            for (let i = 0; i < 5; i++) {
                dispatchEvent(new Event('hashchange'));
                while (!document.querySelector('[data-figure=strip] canvas'))
                    await new Promise(done => setTimeout(done, 50));
            }
        }""")

    try:
        page.goto(f"{address}#run=x")
        page.wait_for_selector("[data-figure=strip] canvas")
        redraw()
        before = listeners_and_nodes()
        redraw()
        after = listeners_and_nodes()
        assert after[0] <= before[0] + 5
        assert after[1] <= 1.05 * before[1]
    finally:
        page.close()
        server.kill()
        server.wait(10)
