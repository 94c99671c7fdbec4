"""Whether two ways of decoding wrote the same text.

Owns: the first difference of two texts, and the judgement whether rounding explains it. Does not know: how the texts
came about.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

ROUNDING_STEPS = 4


@dataclass(frozen=True)
class Comparison:
    """Two texts, token by token.

    Attributes:
        length: new tokens of the longer text.
        first_difference: 0-based new token where they part; None when they are the same.
        margin: distance of the target's two best logits there; None when the texts are the same or were sampled.
        within_rounding: whether that distance is no more than a few rounding steps of the target's dtype.
        dtype: the target's dtype, such as "bfloat16".
    """

    length: int
    dtype: str
    first_difference: int | None = None
    margin: float | None = None
    within_rounding: bool = False

    @property
    def same(self) -> bool:
        return self.first_difference is None


def compare(
    target: PreTrainedModel, prompt_length: int, plain: torch.Tensor, other: torch.Tensor, greedy: bool
) -> Comparison:
    """Compare `(length,)` ids of plain generate with `(length,)` ids of another method, both with the prompt in front.

    At a first difference of greedy texts the target reads the common text once more. A verify forward of several tokens
    adds up in another order than one-token forwards, so in bfloat16 and float16 either of two logits may win that are
    only rounding steps
    apart: the texts are called equal within rounding if the margin is at most 4 steps of the dtype at the larger logit.
    """
    dtype = str(target.dtype).removeprefix("torch.")
    length = max(plain.shape[0], other.shape[0]) - prompt_length
    common = min(plain.shape[0], other.shape[0])
    differs = (plain[:common] != other[:common]).nonzero()
    if not len(differs) and plain.shape[0] == other.shape[0]:
        return Comparison(length, dtype)
    position = int(differs[0]) if len(differs) else common
    if not greedy or not len(differs):
        return Comparison(length, dtype, position - prompt_length)
    with torch.inference_mode():
        logits = target(plain[None, :position].to(target.device)).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    step = torch.finfo(target.dtype).eps * abs(best)
    return Comparison(length, dtype, position - prompt_length, best - second, best - second <= ROUNDING_STEPS * step)
