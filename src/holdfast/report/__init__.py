"""Results of runs: figures, tables, the HTML report, the dashboard, trackers."""

from holdfast.report.dashboard import serve
from holdfast.report.federation import draw_federation, federation_text
from holdfast.report.figures import FIGURES
from holdfast.report.page import write_report
from holdfast.report.printing import figure
from holdfast.report.tables import table
from holdfast.report.trackers import TRACKERS, Tracker, tracker

__all__ = [
    "FIGURES",
    "TRACKERS",
    "Tracker",
    "draw_federation",
    "federation_text",
    "figure",
    "serve",
    "table",
    "tracker",
    "write_report",
]
