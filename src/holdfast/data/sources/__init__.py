"""Sources of data: data sets known by name, and the user's own files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.files import existing
from holdfast.core.settings import DEFAULT_PARTITION
from holdfast.core.spec import named, parse_options
from holdfast.data.dataset import Dataset, Group
from holdfast.data.preprocess import Preprocess, preprocess_for
from holdfast.data.sources import files
from holdfast.data.sources.formats import Arrays, read_npz
from holdfast.data.sources.registry import DATASETS, FileLayout, Source
from holdfast.data.tables.table import SUFFIXES

__all__ = ["DATASETS", "Source", "check_name", "default_partition", "describe", "load", "split_options"]


def load(
    name_or_path: str | Path,
    *,
    root: Path | None = None,
    preprocess: str | Preprocess | None = None,
    download: bool = True,
) -> Dataset:
    """A data set by name (see `DATASETS`), from a ``.npz`` file, or from a folder of images.

    Files of named data sets are searched for in ``root``, or else ``$HOLDFAST_DATA``, then in the cache
    (``~/.cache/holdfast``), and downloaded into the cache unless ``download`` is false. Files with a published md5
    are checked against it.

    A ``.npz`` file holds ``x_train``, ``y_train``, ``x_test`` and ``y_test`` (see `Dataset.from_arrays`); a
    folder of images is read by `Dataset.from_folder`. A CSV or Parquet file needs the name of its target column
    and accepts the other options of `Dataset.from_frame`: ``patients.csv:target=ill,drop=[id]``. A folder with one such
    file per site accepts the options of `federation_from_sites`.

    ``preprocess`` is the name of a preset (``"fedntd"``; see `preprocess_for`), a `Preprocess`, or None for plain
    normalisation.
    """
    check_name(name_or_path)
    if (table := _table_options(name_or_path)) is not None:
        return _load_tables(*table, preprocess)
    name, path = str(name_or_path), existing(name_or_path) or Path(name_or_path)
    known = name in DATASETS
    if not isinstance(preprocess, Preprocess):
        preprocess = preprocess_for(name if known else path.stem, preprocess or "plain")
    if known:
        return _load_known(DATASETS[name], root, preprocess, download)
    if path.is_dir():
        return Dataset.from_folder(path, preprocess=preprocess)
    return Dataset.from_arrays(*read_npz(path), name=path.stem, preprocess=preprocess)


def check_name(name_or_path: str | Path) -> None:
    """Raise an error if the name or path is not that of a data set, before anything is read or downloaded."""
    if not isinstance(name_or_path, (str, Path)):
        raise HoldfastError(
            f"the data set is {named(name_or_path)}; it must be a name, such as 'digits', or a path"
        )
    if str(name_or_path) in DATASETS or Path(name_or_path).suffix == ".npz" or _table_options(name_or_path):
        return
    path = existing(name_or_path)
    if path is not None:
        if path.is_dir():
            return
        raise HoldfastError(
            f"{path} is neither a folder of images nor a file that ends in .npz, {', '.join(SUFFIXES)}"
        )
    if "/" in str(name_or_path):
        raise HoldfastError(
            f"there is no folder {Path(name_or_path)}, and no data set of that name; data files end in .npz"
        )
    raise unknown("data set", str(name_or_path), DATASETS)


def split_options(name_or_path: str | Path) -> tuple[Path, str] | None:
    """An existing path and the options after it, as in ``patients.csv:target=ill``; None for anything else."""
    text = str(name_or_path)
    for path, options in ((text, ""), text.partition(":")[::2]):
        if (found := existing(path)) is not None:
            return found, options
    return None


def default_partition(name_or_path: str) -> str:
    """The default partition: the data set's own, such as by-site, or the general default."""
    if name_or_path in DATASETS:
        return DATASETS[name_or_path].partition or DEFAULT_PARTITION
    path, options = _table_options(name_or_path) or (None, {})
    return "by-site" if path is not None and (path.is_dir() or "site" in options) else DEFAULT_PARTITION


