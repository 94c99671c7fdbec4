"""What `hf-dflash bench` does: loads every pair, runs the plan on it, and writes the reports.

Measuring, summaries and plots are left to `hf_dflash.bench`.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hf_dflash.bench import gpu_check, machine, plots, report
from hf_dflash.bench.runner import Plan, methods_of, run_pair
from hf_dflash.draft.errors import PairingError
from hf_dflash.pair import load_pair
from hf_dflash.prompts import load_prompts
from hf_dflash_cli.show import diagnostics


def make_plan(prompt_sets: list[str], **settings: Any) -> Plan:
    """A plan over the prompts of all named sets; settings are the other fields of `Plan`."""
    return Plan(prompts=[prompt for spec in prompt_sets for prompt in load_prompts(spec)], **settings)


def run(targets: list[str], drafts: list[str], plan: Plan, loading: dict[str, Any], out: Path, as_json: bool) -> None:
    """Run the plan with every target and every draft that fits it, then report; Ctrl-C reports on what is done."""
    results = report.Results(machine.conditions(), _settings(plan, loading), {}, [])
    try:
        _measure(targets, drafts, plan, loading, results, out / "results.json")
    except KeyboardInterrupt:
        if results.runs:
            diagnostics().print("interrupted: this report covers the prompts that were finished")
            _report(results, out, as_json)
        raise
    _report(results, out, as_json)


def report_again(stored: Path, out: Path, as_json: bool) -> None:
    """Rewrite the reports of a stored results.json."""
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

    The results are written after every prompt, so that what was measured survives an interrupted benchmark.

    Raises:
        PairingError: no draft fits any target.
    """
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=diagnostics()) as progress:
        for target, draft in [(target, draft) for target in targets for draft in drafts]:
            name = Path(target).name
            task = progress.add_task(f"{name}: loading", total=plan.count())
            advance = partial(progress.update, task, advance=1)
            try:
                pair = load_pair(target, draft, **loading)
                results.settings["dtype"] = str(pair.target.dtype).removeprefix("torch.")
                methods, left_out = methods_of(plan, pair)
                results.left_out |= left_out
                for runs in run_pair(pair, plan, methods, lambda text, advance=advance: advance(description=text)):
                    results.runs += runs
                    results.write_json(path)
            except PairingError as error:
                results.left_out[f"{target} + {draft}"] = str(error)
                continue
            progress.update(task, completed=plan.count(), description=f"{name}: done")
    if not results.runs:
        raise PairingError("No draft fits any of the targets: " + " ".join(results.left_out.values()))


def _report(results: report.Results, out: Path, as_json: bool) -> None:
    """Write the files made from the results, and print the table."""
    rows = results.rows()
    table = report.markdown_table(rows)
    report.write_csv(rows, out / "results.csv")
    (out / "table.md").write_text(f"{table}\n{report.conditions_line(results)}\n", encoding="utf-8")
    console = diagnostics()
    plots.draw_all(rows, out)
    for name, reason in results.left_out.items():
        console.print(f"{name} was skipped: {reason}")
    console.print(f"written to {out}/")
    if as_json:
        print(json.dumps(report.without_nan([vars(row) for row in rows])))
    else:
        Console(highlight=False, soft_wrap=True).print(table, markup=False)


def check_gpu(shapes: list[str] | None, device: str, out: Path, as_json: bool) -> None:
    """The prepared GPU run; writes gpu-check.json and gpu-check.md."""
    plan = gpu_check.Check(device=device)
    if shapes:
        plan = gpu_check.Check(shapes=shapes, device=device)
    console = diagnostics()
    rows = gpu_check.check(plan, log=console.print)
    results = {"conditions": machine.conditions(), "rows": rows}
    (out / "gpu-check.json").write_text(json.dumps(report.without_nan(results), indent=1) + "\n", encoding="utf-8")
    (out / "gpu-check.md").write_text(gpu_check.table(rows), encoding="utf-8")
    print(json.dumps(report.without_nan(rows)) if as_json else gpu_check.table(rows))
