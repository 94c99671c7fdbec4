"""Checks whether a draft and a target match, by comparing values of their configurations."""

import warnings
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.errors import PairingError
from hf_dflash.draft.layouts import mask_warnings
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.target import Target

_SPECIAL_TOKENS = ("eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class TargetFacts:
    """What a draft must match in its target.

    name: for messages. vocab_size: of the configuration. num_embeddings: rows of the input embedding, at least as many.
    special_ids: the text's special tokens, each an id, a list of ids or None.
    """

    name: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_embeddings: int
    special_ids: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_config(cls, name: str, config: PreTrainedConfig) -> "TargetFacts":
        """Read them from a target's configuration alone, without its weights."""
        text = config.get_text_config(decoder=True)
        return cls(
            name,
            text.hidden_size,
            text.vocab_size,
            text.num_hidden_layers,
            text.vocab_size,
            _special_ids(text),
        )

    @classmethod
    def of_target(cls, target: Target) -> "TargetFacts":
        """Read them from a loaded target."""
        text = target.text_config
        generation = getattr(target.model, "generation_config", None)
        return cls(
            target.name,
            text.hidden_size,
            text.vocab_size,
            len(target.layers),
            target.num_embeddings,
            _special_ids(generation, text),
        )


def _special_ids(*configs: Any) -> dict[str, Any]:
    """Return the special tokens, each from the first configuration that has it."""
    found = {key: [getattr(config, key, None) for config in configs] for key in _SPECIAL_TOKENS}
    return {key: next((value for value in values if value is not None), None) for key, values in found.items()}


def check_pairing(draft: DFlashDraftModel | DFlashConfig, target: Target | TargetFacts) -> None:
    """Check a draft against a target before anything is generated.

    Raises:
        PairingError: names both sides and every value in which they differ.

    Warns:
        UserWarning: the mask token is one of the target's special tokens.
    """
    config = getattr(draft, "config", draft)
    facts = TargetFacts.of_target(target) if isinstance(target, Target) else target
    problems = pairing_problems(config, facts)
    if problems:
        trained_for = f" The draft was trained for {config.target_name_or_path}." if config.target_name_or_path else ""
        raise PairingError(
            f"The draft {draft_name(config)} and the target {facts.name} do not match: {' '.join(problems)}"
            f"{trained_for} Use a draft that was trained for this target."
        )
    for text in pairing_warnings(config, facts):
        warnings.warn(f"The draft {draft_name(config)} with the target {facts.name}: {text}", stacklevel=2)


def pairing_problems(config: DFlashConfig, target: TargetFacts) -> list[str]:
    """Describe every value in which a draft's configuration and a target differ, one sentence each."""
    draft = draft_name(config)
    problems = []
    hidden_size = config.target_hidden_size or config.hidden_size
    if hidden_size != target.hidden_size:
        problems.append(
            f"{draft} reads hidden states of size {hidden_size}, those of {target.name} have size {target.hidden_size}."
        )
    elif config.hidden_size != target.hidden_size and not (config.own_embeddings and config.draft_vocab_size):
        problems.append(
            f"{draft} has hidden size {config.hidden_size} and no embeddings and head of its own, and those of "
            f"{target.name} have size {target.hidden_size}."
        )
    vocabulary = config.target_vocab_size or config.vocab_size
    if vocabulary is not None and not _same_vocabulary(vocabulary, target.vocab_size):
        problems.append(
            f"{draft} was trained on a vocabulary of {vocabulary}, {target.name} has one of {target.vocab_size}."
        )
    if config.mask_token_id >= target.num_embeddings:
        problems.append(
            f"The mask token of {draft} is {config.mask_token_id}, but {target.name} embeds {target.num_embeddings} "
            f"tokens, 0 to {target.num_embeddings - 1}."
        )
    depth, layers = config.target_num_hidden_layers, target.num_hidden_layers
    if depth is not None and depth != layers:
        problems.append(f"{draft} was trained on a target of {depth} layers, {target.name} has {layers}.")
    if max(config.target_layer_ids) >= layers:
        problems.append(
            f"{draft} taps the layers {config.target_layer_ids}, {target.name} has {layers}, 0 to {layers - 1}."
        )
    return problems


def pairing_warnings(config: DFlashConfig, target: TargetFacts) -> list[str]:
    """Describe what is unusual but not an error in a pair."""
    ids = target.special_ids.items()
    found = [text for key, special in ids for text in mask_warnings(config.mask_token_id, key, special)]
    vocabulary = config.target_vocab_size or config.vocab_size
    if vocabulary not in (None, target.vocab_size) and _same_vocabulary(vocabulary, target.vocab_size):
        found.append(
            f"the draft was trained on a vocabulary of {vocabulary}, the target has one of {target.vocab_size}. The "
            f"difference is taken for padding: ids from {min(vocabulary, target.vocab_size)} on are never proposed."
        )
    return found


def _same_vocabulary(one: int, other: int) -> bool:
    """Return whether two sizes can be those of one vocabulary, as it is and padded or with a few tokens added.

    `resize_token_embeddings(pad_to_multiple_of=64)` adds fewer than 64 rows to the tokenizer's tokens; before it, a
    model often has 1 % more rows than its tokenizer has tokens (Qwen3: 151936 for 151669).
    """
    smaller, difference = min(one, other), abs(one - other)
    return difference <= max(64, smaller // 100) and 2 * difference <= smaller


def draft_name(config: DFlashConfig) -> str:
    """Return the name of a draft for messages: where it was loaded from, if known."""
    return config.name_or_path or "draft"
