"""One picture of a training run.

Owns: loss and tau over steps, acceptance by position, as a PNG.

Does not know: where the log comes from; it takes transformers' `log_history`.
"""

from pathlib import Path
from typing import Any

from hf_dflash.draft.errors import MissingPackageError


def plot_run(log_history: list[dict[str, Any]], path: str | Path) -> Path:
    """Draw what is in the log.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError("the plot of a training run needs matplotlib: `pip install matplotlib`") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, taus = figure.subplots(1, 2)
    _line(losses, log_history, "loss", "training loss")
    losses.set(xlabel="step", ylabel="loss")
    _line(taus, log_history, "tau_of_blocks", "blocks of the step (argmax)")
    _line(taus, log_history, "eval_tau", "held-out, by walking", marker="o")
    last = next((entry for entry in reversed(log_history) if "eval_tau" in entry), {})
    shares = [f"{last[f'eval_accepted_{k}']:.2f}" for k in range(1, 65) if f"eval_accepted_{k}" in last]
    taus.set(
        xlabel="step",
        ylabel="tokens per target forward",
        title=f"held-out acceptance by position: {' '.join(shares)}" if shares else "",
    )
    taus.title.set_fontsize(8)
    for axes in (losses, taus):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(path, dpi=110)
    return Path(path)


def _line(axes: Any, log_history: list[dict[str, Any]], key: str, label: str, marker: str = "") -> None:
    points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
    if points:
        axes.plot(*zip(*points, strict=True), marker=marker, label=label)
