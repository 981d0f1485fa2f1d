"""A run as a picture: latencies as distributions, load over time, CPU by process. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from .outcome import Outcome
from .results import concurrency, tokens_per_second

_BLUE, _ORANGE, _GREY = "#1f5f8b", "#d9822b", "#8a8f94"
#: More points of a distribution are not seen.
_POINTS = 2000


class PlotError(RuntimeError):
    """Nothing can be drawn."""


def require_matplotlib() -> None:
    """Raises PlotError if it is not installed; called before the run, not after it."""
    if find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib: pip install matplotlib (or this project's extra `plot`)")


def draw(outcomes: Sequence[Outcome], figures: Mapping[str, Any], file: Path) -> None:
    """Draw a run's finished requests into a file, whose name's end says the format."""
    require_matplotlib()
    from matplotlib.figure import Figure

    done = [outcome for outcome in outcomes if outcome.completed]
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    _distribution(axes[0][0], {"TTFT": [outcome.ttft for outcome in done], "E2EL": [o.latency for o in done]})
    tpots = [tpot for outcome in done if (tpot := outcome.tpot()) is not None]
    _distribution(axes[0][1], {"ITL": [gap for outcome in done for gap in outcome.itls], "TPOT": tpots})
    _load(axes[1][0], outcomes)
    _cpu(axes[1][1], figures)
    figure.suptitle(_title(figures))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _title(figures: Mapping[str, Any]) -> str:
    return (
        f"{figures['model_id']}: {figures['completed']} requests, {figures['output_throughput']:.0f} output tokens/s, "
        f"{figures['failed']} failed"
    )


def _distribution(axes: Any, samples: Mapping[str, Sequence[float]]) -> None:
    """How many of the values lie below, on a logarithmic scale: tails are seen, and no bin hides them."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for (name, values), colour in zip(samples.items(), (_BLUE, _ORANGE)):
        if len(values):
            percents = np.linspace(0, 100, min(_POINTS, len(values) + 1))
            axes.plot(np.maximum(np.percentile(values, percents) * 1000, 1e-3), percents, label=name, color=colour)
    axes.set(xscale="log", xlabel="ms", ylabel="% of the values below")
    every = np.concatenate([np.asarray(values) for values in samples.values()]) * 1000
    if positive := sorted(every[every > 0]):
        # Chunks that came in one read are no time apart; a scale with a few of those would show nothing else.
        low, high = positive[len(positive) // 100] / 1.5, positive[-1] * 1.5
        axes.set_xlim(low, high)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    for percent in (50, 99):
        axes.axhline(percent, color=_GREY, linewidth=0.5, linestyle=":")
    axes.grid(True, which="major", axis="x", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


def _load(axes: Any, outcomes: Sequence[Outcome]) -> None:
    steps = concurrency(outcomes)
    start = steps[0][0] if steps else 0.0
    axes.step([time - start for time, _ in steps], [count for _, count in steps], where="post", color=_BLUE)
    axes.set(xlabel="s", title="Load")
    axes.set_ylabel("open requests", color=_BLUE)
    tokens = tokens_per_second(outcomes)
    other = axes.twinx()
    other.bar(np.arange(len(tokens)) + 0.5, tokens, width=0.95, color=_ORANGE, alpha=0.35)
    other.set_ylabel("output tokens in this second", color=_ORANGE)
    # Lines before bars.
    axes.set_zorder(other.get_zorder() + 1)
    axes.patch.set_visible(False)


def _cpu(axes: Any, figures: Mapping[str, Any]) -> None:
    processes = figures["server_processes"] or []
    costs = [(f"{row['name']} [{row['pid']}]", row["cpu_us_per_output_token"]) for row in processes]
    costs.append(("this client", figures["client_cpu_us_per_output_token"]))
    rows = [(name, value or 0.0) for name, value in reversed(costs)]
    colours = [_GREY if name == "this client" else _BLUE for name, _ in rows]
    bars = axes.barh(range(len(rows)), [value for _, value in rows], height=0.45, color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    # Names above the bars: beside the axis they would take half of the column's width.
    for height, (name, _) in enumerate(rows):
        axes.text(0, height + 0.27, f" {name}", va="bottom", fontsize=9)
    axes.set(xlabel="µs per output token", title="CPU by process", yticks=[], ylim=(-0.5, len(rows) - 0.2))
    axes.margins(x=0.12)
