"""Made-up stored results."""

from typing import Any

from holdfast.papers.cells import Cell


def entry(cell: Cell, accuracy: list[float], **final: Any) -> dict[str, Any]:
    """A run of a cell with these accuracies after its rounds."""
    return {
        "column": cell.column,
        "row": cell.row,
        "seed": cell.seed,
        "hash": cell.hash,
        "settings": dict(cell.settings),
        "federation": "0" * 64,
        "versions": {"holdfast": "0"},
        "device": "made up",
        "device_type": "cuda",
        "engine": "vectorized",
        "rounds": len(accuracy),
        "seconds": 60.0,
        "final": {"accuracy": accuracy[-1], "class_accuracy": [accuracy[-1]], **final},
        "curves": {"accuracy": accuracy, "forgetting": [None] + [0.01] * (len(accuracy) - 1)},
    }
