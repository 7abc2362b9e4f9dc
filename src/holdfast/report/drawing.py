"""A matplotlib figure that notebooks show."""

from io import BytesIO

from matplotlib.figure import Figure

DPI = 110


class Drawing(Figure):
    """A figure that is not registered in pyplot; notebooks show it with any backend."""

    def _repr_png_(self) -> bytes:
        drawn = BytesIO()
        self.savefig(drawn, format="png", dpi=DPI)
        return drawn.getvalue()
