"""Run directories and a browser for the tests of this folder."""

import shutil
import warnings

import pytest
from synthetic_runs import write_run


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """Three methods, two seeds each."""
    root = tmp_path_factory.mktemp("compared")
    return [
        write_run(root / f"{method}-{seed}", method, keeps=keeps, seed=seed, rounds=24)
        for method, keeps in (("fedavg", 0.25), ("fedntd", 0.6), ("flashback", 0.8))
        for seed in range(2)
    ]


@pytest.fixture(scope="session")
def streamed(tmp_path_factory):
    """Two methods on a stream with domains, two seeds each."""
    root = tmp_path_factory.mktemp("streamed")
    return [
        write_run(
            root / f"{method}-{seed}", method, keeps=keeps, seed=seed, rounds=30, stream=True, domains=True
        )
        for method, keeps in (("fedavg", 0.3), ("fedmlp", 0.7))
        for seed in range(2)
    ]


@pytest.fixture(scope="session")
def browser():
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        found = None
    if found is None:
        reason = "BROWSER TESTS SKIPPED: apt-get install chromium and pip install playwright to run them"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser):
    """Opens pages; the test fails on an error in them and on a request to another address."""
    problems, pages = [], []

    def open_page(address, **options):
        page = browser.new_page(viewport=options.pop("viewport", {"width": 1280, "height": 900}), **options)
        page.on(
            "console",
            lambda message: problems.append(message.text) if message.type in ("error", "warning") else 0,
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda r: None if r.url.startswith((address.split("#")[0], "data:")) else problems.append(r.url),
        )
        pages.append(page)
        page.goto(address)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert problems == []
