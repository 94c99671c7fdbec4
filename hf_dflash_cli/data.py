"""`hf-dflash data`: responses of the target as training data. Reading prompts and generating are left to `training`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_dflash_cli import options
from hf_dflash_cli.show import diagnostics


def data(
    target: Annotated[str, typer.Option("--target", "-t", help="Target model: Hub name or local folder.")],
    prompts: Annotated[
        str, typer.Option("--prompts", help="JSONL file with `messages` or `prompt`, or a `datasets` name.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="JSONL file of token ids; an existing one is continued.", dir_okay=False)
    ],
    split: Annotated[str, typer.Option(help="Split of a `datasets` data set.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 512,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Skip longer prompts.")] = 2048,
    temperature: Annotated[
        float, typer.Option("--temperature", "-T", min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 keeps all tokens.")] = 0,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Prompts per batch.")] = 16,
    seed: Annotated[int, typer.Option(help="Random seed for sampling.")] = 0,
    draft: Annotated[
        str | None, typer.Option(help="A draft the target already has: the same responses, faster.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="dtype of the target: auto, bfloat16, float16, float32.")] = "auto",
    device_map: options.DeviceMap = None,
    chat_template_kwargs: options.ChatTemplateKwargs = "{}",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow custom model code from the target's repository.")
    ] = False,
) -> None:
    """Regenerate responses with the target, as training data for `hf-dflash train`.

    Can be interrupted at any time; the same command resumes where it stopped.

    Example: hf-dflash data --target Qwen/Qwen3-0.6B --prompts prompts.jsonl --out responses.jsonl --batch-size 32
    """
    options.make_folder(out.absolute().parent)
    template = options.chat_template_arguments(chat_template_kwargs)

    from tqdm.auto import tqdm
    from transformers import AutoTokenizer

    from hf_dflash.pair import load_draft_for, load_target, placement
    from hf_dflash.training.prompts import read_prompts
    from hf_dflash.training.regenerate import RegenerationSettings, check_not_in_use, regenerate

    check_not_in_use(out)
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
    asked = read_prompts(
        prompts, tokenizer, split=split, max_prompt_tokens=max_prompt_tokens, chat_template_kwargs=template
    )[:limit]
    model, _ = load_target(target, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code)
    helper = load_draft_for(model, draft) if draft else None
    diagnostics().print(placement(model, helper), markup=False)
    settings = RegenerationSettings(max_new_tokens, temperature, top_p, top_k, batch_size, seed)
    with tqdm(total=len(asked), desc="responses", unit="prompt") as bar:

        def show(done: int, tokens: int) -> None:
            bar.update(done - bar.n)
            bar.set_postfix(tokens=tokens)

        regenerate(model, tokenizer, asked, out, settings, draft=helper, on_batch=show)
    typer.echo(f"{len(asked)} responses are in {out}.")
