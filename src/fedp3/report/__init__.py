"""Reports about runs: an HTML page, figure files, and rows that compare runs."""

from fedp3.report.comparison import compare
from fedp3.report.figures import draw_labels, write_figures
from fedp3.report.page import write_report

__all__ = ["compare", "draw_labels", "write_figures", "write_report"]