def _table_options(name_or_path: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """The path and the options of a table or a folder of tables; None for anything else."""
    found = None if str(name_or_path) in DATASETS else split_options(name_or_path)
    if found is None:
        return None
    path, options = found
    if path.suffix in SUFFIXES or (path.is_dir() and any(one.suffix in SUFFIXES for one in path.iterdir())):
        return path, parse_options(options, f"data '{name_or_path}'")
    return None


def _load_tables(path: Path, options: dict[str, Any], preprocess: str | Preprocess | None) -> Dataset:
    """Load a table, or the tables of all sites in a folder."""
    from holdfast.data.sites import federation_from_sites  # which imports this package

    known = [
        "target",
        "test",
        "seed",
        "categorical",
        "drop",
        "classes",
        "task",
        *([] if path.is_dir() else ["site"]),
    ]
    for option in options:
        if option not in known:
            raise unknown("option of tables", option, known)
    if "target" not in options:
        raise HoldfastError(f"name the target column of {path}, as in '{path.name}:target=ill'")
    dataset = (
        federation_from_sites(path, **options).dataset
        if path.is_dir()
        else Dataset.from_frame(path, **options)
    )
    if isinstance(preprocess, Preprocess):
        preprocess.check(dataset.shape)
        return replace(dataset, preprocess=preprocess)
    preprocess_for(dataset.name, preprocess or "plain")  # raises for a preset of other data
    return dataset


def describe(root: Path | None = None) -> list[dict[str, object]]:
    """Description and location of every data set known by name, as plain values.

    ``found`` is the folder of its files (``"embedded"`` for a data set without files), or None; then ``missing``
    describes which files to get, from where, and where to put them. Sizes are those of the published data set, or of
    the files found if these hold only a part of it.
    """
    rows: list[dict[str, object]] = []
    for source in DATASETS.values():
        location = None if source.embedded else _find(source, root)
        found = "embedded" if source.embedded else str(location[1]) if location else None
        train, test, shape = _sizes(source, location)
        rows.append(
            {
                "name": source.name,
                "classes": source.classes,
                "shape": list(shape),
                "train": train,
                "test": test,
                "found": found,
                "missing": None if found else _missing(source, root),
                "address": source.page,
                "licence": source.licence,
            }
        )
    return rows


def _sizes(source: Source, location: tuple[FileLayout, Path] | None) -> tuple[int, int, tuple[int, ...]]:
    """The numbers of training and test samples, and the shape of a sample."""
    if location is not None and location[0].is_partial:
        with suppress(HoldfastError):  # `load` reports the error
            arrays = _read(source, *location)
            found = Dataset.from_arrays(arrays.x_train, arrays.y_train, arrays.x_test, arrays.y_test)
            return len(found.y_train), len(found.y_test), found.shape
    return source.train, source.test, source.shape


def _load_known(source: Source, root: Path | None, preprocess: Preprocess, download: bool) -> Dataset:
    if source.embedded:
        arrays = source.embedded()
    else:
        layout, folder = _find(source, root) or _fetch(source, root, download)
        # A package contains the same arrays compressed differently; its files were checked on installation.
        if folder != source.installed:
            for file in layout.files:
                files.check_md5(folder / file.name, file)
        arrays = _read(source, layout, folder)
        arrays = replace(arrays, groups={**arrays.groups, **_writers(source, root)})
    return Dataset.from_arrays(**vars(arrays), name=source.name, preprocess=preprocess)


def _read(source: Source, layout: FileLayout, folder: Path) -> Arrays:
    try:
        return layout.read(folder)
    except HoldfastError:
        raise
    except Exception as error:  # a damaged file may raise any error in a reader
        raise HoldfastError(
            f"the {source.name} files in {folder} cannot be read ({error}); get them again from {source.page}"
        ) from error


def _find(source: Source, root: Path | None) -> tuple[FileLayout, Path] | None:
    """The first layout whose files are all in one folder, and that folder."""
    candidates = [
        (layout, base / folder)
        for base in files.search_roots(root)
        for layout in source.layouts
        for folder in (layout.home, *layout.also)
    ]
    if source.installed:
        candidates.append((source.layouts[0], source.installed))
    for layout, folder in candidates:
        if all((folder / file.name).exists() for file in layout.files):
            return layout, folder
    return None


def _fetch(source: Source, root: Path | None, download: bool) -> tuple[FileLayout, Path]:
    """Put a layout's files into the cache: from archives in a search root if there are any, else by download."""
    roots = files.search_roots(root)
    layout = next((one for one in source.layouts if _archives(one, roots)), source.layouts[0])
    local = _archives(layout, roots)
    cache = roots[-1] / layout.home
    for file in layout.archives:
        if archive := local.get(file.name):
            files.check_md5(archive, file)
            files.unpack(archive, cache)
        else:
            archive = _download(source, file, cache, root, download)
            files.unpack(archive, cache)
            archive.unlink()
    for file in () if layout.archives else layout.files:
        if not (cache / file.name).exists():
            _download(source, file, cache, root, download)
    found = _find(source, root)
    if found is None:
        raise HoldfastError(_missing(source, root))
    return found


def _archives(layout: FileLayout, roots: Sequence[Path]) -> dict[str, Path]:
    """The layout's archives that lie in a search root, by name."""
    folders = [folder for base in roots for folder in (base / layout.home, base)]
    return {f.name: d / f.name for f in layout.archives for d in reversed(folders) if (d / f.name).is_file()}


def _download(source: Source, file: files.File, cache: Path, root: Path | None, allowed: bool) -> Path:
    if not (allowed and file.url):
        raise HoldfastError(_missing(source, root))
    try:
        return files.download(file, cache)
    except OSError as error:
        raise HoldfastError(_missing(source, root, f" (the download failed: {error})")) from error


def _missing(source: Source, root: Path | None, reason: str = "") -> str:
    """A sentence with the missing files, their addresses and the folder to put them in."""
    layout = source.layouts[0]
    folder = files.search_roots(root)[0] / layout.home
    published = layout.archives or layout.files
    missing = [file for file in published if not (folder / file.name).exists()] or published
    names = ", ".join(file.name for file in missing)
    addresses = ", ".join(dict.fromkeys(file.url or source.page for file in missing))
    them = "it" if len(missing) == 1 else "them"
    return f"{source.name} needs {names}{reason}: get {them} from {addresses} and put {them} in {folder}"


def _writers(source: Source, root: Path | None) -> dict[str, Group]:
    """The "writer" group of a data set whose writers are published separately; empty if their files are missing."""
    if source.writers is None:
        return {}
    published, read = source.writers
    for base in files.search_roots(root):
        folder = base / f"{source.name}-writers"
        if all((folder / file.name).exists() for file in published):
            for file in published:
                files.check_md5(folder / file.name, file)
            return {"writer": read(folder)}
    return {}
