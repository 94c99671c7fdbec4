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
    describe,
    fields_set_in,
    refuse_encoder_decoder,
    refuse_other_assistance,
    refuse_paged_cache,
    refuse_reports,
    refuse_unloaded,
    resolve_block_size,
)
from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.draft.loading import adopt_draft, is_draft, is_draft_checkpoint, load_draft
from hf_dflash.logs import get_logger
from hf_dflash.target import block_attention
from hf_dflash.target.processes import needs_lockstep

logger = get_logger(__name__)

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
        refuse_unloaded("assistant_model", draft)
        if _uses_our_loop(draft):
            if method is not None:
                raise UnsupportedOptionError(
                    f"Both `assistant_model` (a DFlash draft) and `custom_generate` ({describe(method)}) were given, "
                    "but each selects a decoding method. Pass only one of them."
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
    refuse_unloaded("DFlashGenerate(draft)", method.draft)
    method = dataclasses.replace(method, draft=adopt_draft(method.draft))
    stats, trace = options.pop("stats", method.stats), options.pop("trace", method.trace)
    refuse_reports(stats, trace)

    configs = [fields_set_in(config) for config in (call.get("generation_config"), model.generation_config)]
    refuse_other_assistance(options, *configs, fields_set_in(getattr(method.draft, "generation_config", None)))
    refuse_paged_cache(_first_set("cache_implementation", options, *configs))
    arguments["custom_generate"] = dataclasses.replace(
        method,
        block_size=_block_size(method, options, configs),
        streamer=call.get("streamer"),
        stats=stats,
        trace=trace,
        synced=needs_lockstep(model, call.get("synced_gpus")),
    )
    model = _hand_over_tokenizer(model, arguments, options)
    return plain_generate(model, **arguments, **options)


def _block_size(method: DFlashGenerate, options: dict[str, Any], configs: list[dict[str, Any]]) -> int:
    """Resolve the block size of a call. The call's options override `DFlashGenerate`'s, which override the draft's own
    `generation_config`.

    A `num_assistant_tokens` in the generation config of the call or the target does not count. It is usually left over
    from another assistant, and would shorten every block or fail every call.
    """
    config, block_size = method.draft.config, options.pop("block_size", None)
    if block_size is not None or options.get("num_assistant_tokens") is not None:
        return resolve_block_size(config, block_size, options.get("num_assistant_tokens"))
    left_over = _first_set("num_assistant_tokens", *configs)
    if left_over is not None:
        logger.warning_once(
            f"`num_assistant_tokens={describe(left_over)}` in the generation config is not used with a DFlash draft. "
            "To shorten its blocks, pass num_assistant_tokens= or block_size= to generate, or set "
            "draft.generation_config.num_assistant_tokens."
        )
    if method.block_size is not None:
        return resolve_block_size(config, method.block_size)
    tokens = getattr(getattr(method.draft, "generation_config", None), "num_assistant_tokens", None)
    return resolve_block_size(config, None, tokens, "draft.generation_config.num_assistant_tokens")


def _first_set(name: str, *sources: dict[str, Any]) -> Any:
    """Return the first value that is set. The call's options override its generation config, which overrides the
    model's.
    """
    return next((source[name] for source in sources if source.get(name) is not None), None)


def _hand_over_tokenizer(model: Any, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """Give the call's tokenizer to what needs it, since core drops it before it uses it for a custom decoding method:
    `stop_strings` become a stopping criterion here, and `token_healing` gets a `heal_tokens` that has the tokenizer.

    Returns:
        the model to generate with, a shallow copy (same weights) if either requires a change of the model.
    """
    tokenizer = options.pop("tokenizer", None)
    given, own = arguments.get("generation_config"), model.generation_config
    sources = [options, *[config.to_dict() for config in (given, own) if config is not None]]
    strings, healing = _first_set("stop_strings", *sources), _first_set("token_healing", *sources)
    for name, value in (("stop_strings", strings), ("token_healing", healing or None)):
        if value is not None and tokenizer is None:
            raise UnsupportedOptionError(
                f"`{name}={value!r}` requires the tokenizer. Pass `tokenizer=` to generate as well."
            )
    if healing:
        heal_tokens = model.heal_tokens
        model = copy.copy(model)
        model.heal_tokens = lambda input_ids, *_: heal_tokens(input_ids, tokenizer)
    if strings is None:
        return model
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
