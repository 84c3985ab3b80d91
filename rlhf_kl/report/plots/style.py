"""Colours and fonts of all pictures. They can be told apart without colour vision, and by more than colour."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib

# name: (on light, on dark). Light values are what matplotlib draws; pages replace them by var(--name).
# No two may be equal within a column.
COLOURS = {
    "ink": ("#1b1b1f", "#e8e8ec"),
    "muted": ("#5f6368", "#a3a7ae"),
    "grid": ("#dcdfe4", "#33373d"),
    "band": ("#dcefe2", "#1f3a2b"),
    "alert": ("#b3261e", "#ff8a80"),
    # Hues after Okabe and Ito, darkened until they read as text on white.
    "c1": ("#0072b2", "#5db7f0"),
    "c2": ("#c1440e", "#ff8d5c"),
    "c3": ("#007a5a", "#3ecf9f"),
    "c4": ("#8e4a9e", "#d19be0"),
    "c5": ("#9a6a00", "#e8b53b"),
    "c6": ("#6b5b4f", "#c9b8aa"),
    # An ordered scale, for the values of one quantity.
    "s1": ("#440154", "#b58bd6"),
    "s2": ("#414487", "#8d91e0"),
    "s3": ("#2a788e", "#5bb3cf"),
    "s4": ("#1f8a6d", "#3fd3a5"),
    "s5": ("#5c9a1a", "#95e36d"),
    "s6": ("#a08c00", "#ffe14d"),
}
HUES = ("c1", "c2", "c3", "c4", "c5", "c6")
ORDERED = ("s1", "s2", "s3", "s4", "s5", "s6")
DASHES = ("solid", (0, (5, 2)), (0, (1.2, 1.6)), (0, (6, 2, 1.2, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")


def colour(name: str) -> str:
    """The colour as it is drawn on white."""
    return COLOURS[name][0]


@contextmanager
def picture_style(size: float) -> Iterator[None]:
    """matplotlib's settings while a picture is drawn; `size` of the type in points."""
    settings = {
        "font.family": "DejaVu Sans",
        "font.size": size,
        "axes.titlesize": size * 1.08,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.labelsize": size * 0.95,
        "axes.labelcolor": colour("muted"),
        "axes.edgecolor": colour("muted"),
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": colour("grid"),
        "grid.linewidth": 0.7,
        "xtick.color": colour("muted"),
        "ytick.color": colour("muted"),
        "xtick.labelsize": size * 0.9,
        "ytick.labelsize": size * 0.9,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
        "xtick.minor.size": 0,
        "text.color": colour("ink"),
        "text.parse_math": False,  # names are text, whatever they hold
        "legend.fontsize": size * 0.9,
        "lines.linewidth": 1.6,
        "svg.fonttype": "none",
        "svg.hashsalt": "rlhf-kl",
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*missing from font.*")  # a run's name may be in any script
        yield


def css() -> str:
    """The colours as CSS variables, for light and dark."""
    light = "".join(f"--{name}:{values[0]};" for name, values in COLOURS.items())
    dark = "".join(f"--{name}:{values[1]};" for name, values in COLOURS.items())
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
