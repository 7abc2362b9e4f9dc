"""Seeing what a run did: figures, tables, the HTML report, the dashboard, trackers."""

from holdfast.report.figures import FIGURES
from holdfast.report.tables import table

__all__ = ["FIGURES", "table"]
