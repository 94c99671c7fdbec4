"""The acceptance rule: how many candidates of a verified block the target accepts.

Pure functions of the target's choices and the candidates; per-row quantities are tensors of shape `(batch,)`. How the
target chooses a token at a position (argmax, or one draw from its processed distribution) is up to the caller; see
`hf_dflash.decoding.text`.

The rule is the same for greedy decoding and for sampling. The draft proposes one token per position (a point mass q).
Accepting candidate x with probability p(x) and otherwise drawing from p without x is the same as drawing y from p and
accepting while y == x. So the text is, draw by draw, the one that plain generate produces from the same random state.
(Leviathan et al. 2023, arXiv 2211.17192, algorithm 1, with q a point mass.)
"""

import torch


def matching_prefix(candidates: torch.LongTensor, choices: torch.LongTensor) -> torch.LongTensor:
    """Count the leading candidates that match the target's own choices.

    Args:
        candidates: `(batch, n)` proposed ids.
        choices: `(batch, m)` ids that the target chose at the same positions, `m >= n`; columns past `n` are ignored.

    Returns:
        `(batch,)` accepted candidates of each row, 0 to n.

    Example:
        candidates [[7, 8, 9]], choices [[7, 8, 5, 4]]: the third differs, so 2 are accepted, and the bonus token is
        choices[0, 2] = 5, the target's own choice after the accepted [7, 8].
    """
    matches = candidates == choices[:, : candidates.shape[1]]
    return matches.long().cumprod(dim=1).sum(dim=1)


def greedy_choices(logits: torch.Tensor) -> torch.LongTensor:
    """Return the target's greedy token at every position of a block: `(batch, n, vocabulary)` to `(batch, n)` ids.

    The argmax is taken in float32, as in plain generate; on a CPU this is also several times faster than in bfloat16.
    """
    return logits.float().argmax(dim=-1)


def nan_free_prefix(logits: torch.Tensor) -> torch.LongTensor:
    """Count the leading positions of a block without NaN logits: `(batch, n, vocabulary)` to `(batch,)`, 0 to n.

    A candidate that overflows (float16) has non-finite keys and values. Attention multiplies them by zero for the
    tokens before it, which turns those into NaN too. So a NaN row need not come from its own token: verified without
    the candidates after it, that token may have ordinary logits.

    Example:
        candidates [8, 9] after an anchor, and 9 overflows. If attention multiplies masked positions by zero, rows 0, 1
        and 2 are NaN: returns 0. If it skips them, only row 2 is: returns 2, and these rows decide 8 and a bonus token.
    """
    # A maximum is NaN if any entry is, and costs a tenth of `isnan`.
    return (~logits.amax(dim=-1).isnan()).long().cumprod(dim=1).sum(dim=1)


def cut_at_first(stop: torch.BoolTensor, lengths: torch.LongTensor) -> torch.LongTensor:
    """Shorten each row to its first stop, the stopping token included.

    Args:
        stop: `(batch, n)`, True if plain generate would have stopped after that token.
        lengths: `(batch,)` tokens that would be committed without a stop, 1 to n.

    Returns:
        `(batch,)` tokens to commit.

    Example:
        stop [[F, T, F, T]], length 3: the first stop is column 1, so 2 tokens are committed.
        stop [[F, F, F, T]], length 3: column 3 is not among the first 3 tokens, so all 3 are.
    """
    columns = torch.arange(stop.shape[1], device=stop.device)
    first_stop = torch.where(stop, columns, stop.shape[1]).amin(dim=1)
    return torch.minimum(lengths, first_stop + 1)
