"""What `hf-dflash bench` does: loads every pair, runs the plan on it, and writes the reports.

Measuring, summaries and plots are left to `hf_dflash.bench`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hf_dflash.bench import gpu_check, machine, plots, report, terms
from hf_dflash.bench.runner import Plan, methods_of, run_pair
from hf_dflash.draft.errors import MissingPackageError, PairingError
from hf_dflash.files import dump_json
from hf_dflash.pair import Pair, available_accelerators, load_pair, placement
from hf_dflash.prompts import load_prompts
from hf_dflash_cli.show import diagnostics

NOTHING_COMPARED = 1


def make_plan(prompt_sets: list[str], **settings: Any) -> Plan:
    """A plan over the prompts of all named sets; settings are the other fields of `Plan`."""
    return Plan(prompts=[prompt for spec in prompt_sets for prompt in load_prompts(spec)], **settings)


def run(targets: list[str], drafts: list[str], plan: Plan, loading: dict[str, Any], out: Path, as_json: bool) -> None:
    """Run the plan with every target and every draft that fits it, then report; Ctrl-C and an error end the measuring,
    but what is done is reported.

    Raises:
        typer.Exit: none of the requested methods could be measured.
    """
    report.check_folder(out, report.RESULT_FILES)
    results = report.Results(machine.conditions(), _settings(plan, loading), {}, [])
    try:
        _measure(targets, drafts, plan, loading, results, out / "results.json")
    except (KeyboardInterrupt, Exception) as end:
        if results.runs:
            what = "interrupted" if isinstance(end, KeyboardInterrupt) else "ended by an error"
            diagnostics().print(f"{what}: this report covers the prompts that were finished")
            _report(results, out, as_json)
        raise
    _report(results, out, as_json)
    if plan.names() != ["plain"] and all(run.method == "plain" for run in results.runs):
        raise typer.Exit(NOTHING_COMPARED)


def report_again(stored: Path, out: Path, as_json: bool) -> None:
    """Rewrite the reports of a stored results.json."""
    report.check_folder(out, report.RESULT_FILES)
    _report(report.Results.read_json(stored), out, as_json)


def _settings(plan: Plan, loading: dict[str, Any]) -> dict[str, Any]:
    """The settings a reader needs to understand the results."""
    return {
        "dtype": loading["dtype"],
        "quantization": loading["quantization"],
        "gguf_file": loading["gguf_file"],
        "chat_template_kwargs": loading["chat_template_kwargs"],
        "max_new_tokens": plan.max_new_tokens,
        "repeats": plan.repeats,
        "seed": plan.seed,
        "raw": plan.raw,
    }


def _measure(
    targets: list[str], drafts: list[str], plan: Plan, loading: dict[str, Any], results: report.Results, path: Path
) -> None:
    """Fill `results` with every target and every draft that fits it.

    Raises:
        PairingError: no draft fits any target.
    """
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    pairs = [(target, draft) for target in targets for draft in drafts]
    with Progress(*columns, console=diagnostics()) as progress:
        for target, draft in pairs:
            name = Path(target).name
            task = progress.add_task(f"{name}: loading", total=plan.count())
            advance = partial(progress.update, task, advance=1)
            try:
                pair = load_pair(target, draft, **loading)
                _describe(pair, results, progress.console)
                of_pair = f" ({target} + {draft})" if len(pairs) > 1 else ""
                _measure_pair(pair, of_pair, plan, results, path, lambda text, step=advance: step(description=text))
            except PairingError as error:
                results.left_out[f"{target} + {draft}"] = str(error)
                continue
            progress.update(task, completed=plan.count(), description=f"{name}: done")
    if not results.runs:
        raise PairingError("No draft fits any of the targets: " + " ".join(results.left_out.values()))


def _describe(pair: Pair, results: report.Results, console: Console) -> None:
    """Print and store where a pair is and which defaults of its target are set aside."""
    console.print(f"{Path(pair.target_name).name}: {placement(pair.target, pair.draft)}", markup=False, soft_wrap=True)
    results.settings["dtype"] = str(pair.target.dtype).removeprefix("torch.")
    results.settings["device"] = str(pair.target.device)
    if defaults := terms.set_aside(pair.target):
        results.settings.setdefault("set_aside", {})[pair.target_name] = defaults
        words = ", ".join(f"{name} = {value}" for name, value in defaults.items())
        console.print(f"set aside for all methods, on equal terms: {words}", markup=False, soft_wrap=True)


def _measure_pair(
    pair: Pair, of_pair: str, plan: Plan, results: report.Results, path: Path, advance: Callable[[str], None]
) -> None:
    """Fill `results` with one pair's runs; `of_pair` goes after the names of methods that are left out.

    The results are written after every prompt, so that what was measured survives an interrupted benchmark.
    """
    methods, left_out = methods_of(plan, pair)
    for runs in run_pair(pair, plan, methods, advance, left_out):
        results.left_out |= {f"{name}{of_pair}": reason for name, reason in left_out.items()}
        results.runs = [
            run
            for run in results.runs + runs
            if (run.target, run.draft) != (pair.target_name, pair.draft_name) or run.method not in left_out
        ]
        results.write_json(path)


def _report(results: report.Results, out: Path, as_json: bool) -> None:
    """Write the files made from the results and print the table. The plots come last: they may not be possible."""
    rows = results.rows()
    table = report.markdown_table(rows)
    report.write_csv(rows, out / "results.csv")
    (out / "table.md").write_text(f"{table}\n{report.conditions_line(results)}\n", encoding="utf-8")
    if as_json:
        print(dump_json([vars(row) for row in rows]))
    else:
        Console(highlight=False, soft_wrap=True).print(table, markup=False)
    console = diagnostics()
    for name, reason in results.left_out.items():
        console.print(f"{name} was skipped: {reason}", markup=False, soft_wrap=True)
    try:
        plots.draw_all(rows, out)
    except MissingPackageError as error:
        console.print(f"no plots: {error}", markup=False, soft_wrap=True)
    console.print(f"written to {out}/", markup=False, soft_wrap=True)


def check_gpu(shapes: list[str] | None, device: str | None, out: Path, as_json: bool) -> None:
    """The prepared GPU run; writes gpu-check.json and gpu-check.md."""
    report.check_folder(out, report.GPU_CHECK_FILES)
    device = device or next(iter(available_accelerators()), "cuda")
    plan = gpu_check.Check(device=device)
    if shapes:
        plan = gpu_check.Check(shapes=shapes, device=device)
    console = diagnostics()
    rows = gpu_check.check(plan, log=console.print)
    results = {"conditions": machine.conditions(), "rows": rows}
    (out / "gpu-check.json").write_text(dump_json(results, indent=1) + "\n", encoding="utf-8")
    (out / "gpu-check.md").write_text(gpu_check.table(rows), encoding="utf-8")
    print(dump_json(rows) if as_json else gpu_check.table(rows))
