"""`hf-dflash train`: train a draft for a target.

Owns: the flags, one for each field of `TrainingSettings`, made from its fields so that the two cannot differ; how
flags and a YAML file combine.

Does not know: training.
"""

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_dflash.training.settings import TrainingSettings, annotation_of, read_yaml

_TYPES = {"int": int, "float": float, "str": str, "bool": bool, "list[int]": str}


def _flags() -> list[inspect.Parameter]:
    """One optional flag per setting; None means that it was not given, and the YAML file or the default counts."""
    flags = []
    for item in fields(TrainingSettings):
        name = item.name.replace("_", "-")
        kind = _TYPES[annotation_of(item).split(" |")[0]]
        default = "" if item.default is None else f" [default: {item.default}]"
        names = (f"--{name}/--no-{name}",) if kind is bool else (f"--{name}",)
        shown = "Comma-separated. " if annotation_of(item).startswith("list") else ""
        option = typer.Option(*names, help=f"{shown}{item.metadata['help']}{default}", show_default=False)
        flags.append(
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    return flags


def train(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file of settings; flags go before it.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    **settings: Any,
) -> None:
    """Train a draft for your own target, from responses that `hf-dflash data` regenerated.

    Example: hf-dflash train --target Qwen/Qwen3-0.6B --data responses.jsonl --out my-draft --layers 3 --block-size 8

    Ctrl-C saves a checkpoint and stops; --resume goes on with the same data order. The finished draft is in OUT/draft.
    """
    from hf_dflash.training.run import train as run

    given = {name: value for name, value in settings.items() if value is not None}
    if "taps" in given:
        given["taps"] = _numbers(given["taps"])
    values = {**(read_yaml(config) if config else {}), **given}
    result = run(TrainingSettings.from_mapping(values, str(config or "flags")), resume=resume, tell=typer.echo)
    if result.interrupted:
        raise typer.Exit(130)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--taps takes layer numbers such as 1,9,17, not {text!r}") from error


_own = [p for p in inspect.signature(train).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
train.__signature__ = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in _own] + _flags())
train.__annotations__ = {p.name: p.annotation for p in train.__signature__.parameters.values()} | {"return": None}
