"""`hf-dflash data`: let the target answer prompts, as training data for a draft.

Owns: flags, progress, loading the target. Does not know: how prompts are read or responses drawn.
"""

from pathlib import Path
from typing import Annotated

import typer

from hf_dflash.cli.options import template_arguments


def data(
    target: Annotated[str, typer.Option("--target", "-t", help="Target model: Hub name or local folder.")],
    prompts: Annotated[
        str, typer.Option("--prompts", help="JSONL file with `messages` or `prompt`, or a `datasets` name.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="JSONL file of token ids; an existing one is continued.", dir_okay=False)
    ],
    split: Annotated[str, typer.Option(help="Split of a `datasets` data set.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 512,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 2048,
    temperature: Annotated[float, typer.Option("--temperature", "-T", min=0.0, help="0 decodes greedily.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: no limit.")] = 0,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Prompts at a time.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of sampled responses.")] = 0,
    draft: Annotated[
        str | None, typer.Option(help="A draft that the target already has: the same text, sooner.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Target's dtype: auto, bfloat16, float16, float32.")] = "auto",
    device_map: Annotated[str | None, typer.Option(help="Where the target goes: auto, cpu, cuda ...")] = None,
    template: Annotated[
        str, typer.Option(help="Options of the chat template, as JSON: '{\"enable_thinking\": false}'.")
    ] = "{}",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code of the target's repo.")
    ] = False,
) -> None:
    """Regenerate responses to prompts with the target, and store them as token ids for `hf-dflash train`.

    Can be stopped at any time; the same command goes on where it stopped.

    Example: hf-dflash data --target Qwen/Qwen3-0.6B --prompts prompts.jsonl --out responses.jsonl --batch-size 32
    """
    from tqdm.auto import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_dflash.loading import load_draft
    from hf_dflash.training.prompts import read_prompts
    from hf_dflash.training.regenerate import RegenerationSettings, regenerate

    options = template_arguments(template)
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    asked = read_prompts(
        prompts, tokenizer, split=split, max_prompt_tokens=max_prompt_tokens, template_options=options
    )[:limit]
    placement = {"device_map": device_map} if device_map else {}
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, trust_remote_code=trust_remote_code, **placement)
    settings = RegenerationSettings(max_new_tokens, temperature, top_p, top_k, batch_size, seed)
    helper = load_draft(draft) if draft else None
    with tqdm(total=len(asked), desc="responses", unit="prompt") as bar:

        def show(done: int, tokens: int) -> None:
            bar.update(done - bar.n)
            bar.set_postfix(tokens=tokens)

        regenerate(model, tokenizer, asked, out, settings, draft=helper, on_batch=show)
    typer.echo(f"{len(asked)} responses are in {out}.")
