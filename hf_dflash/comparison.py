"""Whether a draft changed the text, and if it did, whether rounding explains it.

Owns: the first difference of two texts, the margin by which the target chose there, and the bound that its own rounding
sets.

Does not know: how a draft works, prompt sets, reports.

The rule: a forward of several tokens adds up in another order than forwards of one token, so where the target's two
best choices are closer to each other than that rounding, either may win. The rounding is measured, not assumed: the
target reads the text before the difference once more in a single forward, without any draft, and the largest change of
a logit is its rounding there. Both logits of a pair may move by that much, so the bound is twice it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from .errors import UnsupportedOptionError
from .modeling_dflash import DFlashDraftModel

#: Options of `generate` that only a call with a draft knows.
DRAFT_OPTIONS = ("block_size", "num_assistant_tokens", "stats", "trace")


@dataclass(frozen=True)
class Comparison:
    """Two texts, token by token.

    Attributes:
        length: new tokens of the longer text.
        dtype: the target's dtype, such as "bfloat16".
        first_difference: 0-based new token where they part; None when they are the same.
        margin: how far the token that plain generate chose there was ahead of the next: a difference of scores (logits
            behind the logits processors), or for a sampled token of scores with the draw's noise added. None when the
            texts are the same, when one merely stopped sooner, or when the target does not repeat its own text.
        bound: twice the largest change of a score there between two readings of the target; None like `margin`.
        within_rounding: whether the difference is explained: `margin <= bound`, or the second reading itself chose what
            the other text has.
    """

    length: int
    dtype: str
    first_difference: int | None = None
    margin: float | None = None
    bound: float | None = None
    within_rounding: bool = False

    @property
    def same(self) -> bool:
        """Whether the texts are the same, token for token."""
        return self.first_difference is None


def compare(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    inputs: Mapping[str, torch.Tensor] | torch.LongTensor,
    *,
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """Decode one prompt plainly and with the draft, from the same seed, and compare.

    Args:
        target, draft: the pair.
        inputs: one prompt: what the tokenizer returns, or `(1, length)` ids.
        seed: of both runs; the global random state is left as it was.
        options: of `generate`, for both runs. Objects that remember earlier calls do not belong here.

    Raises:
        UnsupportedOptionError: several prompts, or several answers to one.
    """
    inputs = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    plain_options = {name: value for name, value in options.items() if name not in DRAFT_OPTIONS}
    texts = []
    for run in (plain_options, {**options, "assistant_model": draft}):
        with torch.random.fork_rng(devices=_generator_devices(target)):
            torch.manual_seed(seed)
            texts.append(_ids(target.generate(**inputs, **run)))
    plain, other = texts
    if plain.shape[0] != 1:
        raise UnsupportedOptionError(
            f"`compare` was given {plain.shape[0]} texts to compare; it takes one prompt and one answer. Call it once "
            "per prompt, without `num_return_sequences`."
        )
    return compare_texts(target, inputs, plain[0], other[0], seed=seed, **plain_options)


def compare_texts(
    target: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    plain: torch.LongTensor,
    other: torch.LongTensor,
    *,
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """Compare plain generate's text with another one; the target runs again only if they differ.

    Args:
        target: which wrote both.
        inputs: the prompt, `input_ids` `(1, length)` and what goes with it.
        plain, other: `(length,)` ids, prompt included.
        seed, options: with which plain generate wrote its text.
    """
    prompt_length = inputs["input_ids"].shape[1]
    dtype = str(target.dtype).removeprefix("torch.")
    plain, other = plain.to(target.device), other.to(target.device)
    length = max(len(plain), len(other)) - prompt_length
    common = min(len(plain), len(other))
    differing = (plain[:common] != other[:common]).nonzero()
    if not len(differing):
        return Comparison(length, dtype, None if len(plain) == len(other) else common - prompt_length)

    position = int(differing[0])
    with torch.random.fork_rng(devices=_generator_devices(target)):
        torch.manual_seed(seed)
        choice = _choice_after(target, inputs, position - prompt_length + 1, options)
    if not choice.token == choice.winner_with(choice.noise) == int(plain[position]):
        return Comparison(length, dtype, position - prompt_length)
    again = _choice_after(target, _extended(inputs, plain[:position]), 1, options)
    both = choice.scores.isfinite() & again.scores.isfinite()
    bound = 2 * float((choice.scores - again.scores)[both].abs().max())
    explained = choice.margin <= bound or again.winner_with(choice.noise) == int(other[position])
    return Comparison(length, dtype, position - prompt_length, choice.margin, bound, explained)


@dataclass(frozen=True)
class _Choice:
    """How the target chose a token.

    Attributes:
        token: what it chose.
        scores: `(vocabulary,)` in float32, behind the logits processors.
        noise: `(vocabulary,)` what a draw adds to the scores before the largest wins; zeros in greedy decoding.
    """

    token: int
    scores: torch.Tensor
    noise: torch.Tensor

    @property
    def margin(self) -> float:
        """How far the winner is ahead of the next."""
        best, second = (self.scores + self.noise).topk(2).values.tolist()
        return best - second

    def winner_with(self, noise: torch.Tensor) -> int:
        """What these scores would choose with the noise of another choice."""
        return int((self.scores + noise).argmax())


class _RandomState(LogitsProcessor):
    """Remembers the state of the random generator before each draw; changes nothing."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        on_cpu = scores.device.type == "cpu"
        self.state = torch.get_rng_state() if on_cpu else torch.cuda.get_rng_state(scores.device)
        return scores

    def draw(self, scores: torch.Tensor) -> torch.Tensor:
        """The noise of the draw from the remembered state.

        `torch.multinomial` of one token is an exponential race: the largest p / q wins, q exponential, so the noise on
        a log scale is -log q.
        """
        generator = torch.Generator(scores.device)
        generator.set_state(self.state)
        return -torch.empty_like(scores).exponential_(1, generator=generator).log()


def _choice_after(target: PreTrainedModel, inputs: Mapping[str, Any], count: int, options: dict[str, Any]) -> _Choice:
    """Plain generate's choice of the `count`-th new token."""
    state = _RandomState()
    own = {name: value for name, value in options.items() if name not in ("max_length", "streamer")}
    own |= {"max_new_tokens": count, "return_dict_in_generate": True, "output_scores": True}
    own["logits_processor"] = LogitsProcessorList([*(options.get("logits_processor") or []), state])
    output = target.generate(**inputs, **own)
    scores = output.scores[-1][0].float()
    token = int(output.sequences[0, -1])
    config = options.get("generation_config") or target.generation_config
    sampled = options.get("do_sample", config.do_sample)
    return _Choice(token, scores, state.draw(scores) if sampled else torch.zeros_like(scores))


def _extended(inputs: Mapping[str, Any], ids: torch.LongTensor) -> dict[str, Any]:
    """The inputs with the prompt replaced by the longer text `(length,)`: real tokens behind it, of token type 0."""
    prompt = inputs["input_ids"]
    extended = {**inputs, "input_ids": ids[None].to(prompt.device)}
    for name, value in inputs.items():
        if name != "input_ids" and isinstance(value, torch.Tensor) and value.shape == prompt.shape:
            fill = 1 if name == "attention_mask" else 0
            extended[name] = torch.nn.functional.pad(value, (0, len(ids) - prompt.shape[1]), value=fill)
    return extended


def _ids(output: Any) -> torch.LongTensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def _generator_devices(target: PreTrainedModel) -> list[torch.device]:
    """The devices whose random state a run uses, the CPU aside."""
    return [target.device] if target.device.type == "cuda" else []
