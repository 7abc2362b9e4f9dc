import re
from pathlib import Path

import pytest
from paper_entries import entry

from holdfast.papers.cells import plan
from holdfast.papers.findings import compare
from holdfast.papers.overview import compared
from holdfast.papers.published import load_tables
from holdfast.papers.results import Results
from holdfast.papers.results_page import write_page

DOCS = Path(__file__).parents[2] / "docs"


def filled(folder):
    tables, results = load_tables(), Results(folder)
    for cell in plan(tables["fedntd/table1-sharding"], ["cifar10:s=2"], ["fedavg", "fedntd"], seeds=2):
        last = 0.41 if cell.row == "fedavg" else 0.55
        results.add(cell, entry(cell, [0.2, last], forgetting=0.5))
    for cell in plan(tables["flashback/table1"], ["cifar10:beta=0.1"], ["fedavg", "flashback"]):
        one = entry(cell, [0.2, 0.5])
        one["curves"]["local_forgetting_quantiles"] = [i / 100 for i in range(101)]
        results.add(cell, one)
    return folder


def section(folder, table):
    """What a paper's page has on a table."""
    text = (folder / "docs" / "results" / f"{table.split('/')[0]}.md").read_text()
    return text.split(f'<a id="{table.replace("/", "-")}"></a>')[1].split("<a id=")[0]


def test_every_table_is_on_its_papers_page_with_published_numbers_and_ours(tmp_path):
    page = tmp_path / "docs" / "results.md"
    write_page(filled(tmp_path / "results"), page)
    for table in load_tables().values():
        of_table = section(tmp_path, table.id)
        if table.is_search:
            assert f"<summary>{table.id}: {table.title} (" in of_table
            assert all(f"`{row}`" in of_table for row in table.rows)
        else:
            assert f"## {table.id}: {table.title}" in of_table
            listed = (page.with_suffix("") / f"{table.paper.key}.md").read_text()
            assert f"| [{table.id}](#{table.id.replace('/', '-')}) |" in listed
    text = (page.with_suffix("") / "fedntd.md").read_text()
    assert "52.61 · **55.00 ± 0.00** (2)" in text
    assert "40.14 · **41.00 ± 0.00** (2)" in text
    assert "† the authors' code has a control variate" in text
    assert "77.04† · not run" in text
    assert "SCAFFOLD | 71.57 · not run | 10.00‡ · not run" in text  # another reason
    assert "‡ failed in the paper: 10 % is chance" in text
    score = "**+14.00, level +2.39** | last round, 2 seeds | holds |"
    assert f"| CIFAR-10 s=2: FedNTD over FedAvg, accuracy % | +12.47 |  | {score}" in text
    assert re.search(r"table1-sharding\) \| .* \| 2 of 49 \| 1 of 2 \|", text)  # no less forgetting
    front = page.read_text()
    assert re.search(r"\| \[FedNTD\]\(results/fedntd.md\) \| .* \| 2 of 104 \| 1 of 2 \| 1 of 2 \|", front)


def test_a_finding_names_the_score_that_decides(tmp_path):
    table, results = load_tables()["fedntd/table1-sharding"], Results(tmp_path / "results")
    for cell in plan(table, ["cifar10:s=2"], ["fedavg", "fedntd"]):
        level, lucky = (0.40, 0.12) if cell.row == "fedavg" else (0.53, 0.0)
        results.add(cell, entry(cell, [level] * 19 + [level + lucky]))
    page = tmp_path / "docs" / "results.md"
    write_page(tmp_path / "results", page)
    # FedAvg's mean of the last ten rounds is 41.2, FedNTD's lead over it 11.8.
    scores = "**+11.80, level +0.39** | +1.00, level +0.39 | last ten rounds, 1 seed | holds |"
    assert f"FedNTD over FedAvg, accuracy % | +12.47 | {scores}" in section(tmp_path, table.id)
    assert re.search(r"fedntd.md\) .* \| 1 of 1 \| 0 of 1 \|", page.read_text())


def test_the_overview_has_published_numbers_and_the_mean_of_the_last_ten_rounds(tmp_path):
    table, results = load_tables()["fedntd/table1-sharding"], Results(tmp_path / "results")
    cells = plan(table, ["cifar10:s=2", "cifar10:s=3"], ["fedavg", "fedntd"], seeds=2)
    for cell in cells[:-1]:  # FedNTD's second seed on three shards is missing
        level = 0.4 if cell.row == "fedavg" else 0.5
        results.add(cell, entry(cell, [0.1] * 10 + [level] * 9 + [level + 0.1]))
    paper = table.paper
    shown = compared(paper, paper.overview, "accuracy", [compare(table, results.of_table(table), results)])
    assert [one.label for one in shown] == ["CIFAR-10 s=2", "CIFAR-10 s=3"]
    assert shown[0].published == (40.14, 52.61)
    assert shown[0].ours == (pytest.approx(41), pytest.approx(51))
    assert (
        compared(paper, paper.overview, "accuracy", [compare(table, results.of_table(table)[:1], results)])
        == []
    )


