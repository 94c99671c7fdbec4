"""Loads the pair of a command, makes the checks that come before decoding, and prints where the models are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_dflash_cli.show import diagnostics

if TYPE_CHECKING:
    from hf_dflash.pair import Pair


def load(
    target: str,
    draft: str,
    chat_template_kwargs: dict[str, Any] | None = None,
    block_size: int | None = None,
    **options: Any,
) -> Pair:
    """Load a target and a draft and print their devices on standard error.

    Raises:
        UnsupportedOptionError: the block size is out of the draft's range; other errors are those of `load_pair`.
    """
    from hf_dflash.pair import load_pair, placement

    pair = load_pair(target, draft, chat_template_kwargs, **options)
    pair.draft.config.checked_block_size(block_size)
    diagnostics().print(placement(pair.target, pair.draft), markup=False)
    return pair
