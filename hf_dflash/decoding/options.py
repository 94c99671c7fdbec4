"""Options of `generate` with a DFlash draft: reject, by name, every option that cannot be honored, and resolve the
block size of a call.
"""

import os
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.errors import UnsupportedOptionError, UnsupportedTargetError
from hf_dflash.target.cache import CACHE_KEYWORD

#: Options of other assisted decoding methods, as named in a call or a generation config.
OTHER_ASSISTANCE = (
    "assistant_tokenizer",
    "assistant_early_exit",
    "assistant_confidence_threshold",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "target_lookbehind",
    "num_assistant_tokens_schedule",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "use_mtp",
)


def refuse_other_assistance(*sources: dict[str, Any]) -> None:
    """Reject options of other assisted decoding methods, before core fills in its defaults for them.

    Args:
        sources: the call's keyword arguments and the generation configs' fields; None means not set.

    Raises:
        UnsupportedOptionError: naming the first such option that is set.
    """
    for source in sources:
        for name in OTHER_ASSISTANCE:
            if source.get(name) not in (None, False):
                raise UnsupportedOptionError(
                    f"`{name}={describe(source[name])}` is an option of another assisted decoding method. It does not "
                    "apply to a DFlash draft, which shares the target's tokenizer and proposes whole blocks. Remove it "
                    "from the call and from the generation configs of draft and target."
                )


def refuse_paged_cache(cache_implementation: Any) -> None:
    """Reject continuous batching, to which core switches before it looks at the decoding method: without the draft.

    Raises:
        UnsupportedOptionError: the call or a generation config has `cache_implementation="paged"`.
    """
    if cache_implementation == "paged":
        raise UnsupportedOptionError(
            "`cache_implementation='paged'` switches to continuous batching, which does not use a DFlash draft. Leave "
            "cache_implementation unset, or drop the draft."
        )


def describe(value: Any) -> str:
    """Return a value for a message; objects whose text may fill pages (modules, tokenizers) are named by class."""
    if value is None or isinstance(value, (bool, int, float, str, Path)):
        return repr(value)
    return f"a {type(value).__name__}"


def refuse_unloaded(option: str, draft: Any) -> None:
    """Reject the name of a draft where a loaded draft is expected.

    It is not loaded here: that would repeat in every call, and the draft's context would be lost between two turns.

    Raises:
        UnsupportedOptionError: `draft` is a string or a path.
    """
    if isinstance(draft, (str, os.PathLike)):
        name = os.fspath(draft)
        raise UnsupportedOptionError(
            f"`{option}` must be a loaded model, found the name {name!r}. Load the draft once, before the first call: "
            f"draft = hf_dflash.load_draft({name!r}), then target.generate(..., assistant_model=draft)."
        )


def refuse_reports(stats: Any, trace: Any) -> None:
    """Reject, before anything is decoded, a `stats` that cannot be called and a `trace` that is not a path.

    Raises:
        UnsupportedOptionError: naming the option and its value.
    """
    if stats is not None and not callable(stats):
        raise UnsupportedOptionError(
            f"`stats` must be a function that takes the call's DFlashStatistics, found {describe(stats)}. Pass "
            "stats=print, for example, or read `dflash_stats` of the output with return_dict_in_generate=True."
        )
    if trace is not None and not isinstance(trace, (str, os.PathLike)):
        raise UnsupportedOptionError(
            f"`trace` must be the path of a JSON-lines file, found {describe(trace)}. Pass a path, such as "
            'trace="rounds.jsonl".'
        )


def refuse_options(
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    num_rows: int,
    streamer: BaseStreamer | None,
    synced: bool = False,
    target_class: str = "This target",
) -> None:
    """Reject what the decoding loop cannot honor, before the first forward.

    Raises:
        UnsupportedOptionError: naming the option, its value and what to do instead.
        UnsupportedTargetError: the target does not use the cache that `generate` prepares.
    """
    if synced and config.prefill_chunk_size is not None:
        raise UnsupportedOptionError(
            f"With `prefill_chunk_size={config.prefill_chunk_size}` the number of prefill forwards depends on the "
            "prompt, but `synced_gpus` expects one per process. Use only one of the two."
        )
    for option, value, advice in _refusals(config, model_kwargs, num_rows, streamer):
        raise UnsupportedOptionError(f"A DFlash draft cannot be used with `{option}` (found {value}). {advice}")
    if model_kwargs.get(CACHE_KEYWORD) is None:
        raise UnsupportedTargetError(
            f"{target_class} creates a cache of its own kind in its forward and does not use the DynamicCache that "
            "generate prepares for other models, so rejected candidates could not be rolled back. Generate without a "
            "draft."
        )


