"""`hf-dflash bench`: the options of a benchmark. Running it and writing its reports are in `benchmark`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_dflash_cli import options

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
    repeats: Annotated[int, typer.Option(min=1, help="How many times to repeat everything.")] = 1,
    seed: options.Seed = 0,
    chat_template_kwargs: options.ChatTemplateKwargs = "{}",
    raw: Annotated[bool, typer.Option("--raw", help="Pass prompts as plain text, without the chat template.")] = False,
    dtype: options.Dtype = "auto",
    device_map: options.DeviceMap = None,
    quantization: options.Quantization = None,
    gguf_file: options.GgufFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)] = Path("bench-results"),
    again: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Measure nothing; rewrite the reports from this results.json.", exists=True, dir_okay=False
        ),
    ] = None,
    check_gpu: Annotated[
        bool,
        typer.Option(
            "--gpu-check", help="Only measure the cost of a round, with random weights in Qwen3-4B / 8B shapes."
        ),
    ] = False,
    shape: Annotated[
        list[str] | None, typer.Option(help="With --gpu-check: qwen3-4b, qwen3-8b, tiny; may be repeated.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compare decoding methods on the same prompts, in one process.

    The methods take turns, prompt by prompt. Writes results.json (every run, with machine, versions and commit),
    results.csv, table.md and plots. A method that fails is left out, with the reason. After Ctrl-C it reports on what
    was measured so far.
    """
    if not (check_gpu or again is not None or (target and draft)):
        raise typer.BadParameter("give at least one --target and one --draft")
    template = options.chat_template_arguments(chat_template_kwargs)

    from hf_dflash_cli import benchmark

    if check_gpu:
        options.make_folder(out)
        benchmark.check_gpu(shape, device_map, out, as_json)
    elif again is not None:
        options.make_folder(out)
        benchmark.report_again(again, out, as_json)
    else:
        plan = benchmark.make_plan(
            methods=method or METHODS,
            prompt_sets=prompts or ["chat:20"],
            temperatures=temperature or [0.0],
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            seed=seed or 0,
            raw=raw,
        )
        loading = {
            "chat_template_kwargs": template,
            "dtype": dtype,
            "device_map": device_map,
            "quantization": quantization,
            "gguf_file": gguf_file,
            "trust_remote_code": trust_remote_code,
        }
        options.make_folder(out)
        benchmark.run(target, draft, plan, loading, out, as_json)