def test_the_pages_of_the_documentation_are_those_of_the_stored_results(tmp_path):
    write_page(DOCS.parent / "results", tmp_path / "results.md")
    for written in (tmp_path / "results.md", tmp_path / "recipe.md", *(tmp_path / "results").iterdir()):
        assert written.read_text() == (DOCS / written.relative_to(tmp_path)).read_text(), (
            f"{written.name} is not what `holdfast reproduce --page docs/results.md` writes"
        )
    drawn, kept = (
        {path.name for path in (folder / "images" / "results").iterdir()} for folder in (tmp_path, DOCS)
    )
    assert drawn == kept


def test_figures_are_drawn_where_there_are_runs(tmp_path):
    page = tmp_path / "docs" / "results.md"
    write_page(filled(tmp_path / "results"), page)
    images = sorted(path.name for path in (tmp_path / "docs" / "images" / "results").iterdir())
    assert images == [
        "fedntd-table1-sharding-accuracy.svg",
        "fedntd.svg",
        "flashback-table1-accuracy.svg",
        "flashback-table1-forgetting.svg",
        "flashback.svg",
    ]
    assert "(images/results/fedntd.svg)" in page.read_text()
    for name in set(images) - {"fedntd.svg", "flashback.svg"}:
        assert f"(../images/results/{name})" in section(
            tmp_path, name.rpartition("-")[0].replace("-", "/", 1)
        )
    drawn = (tmp_path / "docs" / "images" / "results" / images[0]).read_text()
    assert "FedNTD" in drawn
    assert "FedCurv" not in drawn


def test_the_page_is_the_same_when_made_again(tmp_path):
    filled(tmp_path / "results")
    pages = [tmp_path / name / "results.md" for name in ("one", "two")]
    for page in pages:
        write_page(tmp_path / "results", page)
    assert pages[0].read_bytes() == pages[1].read_bytes()
    for page in (tmp_path / "one" / "results").iterdir():
        assert page.read_bytes() == (tmp_path / "two" / "results" / page.name).read_bytes()
    for image in (tmp_path / "one" / "images" / "results").iterdir():
        assert image.read_bytes() == (tmp_path / "two" / "images" / "results" / image.name).read_bytes()


def test_settings_that_the_paper_does_not_print_are_listed(tmp_path):
    write_page(tmp_path / "none", tmp_path / "docs" / "results.md")
    text = section(tmp_path, "fedntd/table1-sharding")
    assert "- lr: `0.01` (official-code; the paper prints 0.1" in text
    assert "settings that the paper does not print</summary>" in text
    assert "(paper" not in text


def test_numbers_that_no_run_measures_are_marked_with_the_reason(tmp_path):
    table, results = load_tables()["fedntd/table2"], Results(tmp_path / "results")
    for cell in plan(table, ["cifar10:s=2"]):
        results.add(cell, entry(cell, [0.5], alignment_local=0.7, alignment_global=0.8))
    write_page(tmp_path / "results", tmp_path / "docs" / "results.md")
    of_table = section(tmp_path, "fedntd/table2")
    assert "| FedNTD | 0.668 · not run | 0.703 · **0.700** | 0.756 · not run |" in of_table
    assert "| FedNTD | 0.765 · not measured | 0.552 · not measured | 0.730 · not measured |" in of_table
    assert "Not measured (fc 128, local; fc 128, global): the released network does not have" in of_table


def test_a_table_of_one_federation_has_its_measures_as_columns(tmp_path):
    table = load_tables()["flamby/heart-disease"]
    hospitals = {"cleveland": 0.8, "hungarian": 0.7, "switzerland": 0.5, "va": 0.6}
    for cell in plan(table, rows=["fedavg", "local"], seeds=2):
        one = entry(cell, [0.5, 0.75], sites=hospitals, **({"own_site": 0.7} if cell.row == "local" else {}))
        one["curves"]["site_mean"] = [0.5, 0.65]
        Results(tmp_path / "results").add(cell, one)
    write_page(tmp_path / "results", tmp_path / "docs" / "results.md")
    text = section(tmp_path, "flamby/heart-disease")
    assert (
        "| Fed-Heart-Disease | mean of sites % | own site % | cleveland | hungarian | switzerland | va |"
        in text
    )
    line = next(line for line in text.splitlines() if line.startswith("| Local | 63.86"))
    assert "63.86 ± 1.59 · **65.00 ± 0.00** (2) | 72.99 ± 2.87 · **70.00 ± 0.00** (2) | 63.8" in line
    assert (
        "FedAvg over Local, mean of sites % | +4.64 |  | **+0.00, level -3.50** | last round, 2 seeds |"
        in text
    )
