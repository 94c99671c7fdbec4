"""Options shared by several commands, each defined once: names, help texts, panels, and parsing of JSON."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

_MODELS, _SAMPLING, _DECODING, _OUTPUT = "Models", "Sampling", "Decoding", "Output"

Target = Annotated[
    str,
    typer.Option("--target", "-t", help="Target model: Hub name or local folder.", rich_help_panel=_MODELS),
]
Draft = Annotated[
    str,
    typer.Option("--draft", "-d", help="DFlash draft: Hub name or local folder.", rich_help_panel=_MODELS),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        help="Device map of the target: auto, cpu, cuda, cuda:1, ... Default: the GPU if there is one, else the CPU. "
        "The draft follows the target.",
        rich_help_panel=_MODELS,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(help="dtype of the target: auto, bfloat16, float16, float32.", rich_help_panel=_MODELS),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="Quantize the target on load: bnb4, bnb8, torchao-int8, quanto-int8. "
        "Checkpoints that are already quantized (AWQ, GPTQ, ...) need no flag.",
        rich_help_panel=_MODELS,
    ),
]
GgufFile = Annotated[
    str | None,
    typer.Option(
        "--gguf-file", help="GGUF file to load from the target's folder or repository.", rich_help_panel=_MODELS
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Allow custom model code from the target's repository.", rich_help_panel=_MODELS
    ),
]
System = Annotated[str | None, typer.Option(help="System message; implies --chat.", rich_help_panel=_DECODING)]
ChatTemplateKwargs = Annotated[
    str,
    typer.Option(
        help="Keyword arguments of the chat template, as JSON: '{\"enable_thinking\": false}'.",
        rich_help_panel=_DECODING,
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", "-n", min=1, help="Maximum number of tokens in an answer.", rich_help_panel=_DECODING
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        help="Tokens per block, from 2 to the draft's own block size (the default).", rich_help_panel=_DECODING
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", "-T", min=0.0, help="Sampling temperature; 0 decodes greedily.", rich_help_panel=_SAMPLING
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Keep only the most probable tokens whose probabilities add up to this.",
        rich_help_panel=_SAMPLING,
    ),
]
TopK = Annotated[
    int | None, typer.Option(min=0, help="Keep only this many of the most probable tokens.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Keep only tokens with at least this fraction of the top token's probability.",
        rich_help_panel=_SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(min=0.0, help="Penalty for tokens already in the text; 1 is no penalty.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[int | None, typer.Option(help="Random seed.", rich_help_panel=_SAMPLING)]
Stats = Annotated[bool, typer.Option("--stats", help="Print metrics after the answer.", rich_help_panel=_OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.", rich_help_panel=_OUTPUT)]
Trace = Annotated[
    Path | None,
    typer.Option(help="Append one JSON line per round to this file.", dir_okay=False, rich_help_panel=_OUTPUT),
]


def chat_template_arguments(text: str) -> dict[str, Any]:
    """The keyword arguments in a `--chat-template-kwargs`.

    Raises:
        typer.BadParameter: it is not a JSON object.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"--chat-template-kwargs must be JSON: {error}") from error
    if not isinstance(values, dict):
        raise typer.BadParameter("--chat-template-kwargs must be a JSON object")
    return values


def make_folder(folder: Path) -> None:
    """Make the folder for results, before anything is loaded.

    Raises:
        typer.BadParameter: it cannot be made, for example because a part of its path is a file.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"the folder {folder} cannot be made ({error.strerror})") from error
