"""The text of one row as it is generated.

`Continuation` holds the committed ids and does what plain generate does at each token, in the same order: logits
processors, the choice (argmax or one multinomial draw), stopping criteria, streamer, recorded scores, logits, hidden
states and attentions. It receives a block's logits and candidates and returns how many tokens it committed.
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from hf_dflash.decoding.acceptance import cut_at_first, greedy_choices, matching_prefix, nan_free_prefix
from hf_dflash.draft.errors import UnsupportedOptionError
from hf_dflash.target.processes import Agreement, single_process


@dataclass
class Records:
    """Outputs kept for `return_dict_in_generate`, one entry per token as in plain generate; None if not requested."""

    scores: tuple | None = None
    logits: tuple | None = None
    hidden_states: tuple | None = None
    attentions: tuple | None = None
    _prompt_keys: list[int | None] = field(default_factory=list, repr=False)

    @classmethod
    def from_config(cls, config: GenerationConfig) -> "Records":
        """Return empty records for the outputs that the generation config requests."""
        requested = config.return_dict_in_generate
        return cls(
            scores=() if requested and config.output_scores else None,
            logits=() if requested and config.output_logits else None,
            hidden_states=() if requested and config.output_hidden_states else None,
            attentions=() if requested and config.output_attentions else None,
        )

    @property
    def per_token(self) -> bool:
        """Whether scores or logits must be recorded token by token."""
        return self.scores is not None or self.logits is not None

    def add_prefill(self, outputs: ModelOutput, windows: list[int | None]) -> None:
        """Keep the prompt's hidden states and attentions, which plain generate records for the first new token.

        Args:
            outputs: the prefill's output.
            windows: per attention layer, the sliding window in tokens, or None.
        """
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)
        if self.attentions is not None:
            _check_attentions(outputs, windows)
            self.attentions += (outputs.attentions,)
            self._prompt_keys = [None if a is None else a.shape[-1] for a in outputs.attentions]

    def add_block(self, outputs: ModelOutput, committed: int, windows: list[int | None]) -> None:
        """Keep the hidden states and attentions of the first `committed` inputs of a verified block, one entry per
        token.

        Args:
            outputs: the verify forward's output.
            committed: number of block inputs whose outputs became tokens.
            windows: per attention layer, the sliding window in tokens, or None.
        """
        if self.attentions is not None:
            _check_attentions(outputs, windows)
        for position in range(committed):
            if self.hidden_states is not None:
                self.hidden_states += (tuple(h[:, position : position + 1] for h in outputs.hidden_states),)
            if self.attentions is not None:
                layers = zip(outputs.attentions, windows, self._prompt_keys or [None] * len(windows), strict=True)
                self.attentions += (tuple(_attention_row(a, position, window, keys) for a, window, keys in layers),)


def _check_attentions(outputs: ModelOutput, windows: list[int | None]) -> None:
    """Raise if the target did not return one attention (or None) for each attention layer of its cache."""
    attentions = outputs.attentions or ()
    if len(attentions) == len(windows):
        return
    if not attentions:
        raise UnsupportedOptionError(
            "`output_attentions` was requested, but the target returns none: its attention implementation (such as "
            '"sdpa") does not compute attention weights. Load the target with attn_implementation="eager", or remove '
            "the option."
        )
    raise UnsupportedOptionError(
        f"`output_attentions` was requested, but the target returns {len(attentions)} attentions for {len(windows)} "
        "attention layers in its cache, so their windows are unknown. Remove the option."
    )


def _attention_row(
    attention: torch.Tensor | None, position: int, window: int | None, prompt_keys: int | None = None
) -> torch.Tensor | None:
    """Return the attention row that a one-token forward at `position` of the block would have returned.

    Args:
        attention: `(batch, heads, block, keys)`; the block's own keys are the last `block` columns. None if the
            attention implementation does not return weights.
        position: index of the input in the block, 0-based.
        window: sliding window in tokens, the token itself included; None for full attention.
        prompt_keys: number of keys in the prefill. Full attention that still has as many does not attend to the text
            (cross-attention to an image), so every token sees all of them.

    Example:
        block of 3 after 5 cached keys: 8 columns. Position 1 is key 6, so plain decoding would have seen columns 0..6.
        With a window of 4 it would have seen the last 4 of them: columns 3..6.
    """
    if attention is None:
        return None
    block, keys = attention.shape[-2:]
    end = keys if window is None and keys == prompt_keys else keys - block + position + 1
    start = 0 if window is None else max(0, end - window)
    return attention[:, :, position : position + 1, start:end]


class Continuation:
    """The committed ids of one row, extended exactly as plain generate would extend them.

    Args:
        input_ids: `(1, length)` the prompt, as in plain generate (empty if the prompt was given as embeddings).
        logits_processor, stopping_criteria, generation_config: as prepared by core.
        streamer: receives each committed token as a `(1,)` tensor on the CPU; core has already put the prompt.
        agree: makes the processes that share a target choose the same tokens.

    Attributes:
        ids: `(1, length)` committed ids, prompt included.
        finished: whether plain generate would have stopped here.
    """

    def __init__(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        agree: Agreement = single_process,
    ):
        self.ids = input_ids
        self.finished = False
        self.records = Records.from_config(generation_config)
        self._processors = logits_processor
        self._criteria = stopping_criteria
        self._do_sample = bool(generation_config.do_sample)
        self._streamer = streamer
        self._agree = agree
        self._max_length = stopping_criteria.max_length or generation_config.max_length
        self._eos = [c.eos_token_id for c in stopping_criteria if type(c) is EosTokenCriteria]
        # With nothing between logits and argmax, and no criterion to check token by token, decide a block at once.
        self._at_once = (
            not self._do_sample
            and len(logits_processor) == 0
            and not self.records.per_token
            and all(type(c) in (EosTokenCriteria, MaxLengthCriteria) for c in stopping_criteria)
        )

    @property
    def anchor_ids(self) -> torch.LongTensor:
        """`(1,)` the last committed token, the first input of the next block."""
        return self.ids[:, -1]

    @property
    def remaining_tokens(self) -> int:
        """Tokens that can still be committed before the maximum length."""
        return self._max_length - self.ids.shape[1]

    def accept(self, logits: torch.Tensor, candidates: torch.LongTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Commit what the target accepts of a block: the matching candidates and the bonus token, cut at the first
        stop.

        Args:
            logits: `(1, n + 1, vocabulary)` the target's raw logits after the anchor and after each candidate.
            candidates: `(1, n)` proposed ids; n = 0 right after the prompt.

        Returns:
            two `(1,)` tensors: accepted candidates, and committed tokens. Without a stop, committed = accepted + 1 (the
            bonus token). Both are 0 if the candidates made the anchor's own logits NaN (see `nan_free_prefix`); then
            the anchor must be verified without them.
        """
        if candidates.shape[1]:
            usable = int(self._agree(nan_free_prefix(logits)))
            if usable == 0:
                return torch.zeros_like(self.ids[:, 0]), torch.zeros_like(self.ids[:, 0])
            # Row i decides candidate i, and the last usable row the bonus token: 3 rows go with 2 candidates.
            logits, candidates = logits[:, :usable], candidates[:, : usable - 1]
        committed = (self._accept_at_once if self._at_once else self._accept_one_by_one)(logits, candidates)
        taken = int(committed)
        return matching_prefix(candidates[:, :taken], self.ids[:, -taken:]), committed

    def _accept_at_once(self, logits: torch.Tensor, candidates: torch.LongTensor) -> torch.LongTensor:
        """Compare all candidates with the greedy choices at once; return `(1,)` committed tokens."""
        choices = self._agree(greedy_choices(logits).to(self.ids.device))
        committed = matching_prefix(candidates, choices) + 1
        for eos in self._eos:
            committed = cut_at_first(torch.isin(choices, eos.to(choices.device)), committed)
        self._append(choices[:, : int(committed)])
        return committed

    def _accept_one_by_one(self, logits: torch.Tensor, candidates: torch.LongTensor) -> torch.LongTensor:
        """Decide position by position, exactly as plain generate would, until the first mismatch or stop."""
        committed = 0
        for position in range(logits.shape[1]):
            token = self._choose(logits[:, position])
            self._append(token[:, None])
            committed += 1
            # Logits row i decides candidate i. Example: candidates [8, 9]; row 0 chooses 8: a match, go on; row 1
            # chooses 4: 4 is the bonus token and [8, 4] is committed.
            if self.finished or position == candidates.shape[1] or token != candidates[:, position]:
                break
        return torch.full_like(self.ids[:, 0], committed)

    def _choose(self, logits: torch.Tensor) -> torch.LongTensor:
        """Choose a `(1,)` token from raw `(1, vocabulary)` logits: processors, then argmax or one multinomial draw."""
        raw = logits.to(copy=True, dtype=torch.float32, device=self.ids.device)
        scores = self._processors(self.ids, raw)
        if self.records.scores is not None:
            self.records.scores += (scores,)
        if self.records.logits is not None:
            self.records.logits += (raw,)
        if self._do_sample:
            token = torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            token = torch.argmax(scores, dim=-1)
        return self._agree(token)

    def _append(self, tokens: torch.LongTensor) -> None:
        """Commit `(1, n)` tokens: append them, check the stopping criteria, stream them one by one."""
        self.ids = torch.cat([self.ids, tokens], dim=-1)
        self.finished = bool(self._criteria(self.ids, self.records.scores).all())
        if self._streamer is not None:
            for token in tokens.cpu().unbind(dim=1):
                self._streamer.put(token)
