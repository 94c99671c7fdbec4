"""Checks whether a draft changed the text, and if so, whether rounding explains it.

Finds the first difference of two texts, the margin of the target's choice there, and a bound on its rounding error.

The rule: a forward over several tokens sums in a different order than one-token forwards, so if the target's top two
choices are closer than the rounding error, either may win. The error is measured, not assumed: the target runs over the
text around the difference again, without any draft, several tokens at a time, and the largest change of a logit is its
rounding error there. Both logits of a pair may move by that much, so the bound is twice it, and at least one step of
the target's dtype at the chosen logit.
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

#: Options of `generate` that are only valid with a draft.
DRAFT_OPTIONS = ("block_size", "num_assistant_tokens", "stats", "trace")
#: Tokens that share the last forward with the one being checked: how many before it (None: all), and how many after.
BEFORE = (None, 0, 3, 7)
AFTER = 8


@dataclass(frozen=True)
class Comparison:
    """Two texts, token by token.

    Attributes:
        length: new tokens of the longer text.
        dtype: the target's dtype, such as "bfloat16".
        first_difference: index (0-based) of the first new token that differs; None if the texts are the same.
        margin: gap between plain generate's token there and the runner-up: a difference of scores (logits after the
            logits processors), for a sampled token with the noise of the draw added. None if the texts are the same,
            if one only stopped earlier, or if the target does not reproduce its own text.
        bound: twice the largest change of a score there between forwards of the target; None if `margin` is.
        within_tolerance: whether rounding explains the difference: `margin <= bound`, or one of the target's other
            forwards would have chosen the other text's token.
    """

    length: int
    dtype: str
    first_difference: int | None = None
    margin: float | None = None
    bound: float | None = None
    within_tolerance: bool = False

    @property
    def same(self) -> bool:
        """Whether the texts are identical, token for token."""
        return self.first_difference is None


def compare(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    inputs: Mapping[str, torch.Tensor] | torch.LongTensor,
    *,
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """Decode one prompt with and without the draft, from the same seed, and compare the texts.

    Args:
        target, draft: the pair.
        inputs: one prompt: the tokenizer's output, or `(1, length)` ids without padding.
        seed: seed of both runs; the global random state is left unchanged.
        options: options of `generate` for both runs. Do not pass objects that keep state between calls.

    Raises:
        UnsupportedOptionError: several prompts, or several answers to one prompt.
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
            f"`compare` takes one prompt and one answer, but got {plain.shape[0]} texts. Call it once per prompt, "
            "without `num_return_sequences`."
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
        target: the model that generated both.
        inputs: the prompt: `input_ids` `(1, length)`, `attention_mask` and any other model inputs.
        plain, other: `(length,)` ids, prompt included.
        seed, options: those with which plain generate produced its text.
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
    winners = {choice.winner_after(change) for change in changes}
    explained = choice.margin <= bound or int(other[position]) in winners
    return Comparison(length, dtype, position - prompt_length, choice.margin, bound, explained)


@dataclass(frozen=True)
class _Choice:
    """How plain generate chose a token.

    Attributes:
        token: the chosen token.
        logits, scores: `(vocabulary,)` in float32, before and after the logits processors.
        noise: `(vocabulary,)` noise that a draw adds to the scores before the argmax; zeros for greedy decoding.
        scale: change of a score per change of its logit: 1 / temperature.
    """

    token: int
    logits: torch.Tensor
    scores: torch.Tensor
    noise: torch.Tensor
    scale: float

    @property
    def margin(self) -> float:
        """Gap between the winner and the runner-up."""
        best, second = (self.scores + self.noise).topk(2).values.tolist()
        return best - second

    def winner_after(self, change: torch.Tensor) -> int:
        """Return the token that would be chosen if the scores changed by `change`."""
        return int((self.scores + change + self.noise).argmax())


class _RandomState(LogitsProcessor):
    """Saves the random state before each draw; returns the scores unchanged."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        on_cpu = scores.device.type == "cpu"
        self.state = torch.get_rng_state() if on_cpu else torch.cuda.get_rng_state(scores.device)
        return scores

    def draw(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the noise of the draw from the saved state.

        `torch.multinomial` of one token is an exponential race: the largest p / q wins, with q exponential, so on a log
        scale the noise is -log q.
        """
        generator = torch.Generator(scores.device)
        generator.set_state(self.state)
        return -torch.empty_like(scores).exponential_(1, generator=generator).log()


def _choice_after(target: PreTrainedModel, inputs: Mapping[str, Any], count: int, options: dict[str, Any]) -> _Choice:
    """Return plain generate's choice of the `count`-th new token."""
    state = _RandomState()
    kwargs = {name: value for name, value in options.items() if name not in ("max_length", "streamer")}
    kwargs |= {"max_new_tokens": count, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    kwargs["logits_processor"] = LogitsProcessorList([*(options.get("logits_processor") or []), state])
    output = target.generate(**inputs, **kwargs)
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
    """Yield how the logits `(vocabulary,)` that decide `position` of a text change from forward to forward.

    A verify forward processes a token together with some before it and with arbitrary candidates after it: here the
    text's own continuation, wrapping around to its start at the end of the text.

    Example:
        position 20 is decided by the logits of token 19. With 3 tokens before it and 8 after, a first forward runs over
        tokens 0..15 and a second over 16..27, whose ninth logits from the end are those of token 19.
    """
    ids = torch.cat([text, text])[: position + AFTER]
    kept = len(ids) - position + 1
    keep = {"logits_to_keep": kept} if "logits_to_keep" in signature(target.forward).parameters else {}
    whole = _extended(inputs, ids)
    for before in BEFORE:
        first = 0 if before is None else max(0, position - 1 - before)
        if first == 0:
            outputs = target(**whole, **keep, use_cache=False)
        elif inputs.keys() <= {"input_ids", "attention_mask"}:
            mask = whole["attention_mask"]
            state = {CACHE_KEYWORD: DynamicCache(config=target.config), "use_cache": True}
            target(input_ids=whole["input_ids"][:, :first], attention_mask=mask[:, :first], **keep, **state)
            outputs = target(input_ids=whole["input_ids"][:, first:], attention_mask=mask, **keep, **state)
        else:  # a prompt with images and the like cannot be split
            continue
        yield outputs.logits[0, -kept].float().to(logits.device) - logits


def _extended(inputs: Mapping[str, Any], ids: torch.LongTensor) -> dict[str, Any]:
    """Return the inputs with the prompt extended to the text `(length,)`: real tokens of token type 0 after it."""
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
    """Return the devices, other than the CPU, whose random state a run uses."""
    return [target.device] if target.device.type == "cuda" else []
