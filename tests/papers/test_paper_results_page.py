import re

from paper_entries import entry

from holdfast.papers.cells import plan
from holdfast.papers.published import load_tables
from holdfast.papers.results import Results
from holdfast.papers.results_page import write_page


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


def test_every_table_is_on_the_page_with_published_numbers_and_ours(tmp_path):
    page = tmp_path / "docs" / "results.md"
    write_page(filled(tmp_path / "results"), page)
    text = page.read_text()
    for table in load_tables().values():
        assert f"### {table.id}: {table.title}" in text
        assert f"(#{table.id.replace('/', '-')})" in text
        assert f'<a id="{table.id.replace("/", "-")}"></a>' in text
    assert "52.61 · **55.00 ± 0.00** (2)" in text
    assert "40.14 · **41.00 ± 0.00** (2)" in text
    assert "† the authors' code has a control variate" in text
    assert "77.04† · not run" in text
    assert "SCAFFOLD | 71.57 · not run | 10.00‡ · not run" in text  # another reason
    assert "‡ failed in the paper: 10 % is chance" in text
    assert "14.00 ahead (published +12.47), 2.39 above the published level: holds" in text
    assert "| [fedntd/table1-sharding](#fedntd-table1-sharding) |" in text
    assert re.search(r"table1-sharding\) \| .* \| 2 of 49 \| 1 of 2 \|", text)  # no less forgetting


def test_figures_are_drawn_where_there_are_runs(tmp_path):
    page = tmp_path / "docs" / "results.md"
    write_page(filled(tmp_path / "results"), page)
    images = sorted(path.name for path in (tmp_path / "docs" / "images" / "results").iterdir())
    assert images == [
        "fedntd-table1-sharding-accuracy.svg",
        "flashback-table1-accuracy.svg",
        "flashback-table1-forgetting.svg",
    ]
    text = page.read_text()
    for name in images:
        assert f"(images/results/{name})" in text
    drawn = (tmp_path / "docs" / "images" / "results" / images[0]).read_text()
    assert "FedNTD" in drawn
    assert "FedCurv" not in drawn


def test_the_page_is_the_same_when_made_again(tmp_path):
    filled(tmp_path / "results")
    pages = [tmp_path / name / "results.md" for name in ("one", "two")]
    for page in pages:
        write_page(tmp_path / "results", page)
    assert pages[0].read_bytes() == pages[1].read_bytes()
    for image in (tmp_path / "one" / "images" / "results").iterdir():
        assert image.read_bytes() == (tmp_path / "two" / "images" / "results" / image.name).read_bytes()


def test_settings_that_the_paper_does_not_print_are_listed(tmp_path):
    page = tmp_path / "results.md"
    write_page(tmp_path / "none", page)
    text = page.read_text()
    assert "- lr: `0.01` (official-code; the paper prints 0.1" in text
    assert "settings that the paper does not print</summary>" in text
    assert "(paper" not in text


def test_numbers_that_no_run_measures_are_marked_with_the_reason(tmp_path):
    table, results = load_tables()["fedntd/table2"], Results(tmp_path / "results")
    for cell in plan(table, ["cifar10:s=2"]):
        results.add(cell, entry(cell, [0.5], alignment_local=0.7, alignment_global=0.8))
    page = tmp_path / "results.md"
    write_page(tmp_path / "results", page)
    section = page.read_text().split("### fedntd/table2")[1].split("\n### ")[0]
    assert "| FedNTD | 0.668 · not run | 0.703 · **0.700** | 0.756 · not run |" in section
    assert "| FedNTD | 0.765 · not measured | 0.552 · not measured | 0.730 · not measured |" in section
    assert "Not measured (fc 128, local; fc 128, global): the released network does not have" in section


def test_a_table_of_one_federation_has_its_measures_as_columns(tmp_path):
    table = load_tables()["flamby/heart-disease"]
    hospitals = {"cleveland": 0.8, "hungarian": 0.7, "switzerland": 0.5, "va": 0.6}
    for cell in plan(table, rows=["fedavg", "local"], seeds=2):
        one = entry(cell, [0.5, 0.75], sites=hospitals, **({"own_site": 0.7} if cell.row == "local" else {}))
        one["curves"]["site_mean"] = [0.5, 0.65]
        Results(tmp_path / "results").add(cell, one)
    page = tmp_path / "docs" / "results.md"
    write_page(tmp_path / "results", page)
    text = page.read_text()
    assert (
        "| Fed-Heart-Disease | mean of sites % | own site % | cleveland | hungarian | switzerland | va |"
        in text
    )
    line = next(line for line in text.splitlines() if line.startswith("| Local | 63.86"))
    assert "63.86 ± 1.59 · **65.00 ± 0.00** (2) | 72.99 ± 2.87 · **70.00 ± 0.00** (2) | 63.8" in line
    assert "FedAvg over Local in site-mean: 0.00 ahead (published +4.64)" in text
