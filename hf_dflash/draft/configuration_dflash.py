"""`DFlashConfig`, the canonical configuration of a DFlash draft, and the checks of its values.

All published layouts are translated into this form before a network is built (see `hf_dflash.draft.layouts`). This file
is uploaded to the Hub with the network, so it imports only transformers and its sibling `errors`.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .errors import CheckpointError, UnsupportedOptionError

LAYER_TYPES = ("full_attention", "sliding_attention")

# Keys that each RoPE type requires besides `rope_theta`. The original length is never inferred from the extended one:
# a YaRN factor applied to the wrong length gives plausible but wrong angles.
ROPE_REQUIRED_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

_VERSION_2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_ROPE_LISTS = ("short_factor", "long_factor")

# The largest value that is accepted for each integer: far above every published draft, and low enough that a wrong
# digit or a damaged file is reported at once and cannot exhaust time or memory.
MAXIMA = {
    **dict.fromkeys(("hidden_size", "target_hidden_size", "intermediate_size", "conv_group_size"), 2**20),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 2**14),
    **dict.fromkeys(("selector_rank", "selector_top_k"), 2**14),
    **dict.fromkeys(("vocab_size", "target_vocab_size", "draft_vocab_size", "mask_token_id"), 2**24),
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), 2**31 - 1),
    "num_hidden_layers": 256,
    "target_num_hidden_layers": 4096,
    "block_size": 1024,
    "conv_kernel_size": 1024,
}
_LARGEST_SCALE = 1e6
_LARGEST_THETA = 1e15

# Keys of published layouts that would have no effect in the canonical form.
FOREIGN_KEYS = ("rope_theta", "rope_scaling", "dflash_config")


class DFlashConfig(PreTrainedConfig):
    """Configuration of a DFlash draft in its canonical form.

    Network:
        dflash_version: 1, or 2 for a draft with local convolutions and a candidate selector.
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
        hidden_act, rms_norm_eps, attention_bias, attention_dropout, max_position_embeddings, initializer_range: as in
            a Qwen3 decoder.
            `head_dim` may differ from `hidden_size / num_attention_heads`, and does in published drafts.
        rope_parameters: transformers 5 form, `{"rope_type": ..., "rope_theta": ..., ...}`; theta has no default.
        vocab_size: size of the target's vocabulary, or None if the checkpoint does not say.

    Inputs and outputs:
        block_size: tokens in a block: the anchor and `block_size - 1` candidates.
        mask_token_id: the id that fills the block positions to be predicted.
        target_layer_ids: the taps. `i` is the output of the target's decoder layer `i`, 0-based, before the final norm:
            taps `[1, 8]` are the target's `hidden_states[2]` and `hidden_states[9]`, concatenated in this order.
        input_embedding_scale: multiplies the block's embeddings.
        output_multiplier, final_logit_softcapping: the head's logits times the first, then a tanh cap if given.

    Attention inside a draft layer:
        layer_types: "full_attention" or "sliding_attention" for each layer.
        sliding_window: number of keys that a query of a sliding layer attends to, itself included.
        layer_causal: for each layer, whether a query attends only up to its own position in the block. Default: sliding
            layers are causal, full layers are not.

    DFlash 2 (None in version 1): conv_kernel_size, conv_group_size, selector_rank, selector_top_k.

    Optional weights:
        own_embeddings: the checkpoint has its own `embed_tokens`, used instead of the target's.
        draft_vocab_size: rows of the draft's own `lm_head`, mapped to target ids by `d2t`; None: the target's head.

    The target, as far as the checkpoint describes it (else None): target_name_or_path, target_hidden_size,
    target_vocab_size, target_num_hidden_layers.

    source_layout: name of the layout that the checkpoint was published in.

    Raises:
        CheckpointError: names every missing or invalid value.
    """

    model_type = "dflash"
    # Save and push the code along, so that plain transformers loads the draft with trust_remote_code.
    _auto_class: ClassVar[str | None] = "AutoConfig"
    # There is no default draft: transformers up to 5.23 must not build one to find out the defaults.
    has_no_defaults_at_init: ClassVar[bool] = True

    dflash_version: int = 1
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    max_position_embeddings: int | None = None
    rope_parameters: dict[str, Any] | None = None
    vocab_size: int | None = None
    initializer_range: float = 0.02

    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    layer_types: list[str] | None = None
    sliding_window: int | None = None
    layer_causal: list[bool] | None = None

    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None

    own_embeddings: bool = False
    draft_vocab_size: int | None = None

    target_name_or_path: str | None = None
    target_hidden_size: int | None = None
    target_vocab_size: int | None = None
    target_num_hidden_layers: int | None = None
    source_layout: str = "canonical"

    def __post_init__(self, **kwargs: Any) -> None:
        foreign = {key: kwargs[key] for key in FOREIGN_KEYS if key in kwargs}
        problems = find_problems({**vars(self), **foreign})
        if problems:
            raise CheckpointError(join_problems("Invalid DFlash configuration", problems))

        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.layer_causal is None:
            self.layer_causal = [layer_type == "sliding_attention" for layer_type in self.layer_types]
        self.rope_parameters = {"rope_type": "default", **self.rope_parameters}
        super().__post_init__(**kwargs)

    @property
    def context_size(self) -> int:
        """Width of the concatenated taps: `fc.in_features`."""
        return len(self.target_layer_ids) * (self.target_hidden_size or self.hidden_size)

    def checked_block_size(self, wanted: int | None) -> int:
        """Return the block size of a call: the requested one, by default the checkpoint's.

        Raises:
            UnsupportedOptionError: it is not an integer from 2 to the checkpoint's block size.
        """
        if wanted is None:
            return self.block_size
        if not is_integer(wanted) or not 2 <= wanted <= self.block_size:
            raise UnsupportedOptionError(
                f"block_size must be an integer from 2 to {self.block_size}, found {format_value(wanted)}. The draft "
                f"was trained on blocks of {self.block_size} and cannot fill longer ones (see `block_size` (top level) "
                "or `dflash_config.block_size` in its config.json)."
            )
        return wanted


def join_problems(headline: str, problems: list[str]) -> str:
    """Format a headline and the problems below it as one message."""
    if len(problems) == 1:
        return f"{headline}: {problems[0]}"
    return f"{headline}; {len(problems)} problems:\n" + "\n".join(f"- {problem}" for problem in problems)


def find_problems(values: Mapping[str, Any], places: Mapping[str, str] | None = None) -> list[str]:
    """List everything that is missing or invalid in the values of a configuration.

    Args:
        values: canonical keys to values; a missing key counts as None.
        places: where each value was read from (or, if it is None, looked for), for the messages. Example:
            `{"block_size": "dflash_config.block_size"}`.

    Returns:
        One or two sentences per problem: the key, where it was, the value, what is needed. Empty if there are none.
    """
    checked = _Values(values, places or {})
    checks = (
        _check_sizes,
        _check_block,
        _check_taps,
        _check_layers,
        _check_rope,
        _check_scales,
        _check_names,
        _check_version,
        _check_foreign,
    )
    return [problem for check in checks for problem in check(checked)]


class _Values:
    """The values to check, and where each was read from."""

    def __init__(self, values: Mapping[str, Any], places: Mapping[str, str]) -> None:
        self._values = values
        self._places = places

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def integer(self, key: str) -> int | None:
        """Return the value if it is a positive integer in its range, else None (the check of that key reports it)."""
        value = self._values.get(key)
        return value if is_integer(value) and 0 < value <= MAXIMA[key] else None

    def invalid(self, key: str, needed: str) -> str:
        """Describe a problem: the key, what was found and where, what is needed."""
        value = self._values.get(key)
        place = self._places.get(key, "the configuration")
        if value is None:
            return f"`{key}` is missing (looked in {place}); it must be {needed}."
        kind = "" if isinstance(value, (list, dict)) else f" ({type(value).__name__})"
        return f"`{key}` must be {needed}; found {format_value(value)}{kind} in {place}."

    def check_count(self, key: str, minimum: int = 1, optional: bool = False, note: str = "") -> Iterator[str]:
        """Check that a key holds an integer from `minimum` to its entry in `MAXIMA`; an optional one may be None."""
        value = self._values.get(key)
        if value is None and optional:
            return
        if not is_integer(value) or not minimum <= value <= MAXIMA[key]:
            yield self.invalid(key, f"an integer of at least {minimum}{note} and at most {MAXIMA[key]}")

    def check_number(self, key: str, default: float, allowed: Callable[[float], bool], needed: str) -> Iterator[str]:
        value = self.get(key, default)
        if not is_number(value) or not allowed(value):
            yield self.invalid(key, needed)


def is_integer(value: Any) -> bool:
    """Return True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return True for a finite int or float that is not a bool; an int must also fit into a float."""
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max


def format_value(value: Any) -> str:
    """Format any value for a message; a long one is cut."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # An integer of more than 4300 digits, or a value nested too deeply.
        return f"a value of type {type(value).__name__} that is too large to print"
    return text if len(text) <= 300 else f"{text[:300]}... ({len(text)} characters)"


