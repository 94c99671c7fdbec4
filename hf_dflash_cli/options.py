"""Options that several commands share, each written once.

Owns: names, help texts and groups of the options, and the reading of those that are JSON. Does not know: what is done
with them.
"""

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
    typer.Option(help="Where the target goes: auto, cpu, cuda, cuda:1 ...", rich_help_panel=_MODELS),
]
Dtype = Annotated[
    str,
    typer.Option(help="Target's dtype: auto, bfloat16, float16, float32.", rich_help_panel=_MODELS),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="Quantise the target while loading: bnb4, bnb8, torchao-int8, quanto-int8. "
        "AWQ, GPTQ and other checkpoints that are quantised already need no flag.",
        rich_help_panel=_MODELS,
    ),
]
GgufFile = Annotated[
    str | None,
    typer.Option(
        "--gguf-file", help="The GGUF file to load from the target's folder or repository.", rich_help_panel=_MODELS
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run model code that the target's repo carries.", rich_help_panel=_MODELS),
]
System = Annotated[str | None, typer.Option(help="System message; implies --chat.", rich_help_panel=_DECODING)]
Template = Annotated[
    str,
    typer.Option(
        help="Options of the chat template, as JSON: '{\"enable_thinking\": false}'.", rich_help_panel=_DECODING
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option("--max-new-tokens", "-n", min=1, help="Tokens of an answer, at the most.", rich_help_panel=_DECODING),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        help="Tokens per block, 2 to the draft's own block size, which is the default.", rich_help_panel=_DECODING
    ),
]
Temperature = Annotated[
    float,
    typer.Option("--temperature", "-T", min=0.0, help="0 decodes greedily.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Likeliest tokens that make up this share.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[int | None, typer.Option(min=0, help="So many likeliest tokens.", rich_help_panel=_SAMPLING)]
MinP = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="Tokens with this share of the likeliest's.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(min=0.0, help="Above 1, tokens that were there are less likely.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[int | None, typer.Option(help="Seed of the random draws.", rich_help_panel=_SAMPLING)]
Stats = Annotated[bool, typer.Option("--stats", help="Print figures after the answer.", rich_help_panel=_OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.", rich_help_panel=_OUTPUT)]
Trace = Annotated[
    Path | None,
    typer.Option(help="Append one JSON line per round to this file.", dir_okay=False, rich_help_panel=_OUTPUT),
]


def template_arguments(text: str) -> dict[str, Any]:
    """The arguments for the chat template in a `--template`.

    Raises:
        typer.BadParameter: it is no JSON object.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"--template must be JSON: {error}") from error
    if not isinstance(values, dict):
        raise typer.BadParameter("--template must be a JSON object")
    return values
