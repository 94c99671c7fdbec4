"""Dispatches `assistant_model=` to the DFlash loop.

`import hf_dflash` wraps `GenerationMixin.generate` and the assistant loading of pipelines, once. An assistant that is
not a DFlash draft is passed through unchanged.
"""

import copy
import dataclasses
import functools
import inspect
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, GenerationMixin, MuseGlimmerAssistantModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.pipelines import base as pipelines_base

from hf_dflash.decoding.generate import DFlashGenerate
from hf_dflash.decoding.options import (
    fields_set_in,
    refuse_encoder_decoder,
    refuse_other_assistance,
    resolve_block_size,
)
from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.draft.loading import adopt_draft, is_draft, is_draft_checkpoint, load_draft
from hf_dflash.target import block_attention
from hf_dflash.target.processes import needs_lockstep

_INSTALLED = "_hf_dflash_dispatch"


def install() -> None:
    """Let `generate(assistant_model=<DFlash draft>)` and `pipeline(..., assistant_model=...)` reach the DFlash loop.

    Calling it more than once has no effect.
    """
    block_attention.install()
    if not hasattr(GenerationMixin.generate, _INSTALLED):
        GenerationMixin.generate = _wrap_generate(GenerationMixin.generate)
    if not hasattr(pipelines_base.load_assistant_model, _INSTALLED):
        pipelines_base.load_assistant_model = _wrap_assistant_loading(pipelines_base.load_assistant_model)


def _wrap_generate(plain_generate):
    """Wrap `generate`: a DFlash draft as `assistant_model`, or a `DFlashGenerate` as `custom_generate`, uses our
    loop.
    """
    signature = inspect.signature(plain_generate)

    @functools.wraps(plain_generate)
    def generate(self, *args: Any, **kwargs: Any):
        call = signature.bind(self, *args, **kwargs).arguments
        draft, method = call.get("assistant_model"), call.get("custom_generate")
        if _uses_our_loop(draft):
            if method is not None:
                raise UnsupportedOptionError(
                    f"Both `assistant_model` (a DFlash draft) and `custom_generate` ({method!r}) were given, but each "
                    "selects a decoding method. Pass only one of them."
                )
            method = DFlashGenerate(adopt_draft(draft))
        elif not isinstance(method, DFlashGenerate):
            return plain_generate(self, *args, **kwargs)
        return _call_core(plain_generate, self, call, method)

    setattr(generate, _INSTALLED, True)
    return generate


def _uses_our_loop(assistant: Any) -> bool:
    """Return whether an assistant is a DFlash draft that core does not run itself (the native Muse assistant is left
    to core).
    """
    return assistant is not None and not isinstance(assistant, MuseGlimmerAssistantModel) and is_draft(assistant)


def _call_core(plain_generate: Any, model: Any, call: dict[str, Any], method: DFlashGenerate) -> Any:
    """Call core's `generate` with the draft's own options resolved. What core does not pass on to a custom decoding
    method (streamer, tokenizer, `synced_gpus`) is handed over separately.
    """
    arguments = {name: value for name, value in call.items() if name not in ("self", "kwargs", "assistant_model")}
    options = dict(call.get("kwargs", {}))
    refuse_encoder_decoder(model.config)

    sources = [options, fields_set_in(call.get("generation_config")), fields_set_in(model.generation_config)]
    refuse_other_assistance(*sources)
    block_size, num_assistant_tokens = options.pop("block_size", None), _first_set("num_assistant_tokens", *sources)
    if block_size is None and num_assistant_tokens is None:
        block_size = method.block_size
    block_size = resolve_block_size(method.draft.config, block_size, num_assistant_tokens)
    arguments["custom_generate"] = dataclasses.replace(
        method,
        block_size=block_size,
        streamer=call.get("streamer"),
        stats=options.pop("stats", method.stats),
        trace=options.pop("trace", method.trace),
        synced=needs_lockstep(model, call.get("synced_gpus")),
    )
    model = _convert_stop_strings(model, arguments, options)
    return plain_generate(model, **arguments, **options)


def _first_set(name: str, *sources: dict[str, Any]) -> Any:
    """Return the first value that is set. The call's options override its generation config, which overrides the
    model's.
    """
    return next((source[name] for source in sources if source.get(name) is not None), None)


def _convert_stop_strings(model: Any, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """Turn `stop_strings` into a stopping criterion here, since core drops the tokenizer before it builds the criteria
    of a custom decoding method.

    Returns:
        the model to generate with: a shallow copy (same weights) if its own generation config held the strings.
    """
    tokenizer = options.pop("tokenizer", None)
    given, own = arguments.get("generation_config"), model.generation_config
    strings = _first_set("stop_strings", options, *[c.to_dict() for c in (given, own) if c is not None])
    if strings is None:
        return model
    if tokenizer is None:
        raise UnsupportedOptionError(
            f"`stop_strings={strings!r}` requires the tokenizer. Pass `tokenizer=` to generate as well."
        )
    criterion = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
    arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or []), criterion])
    options.pop("stop_strings", None)
    if given is not None:
        arguments["generation_config"] = _without_stop_strings(given)
    if own.stop_strings is not None:
        model = copy.copy(model)
        model.generation_config = _without_stop_strings(own)
    return model


def _without_stop_strings(config: GenerationConfig) -> GenerationConfig:
    config = copy.deepcopy(config)
    config.stop_strings = None
    return config


def _wrap_assistant_loading(plain_load):
    """Wrap the assistant loading of pipelines: a DFlash draft keeps its dtype and needs no tokenizer."""

    @functools.wraps(plain_load)
    def load_assistant_model(model: Any, assistant_model: Any, assistant_tokenizer: Any = None):
        if isinstance(assistant_model, (str, Path)) and is_draft_checkpoint(assistant_model):
            assistant_model = load_draft(assistant_model).to(model.device)
        if _uses_our_loop(assistant_model):
            return assistant_model, None
        return plain_load(model, assistant_model, assistant_tokenizer)

    setattr(load_assistant_model, _INSTALLED, True)
    return load_assistant_model
