"""Whether a draft changed the text, and if it did, whether rounding explains it.

Owns: the first difference of two texts, the margin by which the target chose there, and the bound that its own rounding
sets.

Does not know: how a draft works, prompt sets, reports.

The rule: a forward of several tokens adds up in another order than forwards of one token, so where the target's two
best choices are closer to each other than that rounding, either may win. The rounding is measured, not assumed: the
target reads the text around the difference again, without any draft, several tokens at a time, and the largest change
of a logit is its rounding there. Both logits of a pair may move by that much, so the bound is twice it, and never less
than one step of the target's dtype at the chosen logit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.cache import CACHE_KEYWORD

#: Options of `generate` that only a call with a draft knows.
DRAFT_OPTIONS = ("block_size", "num_assistant_tokens", "stats", "trace")
#: Tokens that share the last forward of a reading: so many before the one that is judged (None: all), and behind it.
BEFORE = (None, 0, 3, 7)
BEHIND = 8


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
        bound: twice the largest change of a score there between readings of the target; None like `margin`.
        within_tolerance: whether the difference is explained: `margin <= bound`, or another reading itself would have
            chosen what the other text has.
    """

    length: int
    dtype: str
    first_difference: int | None = None
    margin: float | None = None
    bound: float | None = None
    within_tolerance: bool = False

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
        inputs: one prompt: what the tokenizer returns, or `(1, length)` ids, all of them real.
        seed: of both runs; the global random state is left as it was.
        options: of `generate`, for both runs. Objects that remember earlier calls do not belong here.

    Raises:
        UnsupportedOptionError: several prompts, or several answers to one.
    """
    inputs = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
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
        inputs: the prompt, `input_ids` `(1, length)` and what goes with it, the `attention_mask` among it.
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
    if not choice.token == choice.winner_after(torch.zeros_like(choice.noise)) == int(plain[position]):
        return Comparison(length, dtype, position - prompt_length)
    changes = [choice.scale * change for change in _changes(target, inputs, plain, position, choice.logits)]
    step = torch.finfo(target.dtype).eps * abs(float(choice.scores[choice.token]))
    bound = max(step, *(2 * float(change.abs().max()) for change in changes))
    others = {choice.winner_after(change) for change in changes}
    explained = choice.margin <= bound or int(other[position]) in others
    return Comparison(length, dtype, position - prompt_length, choice.margin, bound, explained)


@dataclass(frozen=True)
class _Choice:
    """How plain generate chose a token.

    Attributes:
        token: what it chose.
        logits, scores: `(vocabulary,)` in float32, before and behind the logits processors.
        noise: `(vocabulary,)` what a draw adds to the scores before the largest wins; zeros in greedy decoding.
        scale: how much a change of a logit changes its score: 1 / temperature.
    """

    token: int
    logits: torch.Tensor
    scores: torch.Tensor
    noise: torch.Tensor
    scale: float

    @property
    def margin(self) -> float:
        """How far the winner is ahead of the next."""
        best, second = (self.scores + self.noise).topk(2).values.tolist()
        return best - second

    def winner_after(self, change: torch.Tensor) -> int:
        """What would be chosen if the scores had changed by so much."""
        return int((self.scores + change + self.noise).argmax())


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
    own |= {"max_new_tokens": count, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    own["logits_processor"] = LogitsProcessorList([*(options.get("logits_processor") or []), state])
    output = target.generate(**inputs, **own)
    logits, scores = output.logits[-1][0].float(), output.scores[-1][0].float()
    token = int(output.sequences[0, -1])
    config = options.get("generation_config") or target.generation_config
    if not options.get("do_sample", config.do_sample):
        return _Choice(token, logits, scores, torch.zeros_like(scores), 1.0)
    temperature = options.get("temperature") or config.temperature or 1.0
    return _Choice(token, logits, scores, state.draw(scores), 1 / temperature)


@torch.no_grad()
def _changes(
    target: PreTrainedModel,
    inputs: Mapping[str, Any],
    text: torch.LongTensor,
    position: int,
    logits: torch.Tensor,
) -> Iterator[torch.Tensor]:
    """How the logits `(vocabulary,)` that decide `position` of a text change from reading to reading.

    A verify forward reads a token together with some before it, and with candidates behind it, whatever they are: here
    the text's own continuation, and its beginning where the text ends.

    Example:
        position 20 is decided by the logits of token 19. With 3 before it and 8 behind, a first forward reads tokens
        0..15, and a second one 16..27, whose ninth logits from the end are those of token 19.
    """
    ids = torch.cat([text, text])[: position + BEHIND]
    kept = len(ids) - position + 1
    keep = {"logits_to_keep": kept} if "logits_to_keep" in signature(target.forward).parameters else {}
    whole = _extended(inputs, ids)
    for before in BEFORE:
        first = 0 if before is None else max(0, position - 1 - before)
        if first == 0:
            read = target(**whole, **keep, use_cache=False)
        elif inputs.keys() <= {"input_ids", "attention_mask"}:
            mask = whole["attention_mask"]
            state = {CACHE_KEYWORD: DynamicCache(config=target.config), "use_cache": True}
            target(input_ids=whole["input_ids"][:, :first], attention_mask=mask[:, :first], **keep, **state)
            read = target(input_ids=whole["input_ids"][:, first:], attention_mask=mask, **keep, **state)
        else:  # images and the like belong to a prompt that is read at once
            continue
        yield read.logits[0, -kept].float().to(logits.device) - logits


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
