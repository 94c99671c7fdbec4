"""The decoding methods that a benchmark compares, with a common interface."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers import BatchEncoding, GenerationMixin

from hf_dflash.bench.terms import equal_terms
from hf_dflash.decoding.statistics import DFlashStatistics
from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.pair import Pair

Decoded = tuple[torch.LongTensor, DFlashStatistics | None]

AUTHORS_ARGUMENTS = {"max_new_tokens", "do_sample", "temperature", "top_p", "top_k"}


class MethodUnavailable(Exception):
    """A method cannot run with this pair on this machine; the message gives the reason."""


@dataclass(frozen=True)
class Method:
    """One way of decoding with a pair.

    Attributes:
        name: as on the command line.
        decode: `(inputs, arguments of generate) -> (ids (1, length), statistics or None)`.
        same_seed: whether sampled text must equal plain generate's for the same seed.
    """

    name: str
    decode: Callable[[BatchEncoding, dict[str, Any]], Decoded]
    same_seed: bool = False


def check_names(names: list[str]) -> None:
    """Check the names of methods, before anything is loaded.

    Raises:
        UnsupportedOptionError: one is neither in `METHODS` nor `dflash-bN`.
    """
    for name in names:
        if _block_size(name) is None and name not in METHODS:
            raise UnsupportedOptionError(f"Unknown method '{name}'; choose from {', '.join(METHODS)}, dflash-bN.")


def _block_size(name: str) -> int | None:
    """Return the block size N in `dflash-bN`; None for another name."""
    digits = name.removeprefix("dflash-b")
    return int(digits) if name != digits and digits.isdecimal() else None


def make_method(name: str, pair: Pair) -> Method:
    """Make a method by its name in `METHODS`, or `dflash-bN` for block size N. It decodes on `equal_terms`.

    Raises:
        UnsupportedOptionError: unknown name.
        MethodUnavailable: the method cannot run here.
    """
    check_names([name])
    block_size = _block_size(name)
    method = METHODS[name](pair) if block_size is None else _dflash(pair, name, block_size)

    def decode(inputs: BatchEncoding, arguments: dict[str, Any]) -> Decoded:
        with equal_terms(pair.target):
            return method.decode(inputs, arguments)

    return replace(method, decode=decode)


def _plain(pair: Pair) -> Method:
    return Method(
        "plain", lambda inputs, arguments: (pair.target.generate(**inputs, **arguments), None), same_seed=True
    )


def _plain_compiled(pair: Pair) -> Method:
    if pair.target.device.type != "cuda":
        raise MethodUnavailable("generate compiles the static cache's forward only on CUDA")
    return Method(
        "plain-compiled",
        lambda inputs, arguments: (pair.target.generate(**inputs, **arguments, cache_implementation="static"), None),
    )


def _prompt_lookup(pair: Pair) -> Method:
    return Method(
        "prompt-lookup",
        lambda inputs, arguments: (pair.target.generate(**inputs, **arguments, prompt_lookup_num_tokens=10), None),
    )


def _native(pair: Pair) -> Method:
    """transformers' own DFlash path, bypassing our dispatch."""
    if pair.draft.config.dflash_version != 1:
        raise MethodUnavailable("transformers' own path supports only DFlash 1")
    plain_generate = GenerationMixin.generate.__wrapped__

    def decode(inputs: BatchEncoding, arguments: dict[str, Any]) -> Decoded:
        ids = plain_generate(pair.target, **inputs, **arguments, assistant_model=pair.draft, speculation_type="dflash")
        return ids, None

    return Method("native", decode)


def _authors(pair: Pair) -> Method:
    """The decoding loop of the authors' `dflash` package, on the same checkpoint."""
    if find_spec("dflash") is None:
        raise MethodUnavailable("the dflash package is not installed")
    if pair.target.dtype != pair.draft.dtype:
        raise MethodUnavailable(
            "the authors' loop needs target and draft in one dtype, but the target is in "
            f"{_name(pair.target.dtype)} and the draft in {_name(pair.draft.dtype)}"
        )
    try:
        from dflash.model import DFlash2DraftModel, DFlashDraftModel

        network = DFlash2DraftModel if pair.draft.config.dflash_version == 2 else DFlashDraftModel
        draft = network.from_pretrained(pair.draft_name, dtype=pair.draft.dtype).to(pair.target.device).eval()
    except Exception as error:  # whatever another package raises, the other methods can run
        raise MethodUnavailable(f"the dflash package cannot load {pair.draft_name}: {error}") from error

    def decode(inputs: BatchEncoding, arguments: dict[str, Any]) -> Decoded:
        if unknown := arguments.keys() - AUTHORS_ARGUMENTS:
            raise UnsupportedOptionError(f"The authors' loop does not know {', '.join(sorted(unknown))}.")
        stops = pair.target.generation_config.eos_token_id
        with torch.inference_mode():
            ids = draft.spec_generate(
                pair.target,
                inputs["input_ids"],
                max_new_tokens=arguments["max_new_tokens"],
                stop_token_ids=[stops] if isinstance(stops, int) else stops,
                temperature=arguments.get("temperature", 1.0) if arguments.get("do_sample") else 0.0,
                top_p=arguments.get("top_p", 1.0),
                top_k=arguments.get("top_k", 0),
            )
        return ids, None

    return Method("authors", decode)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dflash(pair: Pair, name: str = "dflash", block_size: int | None = None) -> Method:
    try:
        block_size = pair.draft.config.checked_block_size(block_size)
    except UnsupportedOptionError as error:
        raise MethodUnavailable(str(error)) from error

    def decode(inputs: BatchEncoding, arguments: dict[str, Any]) -> Decoded:
        kept: list[DFlashStatistics] = []
        ids = pair.target.generate(
            **inputs, **arguments, assistant_model=pair.draft, stats=kept.append, block_size=block_size
        )
        return ids, kept[0]

    return Method(name, decode, same_seed=True)


METHODS: dict[str, Callable[[Pair], Method]] = {
    "plain": _plain,
    "plain-compiled": _plain_compiled,
    "prompt-lookup": _prompt_lookup,
    "native": _native,
    "authors": _authors,
    "dflash": _dflash,
}