def _refusals(config: GenerationConfig, model_kwargs: dict[str, Any], num_rows: int, streamer: BaseStreamer | None):
    """Yield (option, its value, what to do) for everything that cannot be honored."""
    drop_draft = "Drop the option, or decode without the draft."
    if (config.num_beams or 1) > 1:
        yield "num_beams", config.num_beams, "Beam search does not decode blocks: set num_beams=1 or drop the draft."
    if config.penalty_alpha:
        yield (
            "penalty_alpha",
            config.penalty_alpha,
            f"Contrastive search needs the hidden state of every token. {drop_draft}",
        )
    if config.dola_layers is not None:
        yield "dola_layers", config.dola_layers, drop_draft
    for name in ("constraints", "force_words_ids"):
        if getattr(config, name, None) is not None:
            yield name, "a value", f"It requires constrained beam search. {drop_draft}"
    if not config.use_cache:
        yield "use_cache", config.use_cache, "Verifying a block requires the target's cache: set use_cache=True."
    others = [name for name in ("cache_params", "past_key_values") if model_kwargs.get(name) is not None]
    if model_kwargs.get(CACHE_KEYWORD) is None and others:
        # Before transformers 5.24, fully recurrent models used another name for their cache.
        yield others[0], "the target's cache", "This target needs transformers 5.24 or newer, or no draft."
    if num_rows > 1:
        outputs = (config.output_scores, config.output_logits, config.output_hidden_states, config.output_attentions)
        if config.return_dict_in_generate and any(outputs):
            yield (
                "output_scores / output_logits / output_hidden_states / output_attentions",
                f"a batch of {num_rows} rows",
                "Rows are decoded one at a time, but plain generate also returns outputs for rows that have already "
                "finished. Call generate once per row.",
            )
        if streamer is not None:
            yield "streamer", f"a batch of {num_rows} rows", "Stream one row at a time."
        if config.max_time is not None:
            yield (
                "max_time",
                f"a batch of {num_rows} rows",
                "Rows are decoded one at a time; call generate once per row.",
            )


def refuse_encoder_decoder(config: Any) -> None:
    """Reject encoder-decoder targets before their encoder runs."""
    if config.is_encoder_decoder:
        raise UnsupportedOptionError(
            f"A DFlash draft does not support encoder-decoder targets (found {config.model_type}, "
            "is_encoder_decoder=True). Use a decoder-only causal language model, or drop `assistant_model`."
        )


def fields_set_in(config: GenerationConfig | None) -> dict[str, Any]:
    """Return the fields of a generation config; those that hold core's own defaults are None.

    Core fills its defaults into the configs it prepares, and pipelines pass such a config to `generate`, so a default
    value does not mean that the user set it.
    """
    if config is None:
        return {}
    defaults = GenerationConfig._get_default_generation_params()
    return {name: None if defaults.get(name) == value else value for name, value in config.to_dict().items()}


def resolve_block_size(
    config: DFlashConfig,
    block_size: Any = None,
    num_assistant_tokens: Any = None,
    tokens_name: str = "num_assistant_tokens",
) -> int:
    """Return the block length of a call, anchor included.

    Args:
        config: the draft's configuration, whose `block_size` is the default and the maximum.
        block_size: the requested `block_size=`.
        num_assistant_tokens: the requested `num_assistant_tokens=`; one less than the block, since the anchor is not a
            candidate.
        tokens_name: where `num_assistant_tokens` was set, for messages.

    Raises:
        UnsupportedOptionError: not an integer from 2 to the checkpoint's block size, or the two options disagree.
    """
    if num_assistant_tokens is None:
        return config.checked_block_size(block_size)
    if isinstance(num_assistant_tokens, bool) or not isinstance(num_assistant_tokens, int):
        raise UnsupportedOptionError(
            f"{tokens_name} must be an integer from 1 to {config.block_size - 1}, found "
            f"{describe(num_assistant_tokens)}."
        )
    if block_size is not None and block_size != num_assistant_tokens + 1:
        raise UnsupportedOptionError(
            f"block_size={block_size!r} and num_assistant_tokens={num_assistant_tokens} were both given and "
            "disagree; a block of n tokens has n - 1 candidates. Pass only one of them."
        )
    try:
        return config.checked_block_size(num_assistant_tokens + 1)
    except UnsupportedOptionError as error:
        raise UnsupportedOptionError(
            f"{tokens_name}={num_assistant_tokens} makes blocks of {num_assistant_tokens + 1} tokens, anchor included, "
            f"but {error}"
        ) from None
