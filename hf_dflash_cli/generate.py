"""`hf-dflash generate`: an answer to one prompt. Decoding and reporting are in `answer`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_dflash_cli import options, texts

DIFFERENT = 1


def generate(
    target: options.Target,
    draft: options.Draft,
    prompt: Annotated[str | None, typer.Argument(help="The prompt. Omitted or '-': read standard input.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Read the prompt from a UTF-8 file.", exists=True, dir_okay=False),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the target's chat template to the prompt.")] = False,
    system: options.System = None,
    chat_template_kwargs: options.ChatTemplateKwargs = "{}",
    max_new_tokens: options.MaxNewTokens = 256,
    block_size: options.BlockSize = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    device_map: options.DeviceMap = None,
    quantization: options.Quantization = None,
    gguf_file: options.GgufFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    stats: options.Stats = False,
    as_json: options.Json = False,
    trace: options.Trace = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Also decode without the draft and compare; exit code 1 if the texts differ."),
    ] = False,
) -> None:
    """Generate an answer to one prompt.

    The answer goes to standard output, everything else to standard error.
    """
    text = read_prompt(prompt, file)
    template = options.chat_template_arguments(chat_template_kwargs)
    if trace is not None and not trace.absolute().parent.is_dir():
        raise typer.BadParameter(f"--trace {trace}: there is no folder {trace.parent}")
    if system is not None:
        texts.checked(system, "--system")

    from hf_dflash.files import dump_json
    from hf_dflash.pair import sampling_arguments
    from hf_dflash_cli.answer import Answer, messages
    from hf_dflash_cli.loading import load

    pair = load(
        target,
        draft,
        template,
        block_size,
        dtype=dtype,
        device_map=device_map,
        quantization=quantization,
        gguf_file=gguf_file,
        trust_remote_code=trust_remote_code,
    )
    arguments = {
        "max_new_tokens": max_new_tokens,
        **sampling_arguments(temperature, top_p, top_k, min_p, repetition_penalty),
    }
    drafting = {"block_size": block_size, "trace": trace}
    answer = Answer(pair, messages(text, system) if chat or system else text, arguments, seed)
    answer.decode({name: value for name, value in drafting.items() if value is not None}, stream=not as_json)
    comparison = None
    if check:
        answer.decode_plainly(stream=False)
        comparison = answer.compare_with_plain()
    if as_json:
        print(dump_json(answer.as_dict(comparison), ensure_ascii=False, indent=2))
    else:
        answer.report(stats, comparison)
    if comparison is not None and not comparison.same and not comparison.within_tolerance:
        raise typer.Exit(DIFFERENT)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file or standard input.

    Raises:
        typer.BadParameter: two sources at once, or an empty prompt.
        PromptError: it is not UTF-8; the message names the source.
    """
    if file is not None and prompt is not None:
        raise typer.BadParameter("give a prompt or --file, not both")
    if file is not None:
        text, source = texts.read_file(file), str(file)
    elif prompt in (None, "-"):
        text, source = texts.read_standard_input(), "standard input"
    else:
        text, source = prompt.removeprefix(texts.BOM), "the prompt"
    if not text.strip():
        raise typer.BadParameter("the prompt is empty")
    return texts.checked(text, source)
