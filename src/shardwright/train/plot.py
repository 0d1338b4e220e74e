"""The loss curve of a run as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw_losses(lines: list[dict[str, Any]], path: Path) -> bool:
    """Draw training and held-out loss over the steps into a PNG file; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  an extra
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], lw=0.8, label="training")
    measured = [line for line in lines if line["held_out_loss"] is not None]
    held_out = [line["held_out_loss"] for line in measured]
    axes.plot([line["step"] for line in measured], held_out, "o-", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True
