"""What the target accepts of a verified block.

Owns: pure functions from the target's choices and the candidates to the number of accepted candidates and the bonus
token, row by row. Every quantity that belongs to a row is a tensor of shape `(batch,)`.

Does not know: models, caches, processors, streamers. How the target chooses a token at a position (argmax, or one draw
from its processed distribution) is the caller's business; see `hf_dflash.decoding.text`.

The rule is the same for greedy decoding and for sampling. The draft proposes one token per position (a point mass q).
Accepting candidate x with probability p(x) and otherwise drawing from p without x is the same as drawing y from p and
accepting while y == x; so the text is, draw by draw, the one that plain generate writes from the same random state.
(Leviathan et al. 2023, arXiv 2211.17192, algorithm 1, with q a point mass.)
"""

import torch


def matching_prefix(candidates: torch.LongTensor, choices: torch.LongTensor) -> torch.LongTensor:
    """Count the leading candidates that agree with the target's own choices.

    Args:
        candidates: `(batch, n)` proposed ids.
        choices: `(batch, m)` ids that the target chose at the same positions, `m >= n`; columns past `n` are not looked
            at.

    Returns:
        `(batch,)` accepted candidates of each row, 0 to n.

    Example:
        candidates [[7, 8, 9]], choices [[7, 8, 5, 4]]: the third differs, so 2 are accepted, and the bonus token is
        choices[0, 2] = 5, what the target itself says after the accepted [7, 8].
    """
    agrees = candidates == choices[:, : candidates.shape[1]]
    return agrees.long().cumprod(dim=1).sum(dim=1)


def greedy_choices(logits: torch.Tensor) -> torch.LongTensor:
    """The target's greedy token at every position of a block: `(batch, n, vocabulary)` logits to `(batch, n)` ids.

    They are compared in float32, as in plain generate; on a CPU that is also several times quicker than in bfloat16.
    """
    return logits.float().argmax(dim=-1)


def readable_rows(logits: torch.Tensor) -> torch.LongTensor:
    """Count the leading positions of a block whose logits are numbers: `(batch, n, vocabulary)` to `(batch,)`, 0 to n.

    A candidate that overflows (float16) has keys and values that are no numbers, and attention multiplies them by zero
    for the tokens before it, which makes those no numbers either. So an unreadable row need not be the target's own:
    read without the candidates behind it, its token may have logits like any other.

    Example:
        candidates [8, 9] behind an anchor, and 9 overflows. Where the attention multiplies what is hidden by zero, rows
        0, 1 and 2 are unreadable: 0. Where it leaves that out, row 2 alone is: 2, which decide 8 and a bonus token.
    """
    # A maximum is NaN where any entry is; it costs a tenth of `isnan`.
    return (~logits.amax(dim=-1).isnan()).long().cumprod(dim=1).sum(dim=1)


def cut_at_first(stop: torch.BoolTensor, lengths: torch.LongTensor) -> torch.LongTensor:
    """Shorten each row to its first stop, the stopping token included.

    Args:
        stop: `(batch, n)`, True where plain generate would have stopped after that token.
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
