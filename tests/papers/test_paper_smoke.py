import pytest

from holdfast.papers.published import PAPERS, load_tables
from holdfast.papers.smoke import smoke


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_of_a_paper_runs_from_end_to_end(paper, tmp_path):
    tables = [table for table in load_tables().values() if table.paper.key == paper]
    lines = list(smoke(tmp_path, tables))
    assert {line.split(":")[0] for line in lines[:-1]} == {table.id for table in tables}
    text = (tmp_path / "docs" / "results" / f"{paper}.md").read_text()
    assert f"## {tables[0].id}" in text