def _check_sizes(values: _Values) -> Iterator[str]:
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        yield from values.check_count(key)
    yield from values.check_count("max_position_embeddings")
    for key in ("vocab_size", "target_hidden_size", "target_vocab_size", "target_num_hidden_layers", "head_dim"):
        yield from values.check_count(key, optional=True)

    heads, kv_heads = values.integer("num_attention_heads"), values.integer("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        yield f"`num_attention_heads` ({heads}) must be a multiple of `num_key_value_heads` ({kv_heads})."
    hidden, head_dim = values.integer("hidden_size"), values.integer("head_dim")
    if hidden and heads and head_dim is None and hidden % heads:
        yield (
            f"`head_dim` is missing and `hidden_size` ({hidden}) is not a multiple of `num_attention_heads` ({heads})."
        )
    width = head_dim or (hidden // heads if hidden and heads else None)
    if width and width % 2:
        yield f"`head_dim` must be even, because RoPE rotates pairs of values; found {width}."
    activation = values.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in ACT2FN:
        yield values.invalid("hidden_act", "an activation that transformers supports")


def _check_block(values: _Values) -> Iterator[str]:
    yield from values.check_count("block_size", 2, note=" (the anchor and one candidate)")
    mask_id, vocab_size = values.get("mask_token_id"), values.integer("vocab_size")
    if not is_integer(mask_id) or not 0 <= mask_id <= MAXIMA["mask_token_id"]:
        yield values.invalid("mask_token_id", f"a token id, an integer from 0 to {MAXIMA['mask_token_id']}")
    elif vocab_size is not None and mask_id >= vocab_size:
        yield values.invalid("mask_token_id", f"a token id below `vocab_size` ({vocab_size})")
    draft_vocab = values.integer("draft_vocab_size")
    yield from values.check_count("draft_vocab_size", optional=True)
    if draft_vocab is not None and vocab_size is not None and draft_vocab > vocab_size:
        yield values.invalid("draft_vocab_size", f"at most `vocab_size` ({vocab_size})")


def _check_taps(values: _Values) -> Iterator[str]:
    taps, deepest = values.get("target_layer_ids"), MAXIMA["target_num_hidden_layers"] - 1
    advice = "The taps are chosen in training and are never guessed: get them from the draft's author."
    if not isinstance(taps, (list, tuple)) or not taps or not all(is_integer(tap) for tap in taps):
        yield (
            values.invalid("target_layer_ids", "a non-empty list of integers, the tapped layers of the target")
            + f" {advice}"
        )
        return
    if min(taps) < 0:
        yield values.invalid("target_layer_ids", "0-based layer indices, none of them negative")
        return
    if max(taps) > deepest:
        yield values.invalid("target_layer_ids", f"layer indices of at most {deepest}")
        return
    repeated = [tap for tap, count in sorted(Counter(taps).items()) if count > 1]
    if repeated:
        yield values.invalid("target_layer_ids", f"distinct ({', '.join(map(str, repeated))} occurs more than once)")
    depth = values.integer("target_num_hidden_layers")
    if depth is not None and max(taps) >= depth:
        yield values.invalid("target_layer_ids", f"layers of a target with {depth} layers, 0 to {depth - 1}")


def _check_layers(values: _Values) -> Iterator[str]:
    layers = values.integer("num_hidden_layers")
    types = values.get("layer_types")
    if types is not None:
        if not isinstance(types, (list, tuple)) or not all(isinstance(kind, str) for kind in types):
            yield values.invalid("layer_types", f"a list with one of {', '.join(LAYER_TYPES)} for each layer")
            return
        if layers is not None and len(types) != layers:
            yield values.invalid("layer_types", f"of length {layers} (`num_hidden_layers`), not {len(types)}")
        unknown = sorted(set(types) - set(LAYER_TYPES))[:5]
        if unknown:
            yield values.invalid("layer_types", f"made of {', '.join(LAYER_TYPES)} (unknown: {', '.join(unknown)})")
    if "sliding_attention" in (types or ()):
        yield from values.check_count("sliding_window")
    else:
        yield from values.check_count("sliding_window", optional=True)
    causal = values.get("layer_causal")
    if causal is None:
        return
    if not isinstance(causal, (list, tuple)) or not all(isinstance(flag, bool) for flag in causal):
        yield values.invalid("layer_causal", "a list of booleans, one for each layer")
    elif layers is not None and len(causal) != layers:
        yield values.invalid("layer_causal", f"of length {layers} (`num_hidden_layers`), not {len(causal)}")


def _check_rope(values: _Values) -> Iterator[str]:
    rope = values.get("rope_parameters", {})
    if not isinstance(rope, Mapping):
        yield values.invalid("rope_parameters", 'a mapping such as {"rope_type": "default", "rope_theta": 1000000.0}')
        return
    nested = _Values({**rope, "rope_type": rope.get("rope_type", "default")}, values._places)
    theta = rope.get("rope_theta")
    if not is_number(theta) or not 0 < theta <= _LARGEST_THETA:
        yield nested.invalid(
            "rope_theta",
            f"a number above 0 (and at most {_LARGEST_THETA:g}); there is no default, because a wrong one would only "
            "show as low acceptance",
        )
    rope_type = nested.get("rope_type")
    known = sorted({"default", *ROPE_INIT_FUNCTIONS})
    if rope_type not in known:
        yield nested.invalid("rope_type", f"one of {', '.join(known)}")
        return
    needed = ROPE_REQUIRED_KEYS.get(rope_type, ())
    given = [key for key, value in rope.items() if value is not None and key not in needed]
    for key in (*needed, *given):
        value = rope.get(key)
        if key in _ROPE_LISTS:
            if not isinstance(value, (list, tuple)) or not value or not all(map(is_number, value)):
                yield nested.invalid(key, f"a list of numbers for RoPE of type {rope_type}")
        elif key == "truncate":
            if not isinstance(value, bool):
                yield nested.invalid(key, f"true or false for RoPE of type {rope_type}")
        elif key in ("rope_theta", "rope_type"):
            continue
        elif not is_number(value) or value <= 0:
            yield nested.invalid(key, f"a number above 0 for RoPE of type {rope_type}")
        elif value > MAXIMA["max_position_embeddings"]:
            yield nested.invalid(key, f"a number of at most {MAXIMA['max_position_embeddings']}")


def _up_to(largest: float) -> Callable[[float], bool]:
    return lambda value: 0 < value <= largest


def _check_scales(values: _Values) -> Iterator[str]:
    bounded = f"a number above 0 and at most {_LARGEST_SCALE:g}"
    for key in ("rms_norm_eps", "initializer_range"):
        yield from values.check_number(key, 0.0, lambda value: 0 <= value <= 1e3, "a number from 0 to 1000")
    yield from values.check_number("attention_dropout", 0.0, lambda value: 0 <= value < 1, "a number from 0 to below 1")
    for key in ("attention_bias", "own_embeddings"):
        if not isinstance(values.get(key, False), bool):
            yield values.invalid(key, "true or false")
    for key in ("input_embedding_scale", "output_multiplier"):
        yield from values.check_number(key, 1.0, _up_to(_LARGEST_SCALE), bounded)
    yield from values.check_number(
        "final_logit_softcapping", 1.0, _up_to(_LARGEST_SCALE), f"{bounded}, or null for no cap"
    )


def _check_names(values: _Values) -> Iterator[str]:
    for key in ("target_name_or_path", "source_layout"):
        if not isinstance(values.get(key, ""), str):
            yield values.invalid(key, "a string")


def _check_version(values: _Values) -> Iterator[str]:
    version = values.get("dflash_version", 1)
    if not is_integer(version) or version not in (1, 2):
        yield values.invalid("dflash_version", "1 or 2")
        return
    if version == 1:
        for key in _VERSION_2_FIELDS:
            if values.get(key) is not None:
                yield values.invalid(key, "null in a DFlash 1 draft; only DFlash 2 has convolutions and a selector")
        return
    for key in _VERSION_2_FIELDS:
        yield from values.check_count(key)
    hidden, group = values.integer("hidden_size"), values.integer("conv_group_size")
    if hidden and group and group > 0 and hidden % group:
        yield values.invalid("conv_group_size", f"a divisor of `hidden_size` ({hidden})")
    vocab_size, top_k = values.integer("vocab_size"), values.integer("selector_top_k")
    if vocab_size is None:
        yield values.invalid("vocab_size", "given for a DFlash 2 draft: its codebooks have one row per token")
    elif top_k is not None and top_k > vocab_size:
        yield values.invalid("selector_top_k", f"at most `vocab_size` ({vocab_size})")
    draft_vocab = values.get("draft_vocab_size")
    if draft_vocab is not None and draft_vocab != vocab_size:
        yield values.invalid(
            "draft_vocab_size", f"null or {vocab_size} in a DFlash 2 draft: its selector covers the whole vocabulary"
        )


def _check_foreign(values: _Values) -> Iterator[str]:
    for key in FOREIGN_KEYS:
        if values.get(key) is not None:
            yield (
                f"`{key}` ({format_value(values.get(key))}) is not a key of the canonical form: RoPE values go into "
                "`rope_parameters`, all others to the top level. `hf_dflash.load_draft` reads published layouts."
            )


__all__ = ["DFlashConfig"]
