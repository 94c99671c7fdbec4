"""Plot a training run from transformers' `log_history`: loss and tau over steps, acceptance by position, as a PNG."""

from pathlib import Path
from typing import Any

from hf_dflash.draft.errors import MissingPackageError
from hf_dflash.files import atomic_path


def plot_run(log_history: list[dict[str, Any]], path: str | Path) -> Path:
    """Plot the log and return the path of the PNG.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError("plotting a training run needs matplotlib: `pip install matplotlib`") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, taus = figure.subplots(1, 2)
    _line(losses, log_history, "loss", "training loss")
    losses.set(xlabel="step", ylabel="loss")
    _line(taus, log_history, "tau_of_blocks", "training blocks (argmax)")
    _line(taus, log_history, "eval_tau", "held-out (walk)", marker="o")
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
    with atomic_path(Path(path)) as partial:
        figure.savefig(partial, dpi=110, format="png")
    return Path(path)


def _line(axes: Any, log_history: list[dict[str, Any]], key: str, label: str, marker: str = "") -> None:
    points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
    if points:
        axes.plot(*zip(*points, strict=True), marker=marker, label=label)
