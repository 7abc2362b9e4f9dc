import numpy as np
import pytest

from holdfast.core.errors import HoldfastError
from holdfast.data.tables.table import as_numbers, as_texts, is_table, read_table

FILE = """age,sex,town
41,f,"Lyon, 3e"
?,m,Paris
 60 ,f,NA
"""


def write(path, text, encoding="utf-8"):
    path.write_text(text, encoding=encoding)
    return path


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (FILE, "utf-8"),
        (FILE, "utf-8-sig"),
        (FILE.replace("\n", "\r\n"), "utf-8"),
        (
            FILE.replace('"Lyon, 3e"', "'Lyon; 3e'").replace(",", "\t").replace("'Lyon; 3e'", '"Lyon, 3e"'),
            "utf-8",
        ),
        (FILE.replace(",", ";").replace("Lyon; 3e", "Lyon, 3e"), "utf-8"),
    ],
)
def test_csv_files(tmp_path, text, encoding):
    table = read_table(write(tmp_path / "a.csv", text, encoding))
    assert list(table.columns) == ["age", "sex", "town"]
    np.testing.assert_array_equal(as_numbers(table, "age"), [41, np.nan, 60])
    assert as_texts(table, "town").tolist() == ["Lyon, 3e", "Paris", None]


def test_a_mapping_of_columns():
    table = read_table(
        {"a": [1, None, 3], "b": np.array([True, False, True]), "c": ["x", None, np.nan], 5: range(3)}
    )
    np.testing.assert_array_equal(as_numbers(table, "a"), [1, np.nan, 3])
    assert as_texts(table, "a").tolist() == ["1", None, "3"]
    assert as_numbers(table, "b").tolist() == [1, 0, 1]
    assert as_texts(table, "c").tolist() == ["x", None, None]
    assert as_numbers(table, "5").tolist() == [0, 1, 2]
    assert [is_table(given) for given in ({}, "a.csv", "outcome", np.zeros((2, 2)))] == [
        True,
        True,
        False,
        False,
    ]


class Frame:
    """What pandas frames have: names of columns, and columns by name."""

    def __init__(self, **columns):
        self.columns, self._values = list(columns), columns

    def __getitem__(self, name):
        return self._values[name]


def test_frames_of_any_library():
    table = read_table(Frame(age=np.array([1.5, np.nan]), sex=np.array(["f", None], object)))
    np.testing.assert_array_equal(as_numbers(table, "age"), [1.5, np.nan])
    assert as_texts(table, "sex").tolist() == ["f", None]


def test_a_pandas_frame():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"n": [1, 2, 3], "f": [0.5, np.nan, 2], "s": ["x", None, "y"], "b": [True, False, True]}
    )
    frame["c"] = frame["s"].astype("category")
    frame["i"] = pandas.array([1, None, 3], dtype="Int64")
    table = read_table(frame)
    assert as_texts(table, "n").tolist() == ["1", "2", "3"]
    np.testing.assert_array_equal(as_numbers(table, "f"), [0.5, np.nan, 2])
    assert as_texts(table, "s").tolist() == as_texts(table, "c").tolist() == ["x", None, "y"]
    np.testing.assert_array_equal(as_numbers(table, "i"), [1, np.nan, 3])
    frame["d"] = pandas.to_datetime(["2020-01-01"] * 3)
    with pytest.raises(HoldfastError, match="column 'd' of the table holds dates or times"):
        read_table(frame)


def test_a_parquet_file(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"a": [1, None, 3], "s": ["x", "y", None]}), tmp_path / "a.parquet")
    table = read_table(tmp_path / "a.parquet")
    np.testing.assert_array_equal(as_numbers(table, "a"), [1, np.nan, 3])
    assert as_texts(table, "s").tolist() == ["x", "y", None]
    parquet.write_table(arrow.table({"a": [1, 2], "__index_level_0__": [5, 6]}), tmp_path / "c.parquet")
    assert list(read_table(tmp_path / "c.parquet").columns) == ["a"]  # not the index of a pandas frame
    (tmp_path / "b.parquet").write_bytes(b"none")
    with pytest.raises(HoldfastError, match="cannot be read as a Parquet file"):
        read_table(tmp_path / "b.parquet")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a.csv' is empty; its first line must have the names"),
        ("a,b\n1,2\n3\n", "line 3 of 'a.csv' has 1 values, but there are 2 columns"),
        ("a,b\n\n1,2\n\n3\n", "line 5 of 'a.csv' has 1 values"),
        (",a\n0,1\n", "column 1 of 'a.csv' has no name; give it one"),
        ("a,b,a\n1,2,3\n", "'a.csv' has two columns called 'a'"),
        ('a,b\n1,"2\n', "'.*a.csv' cannot be read as a CSV file"),
    ],
)
def test_damaged_files(tmp_path, text, words):
    with pytest.raises(HoldfastError, match=words):
        read_table(write(tmp_path / "a.csv", text))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (5, "the table is a int; it must be a frame, a mapping of columns"),
        ("none.csv", "there is no file 'none.csv'"),
        ("a.txt", "'a.txt' must be a file that ends in .csv, .tsv, .parquet"),
        ({"a": [1, 2], "b": [1]}, "the columns of the table have 1 to 2 rows"),
        ({"a": [1], 1: [2], "1": [3]}, "two columns called '1'"),
        ({"a": np.zeros((2, 2))}, r"column 'a' of the table has the shape \(2, 2\)"),
        ({"a": np.array([1j])}, "column 'a' of the table holds complex128 values"),
        (
            {"a": np.array(["2020-01-01"], "M8[D]")},
            "column 'a' of the table holds dates or times; convert them to numbers",
        ),
        ({"a": 1, "b": 2}, r"column 'a' of the table is 1; it must hold one value a row, such as \[1\]"),
        (
            {"a": "bern"},
            r"column 'a' of the table is 'bern'; it must hold one value a row, such as \['bern'\]",
        ),
        ({"a": [1, [2, 3]]}, "column 'a' of the table holds a list in row 1"),
        ({"a": np.array([{"b": 1}], object)}, "column 'a' of the table holds a dict in row 0"),
    ],
)
def test_other_things(given, words):
    with pytest.raises(HoldfastError, match=words):
        read_table(given)


def test_a_file_in_another_encoding(tmp_path):
    (tmp_path / "a.csv").write_bytes("a,b\n1,é\n".encode("latin-1"))
    with pytest.raises(HoldfastError, match=r"a\.csv' is not UTF-8 text .*; save it in this encoding"):
        read_table(tmp_path / "a.csv")


def test_a_text_among_numbers_is_named_with_its_line(tmp_path):
    table = read_table(write(tmp_path / "a.csv", "a,b\n1,x\n\n2,y\n3o,z\n"))
    with pytest.raises(
        HoldfastError, match=r"column 'a' holds '3o' in line 5 of 'a.csv', where other values are numbers"
    ):
        as_numbers(table, "a")
    table = read_table({"a": [1.0, np.inf]})
    with pytest.raises(HoldfastError, match="column 'a' holds an infinite value in row 1 of the table"):
        as_numbers(table, "a")
    assert as_texts(read_table({"a": [3.0, 3, "3.0", True]}), "a").tolist() == ["3", "3", "3", "1"]
    assert as_texts(read_table({"a": [3.0, "x", "3.0"]}), "a").tolist() == ["3", "x", "3.0"]
