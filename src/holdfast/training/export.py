"""Export of a run to files for other programs: weights, programs, metrics, a model card."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.core import files
from holdfast.core.errors import HoldfastError, install, unknown
from holdfast.report.round_table import rounds_csv
from holdfast.runs.tensors import to_bytes
from holdfast.training.model_card import model_card


@dataclass(frozen=True)
class Exported:
    """The content of an export; weights and model are created only for formats that need them."""

    experiment: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    federation: Mapping[str, Any]  # as in federation.json
    weights: Callable[[], Mapping[str, Tensor]]
    model: Callable[[], nn.Module]  # from preprocessed samples to scores


def export(what: Exported, path: str | Path, format: str | None = None) -> Path:
    """Write a file in one of `FORMATS`, by default chosen by the file's ending; returns its path."""
    path = Path(path)
    if format is None:
        format = next((name for name, (ending, _) in FORMATS.items() if ending == path.suffix.lower()), None)
        if format is None:
            endings = ", ".join(ending for ending, _ in FORMATS.values())
            raise HoldfastError(
                f"cannot infer the export format from '{path}'; the path must end in {endings}, or a format "
                "must be given"
            )
    if format not in FORMATS:
        raise unknown("export format", format, FORMATS)
    _, content_of = FORMATS[format]
    content = content_of(what)
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, content)
    return path


def _state_dict(what: Exported) -> bytes:
    file = io.BytesIO()
    torch.save({name: tensor.detach().cpu().clone() for name, tensor in what.weights().items()}, file)
    return file.getvalue()


def _safetensors(what: Exported) -> bytes:
    return to_bytes(what.weights())


def _metrics(what: Exported) -> bytes:
    return rounds_csv(what.experiment, what.records)


def _card(what: Exported) -> bytes:
    return model_card(what.experiment, what.records, what.federation, what.weights()).encode()


def _torch_program(what: Exported) -> bytes:
    file = io.BytesIO()
    model, example = _model_and_example(what)
    with _one_sentence("torch.export"):
        torch.export.save(_program(model, example), file)
    return file.getvalue()


def _onnx(what: Exported) -> bytes:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise HoldfastError(f"export to ONNX needs {error.name}: {install('export')}") from None
    model, example = _model_and_example(what)
    with _one_sentence("ONNX"):
        made = torch.onnx.export(
            _program(model, example), input_names=["x"], output_names=["scores"], dynamo=True, verbose=False
        )
        assert made is not None
        content: bytes = made.model_proto.SerializeToString()
    return content


FORMATS: dict[str, tuple[str, Callable[[Exported], bytes]]] = {
    "state_dict": (".pt", _state_dict),
    "safetensors": (".safetensors", _safetensors),
    "torch.export": (".pt2", _torch_program),
    "onnx": (".onnx", _onnx),
    "metrics": (".csv", _metrics),
    "card": (".md", _card),
}
"""The formats: the ending of their files and the function that writes their content."""


def _program(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    return torch.export.export(model, (example,), dynamic_shapes=({0: batch},), strict=False)


def _model_and_example(what: Exported) -> tuple[nn.Module, Tensor]:
    """A copy of the model on the CPU, and preprocessed samples that it accepts."""
    model = copy.deepcopy(what.model()).cpu().eval()
    shape, kind = tuple(what.experiment["shape"]), what.experiment.get("sample_dtype")
    whole = torch.zeros((2, *shape), dtype=torch.int64)
    if kind == "int64":
        return model, whole
    real = torch.zeros((2, *shape), dtype=next(model.parameters()).dtype)
    if kind is None:  # of a run of an earlier version
        try:
            with torch.no_grad():
                model(real)
        except (RuntimeError, TypeError):
            return model, whole
    return model, real


@contextmanager
def _one_sentence(target: str) -> Iterator[None]:
    """Raise export errors of PyTorch as one sentence, without its intermediate messages."""
    disabled, output = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(output), redirect_stderr(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # of many classes, by torch's tracer and translator
        reason = " ".join(str(error).split("\n\n")[0].split())[:300]
        raise HoldfastError(
            f"the model cannot be exported by {target}: {type(error).__name__}: {reason}; its weights can be, as "
            "state_dict or safetensors"
        ) from error
    finally:
        logging.disable(disabled)
