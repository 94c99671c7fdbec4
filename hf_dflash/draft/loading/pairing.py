"""Whether a draft and a target belong together.

Owns: the comparison of what a draft was trained on with what a target is, in numbers that configurations give.

Does not know: weights; how a target runs.
"""

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
    """What a draft must fit.

    name: for messages. vocab_size: as the configuration says. num_embeddings: rows of the input embedding, at least as
    many. special_ids: the text's special tokens, each an id, a list of ids or None.
    """

    name: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_embeddings: int
    special_ids: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_config(cls, name: str, config: PreTrainedConfig) -> "TargetFacts":
        """From a target's configuration alone, without its weights."""
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
        """From a loaded target."""
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
    """The special tokens, each from the first configuration that has it."""
    said = {key: [getattr(config, key, None) for config in configs] for key in _SPECIAL_TOKENS}
    return {key: next((value for value in values if value is not None), None) for key, values in said.items()}


def check_pairing(draft: DFlashDraftModel | DFlashConfig, target: Target | TargetFacts) -> None:
    """Holds a draft against a target before anything is generated.

    Raises:
        PairingError: naming both sides and every number in which they differ.

    Warns:
        UserWarning: the mask token is one of the target's special tokens.
    """
    config = getattr(draft, "config", draft)
    facts = TargetFacts.of_target(target) if isinstance(target, Target) else target
    problems = pairing_problems(config, facts)
    if problems:
        made_for = f" It was made for {config.target_name_or_path}." if config.target_name_or_path else ""
        raise PairingError(
            f"The draft {draft_name(config)} and the target {facts.name} do not belong together: {' '.join(problems)}"
            f"{made_for} Use the draft that was trained for this very target."
        )
    for text in pairing_warnings(config, facts):
        warnings.warn(f"The draft {draft_name(config)} with the target {facts.name}: {text}", stacklevel=2)


def pairing_problems(config: DFlashConfig, target: TargetFacts) -> list[str]:
    """Every number in which a draft's configuration and a target differ, a sentence each."""
    draft = draft_name(config)
    problems = []
    wanted = config.target_hidden_size or config.hidden_size
    if wanted != target.hidden_size:
        problems.append(
            f"{draft} reads hidden states of size {wanted}, those of {target.name} have size {target.hidden_size}."
        )
    elif config.hidden_size != target.hidden_size and not (config.own_embeddings and config.draft_vocab_size):
        problems.append(
            f"{draft} works at hidden size {config.hidden_size} without embeddings and head of its own, and those of "
            f"{target.name} have size {target.hidden_size}."
        )
    vocabulary = config.target_vocab_size or config.vocab_size
    if vocabulary is not None and vocabulary != target.vocab_size:
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
    """What is odd about a pair without making it impossible."""
    ids = target.special_ids.items()
    return [text for key, special in ids for text in mask_warnings(config.mask_token_id, key, special)]


def draft_name(config: DFlashConfig) -> str:
    """What messages call a draft: where it was loaded from, if that is known."""
    return config.name_or_path or "draft"
