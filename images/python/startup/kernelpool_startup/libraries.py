"""Defaults of the libraries that show things, for a reader who is no person at a terminal.

Above: `app.py`. Below: pandas, and matplotlib's and plotly's variables set in `environment.py`.
"""

import sys
from types import ModuleType

from kernelpool_startup.imports import after_import


def install() -> None:
    """Have defaults set as soon as a library is imported."""
    after_import("pandas", _widen_tables)


def _widen_tables(pandas: ModuleType) -> None:
    """Show columns rather than dots: what is not shown is believed to be empty."""
    pandas.set_option("display.max_columns", 100)
    pandas.set_option("display.width", 160)
    pandas.set_option("display.max_colwidth", 100)


def close_figures() -> None:
    """Close what matplotlib has open, if it was ever imported."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close("all")
