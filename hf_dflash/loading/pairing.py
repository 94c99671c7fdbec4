"""Whether a draft and a target belong together.

Owns: the comparison of what a draft was trained on with what a target is, in numbers that a configuration gives.

Does not know: target models; the caller says what it has.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from hf_dflash.configuration_dflash import DFlashConfig
from hf_dflash.errors import PairingError
from hf_dflash.layouts import mask_warnings
from hf_dflash.modeling_dflash import DFlashDraftModel


def check_pairing(
    draft: DFlashDraftModel | DFlashConfig,
    target_name: str,
    hidden_size: int,
    vocab_size: int,
    num_hidden_layers: int,
    special_ids: Mapping[str, Any] | None = None,
) -> None:
    """Checks a draft against a target before anything is generated.

    Args:
        target_name: for the messages.
        hidden_size, vocab_size, num_hidden_layers: of the target's text model; `vocab_size` is what its embedding and
            its head cover.
        special_ids: the target's special tokens, as in `{"eos_token_id": 2, "pad_token_id": None}`.

    Raises:
        PairingError: naming both sides and every number in which they differ.

    Warns:
        UserWarning: the mask token is one of the target's special tokens.
    """
    config = getattr(draft, "config", draft)
    problems = pairing_problems(config, target_name, hidden_size, vocab_size, num_hidden_layers)
    if problems:
        made_for = f" It was made for {config.target_name_or_path}." if config.target_name_or_path else ""
        raise PairingError(
            f"The draft {draft_name(config)} and the target {target_name} do not belong together: {' '.join(problems)}"
            f"{made_for} Use the draft that was trained for this very target."
        )
    for key, special in (special_ids or {}).items():
        for text in mask_warnings(config.mask_token_id, key, special):
            warnings.warn(f"The draft {draft_name(config)} with the target {target_name}: {text}", stacklevel=2)


def pairing_problems(
    config: DFlashConfig, target_name: str, hidden_size: int, vocab_size: int, num_hidden_layers: int
) -> list[str]:
    """Every number in which a draft's configuration and a target differ; arguments as for `check_pairing`."""
    draft = draft_name(config)
    problems = []
    wanted = config.target_hidden_size or config.hidden_size
    if wanted != hidden_size:
        problems.append(
            f"{draft} reads hidden states of size {wanted}, those of {target_name} have size {hidden_size}."
        )
    elif config.hidden_size != hidden_size and not (config.own_embeddings and config.draft_vocab_size):
        problems.append(
            f"{draft} works at hidden size {config.hidden_size} without embeddings and head of its own, and those of "
            f"{target_name} have size {hidden_size}."
        )
    known = config.target_vocab_size or config.vocab_size
    if known is not None and known != vocab_size:
        problems.append(f"{draft} was trained on a vocabulary of {known}, {target_name} has one of {vocab_size}.")
    if config.mask_token_id >= vocab_size:
        problems.append(
            f"the mask token of {draft} is {config.mask_token_id}, but {target_name} embeds {vocab_size} tokens, "
            f"0 to {vocab_size - 1}."
        )
    depth = config.target_num_hidden_layers
    if depth is not None and depth != num_hidden_layers:
        problems.append(f"{draft} was trained on a target of {depth} layers, {target_name} has {num_hidden_layers}.")
    if max(config.target_layer_ids) >= num_hidden_layers:
        problems.append(
            f"{draft} taps the layers {config.target_layer_ids}, {target_name} has {num_hidden_layers}, 0 to "
            f"{num_hidden_layers - 1}."
        )
    return problems


def draft_name(config: DFlashConfig) -> str:
    """What messages call a draft: where it was loaded from, if that is known."""
    return config.name_or_path or "draft"
