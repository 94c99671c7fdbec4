"""`hf-dflash bench`: compare ways of decoding.

Owns: which pairs, methods and prompts are asked for, and where the results go. Does not know: measuring, summing up,
drawing.
"""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hf_dflash.bench import gpu_check, machine, plots, report
from hf_dflash.bench.pair import load_pair
from hf_dflash.bench.prompts import load_prompts
from hf_dflash.bench.runner import Plan, methods_of, run_pair
from hf_dflash.cli import options
from hf_dflash.cli.show import diagnostics
from hf_dflash.errors import PairingError

METHODS = ["prompt-lookup", "native", "authors", "dflash"]


def bench(
    target: Annotated[list[str] | None, typer.Option("--target", "-t", help="Target; may be repeated.")] = None,
    draft: Annotated[list[str] | None, typer.Option("--draft", "-d", help="Draft; may be repeated.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            help="May be repeated: plain-compiled, prompt-lookup, native, authors, dflash, dflash-bN (blocks of N). "
            "plain always runs. Default: " + ", ".join(METHODS) + ".",
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            "-p",
            help="May be repeated: chat, humaneval, gsm8k, math500, mt-bench or a JSONL file; ':N' takes the first N. "
            "Default: chat:20.",
        ),
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option("--temperature", "-T", min=0.0, help="May be repeated; default: 0 (greedy).")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 256,
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is run.")] = 1,
    seed: options.Seed = 0,
    template: options.Template = "{}",
    raw: Annotated[bool, typer.Option("--raw", help="Give prompts as they are, without the chat template.")] = False,
    dtype: options.Dtype = "auto",
    device_map: options.DeviceMap = None,
    quantization: options.Quantization = None,
    gguf_file: options.GgufFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)] = Path("bench-results"),
    again: Annotated[
        Path | None,
        typer.Option("--from", help="Measure nothing: make the reports of this results.json anew.", exists=True),
    ] = None,
    check_gpu: Annotated[
        bool,
        typer.Option(
            "--gpu-check", help="Only measure the cost of a round, with random weights at Qwen3-4B / 8B shapes."
        ),
    ] = False,
    shape: Annotated[
        list[str] | None, typer.Option(help="With --gpu-check: qwen3-4b, qwen3-8b, tiny; may be repeated.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compare ways of decoding on the same prompts, in one process, taking turns.

    Writes results.json (every run, with machine, versions and commit), results.csv, table.md and plots. Ctrl-C reports
    on what was measured until then.
    """
    out.mkdir(parents=True, exist_ok=True)
    if check_gpu:
        _check_gpu(shape, device_map or "cuda", out, as_json)
        return
    if again is not None:
        results = report.Results.read_json(again)
    else:
        if not target or not draft:
            raise typer.BadParameter("give at least one --target and one --draft")
        plan = Plan(
            methods=method or METHODS,
            prompts=[prompt for spec in prompts or ["chat:20"] for prompt in load_prompts(spec)],
            temperatures=temperature or [0.0],
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            seed=seed or 0,
            raw=raw,
        )
        loading = {
            "template": options.template_arguments(template),
            "dtype": dtype,
            "device_map": device_map,
            "quantization": quantization,
            "gguf_file": gguf_file,
            "trust_remote_code": trust_remote_code,
        }
        results = report.Results(machine.conditions(), _settings(plan, loading), {}, [])
        try:
            _measure(target, draft, plan, loading, results, out / "results.json")
        except KeyboardInterrupt:
            if results.runs:
                diagnostics().print("interrupted: the report is about the prompts that were done")
                _report(results, out, as_json)
            raise
    _report(results, out, as_json)


def _settings(plan: Plan, loading: dict) -> dict:
    """What a reader of the results must know about how they came about."""
    return {
        "dtype": loading["dtype"],
        "quantization": loading["quantization"],
        "gguf_file": loading["gguf_file"],
        "template": loading["template"],
        "max_new_tokens": plan.max_new_tokens,
        "repeats": plan.repeats,
        "seed": plan.seed,
        "raw": plan.raw,
    }


def _measure(
    targets: list[str], drafts: list[str], plan: Plan, loading: dict, results: report.Results, path: Path
) -> None:
    """Run the plan with every target and every draft that belongs to it.

    The results grow, and are written, with every prompt: what was measured outlives whatever ends a long measurement.

    Raises:
        PairingError: no draft belongs to any target.
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
        raise PairingError("No draft belongs to any target: " + " ".join(results.left_out.values()))


def _report(results: report.Results, out: Path, as_json: bool) -> None:
    """Write the files that are made from the results, and show the table."""
    rows = results.rows()
    table = report.markdown_table(rows)
    report.write_csv(rows, out / "results.csv")
    (out / "table.md").write_text(f"{table}\n{report.conditions_line(results)}\n", encoding="utf-8")
    console = diagnostics()
    plots.draw_all(rows, out)
    for name, reason in results.left_out.items():
        console.print(f"{name} did not run: {reason}")
    console.print(f"written to {out}/")
    if as_json:
        print(json.dumps(report.without_nan([vars(row) for row in rows])))
    else:
        Console(highlight=False, soft_wrap=True).print(table, markup=False)


def _check_gpu(shapes: list[str] | None, device: str, out: Path, as_json: bool) -> None:
    """The prepared run for a GPU; writes gpu-check.json and gpu-check.md."""
    plan = gpu_check.Check(device=device)
    if shapes:
        plan = gpu_check.Check(shapes=shapes, device=device)
    console = diagnostics()
    rows = gpu_check.check(plan, say=console.print)
    results = {"conditions": machine.conditions(), "rows": rows}
    (out / "gpu-check.json").write_text(json.dumps(report.without_nan(results), indent=1) + "\n", encoding="utf-8")
    (out / "gpu-check.md").write_text(gpu_check.table(rows), encoding="utf-8")
    print(json.dumps(report.without_nan(rows)) if as_json else gpu_check.table(rows))
