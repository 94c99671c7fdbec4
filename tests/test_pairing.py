"""A target whose vocabulary was padded, extended or cut after its draft was trained: it is taken, and ids beyond the
smaller of the two vocabularies are never proposed.
"""

import pytest
import torch
from families import FAMILIES
from lossless import prompt
from tiny_drafts import tiny_config, tiny_draft
from torch import nn
from transformers import Qwen3Config

from hf_dflash import compare
from hf_dflash.draft.errors import PairingError
from hf_dflash.draft.loading import TargetFacts, check_pairing, pairing_problems, pairing_warnings

VOCABULARY = 384
DRAFTS = {
    "version 1": {},
    "version 2": {"version": 2},
    "own embeddings": {"own_embeddings": True},
    "version 2, own embeddings": {"version": 2, "own_embeddings": True},
    "own head": {"draft_vocab_size": 64},
    "own embeddings, own full head": {"own_embeddings": True, "draft_vocab_size": VOCABULARY},
}


def draft_of(kind: str):
    draft = tiny_draft(vocab_size=VOCABULARY, target_vocab_size=VOCABULARY, mask_token_id=310, **DRAFTS[kind])
    if draft.config.draft_vocab_size == VOCABULARY:
        draft.d2t.zero_()
    return draft


def proposals_of(draft) -> list[int]:
    """Return the list that every later proposal of a draft is added to."""
    proposed: list[int] = []
    propose = draft.propose

    def recording(*arguments):
        candidates = propose(*arguments)
        proposed.extend(candidates.flatten().tolist())
        return candidates

    draft.propose = recording
    return proposed


def facts(vocab_size: int) -> TargetFacts:
    return TargetFacts("the/target", 64, vocab_size, 6, vocab_size)


@pytest.mark.parametrize(
    ("trained", "found"),
    [
        # (vocabulary of the draft, vocabulary of the target): padded to 64, one token added and padded, cut to the
        # tokenizer's tokens and padded.
        (151669, 151680),
        (128256, 128320),
        (151936, 151680),
        (151680, 151936),
        (128256, 128257),
        (128, 192),
        (384, 448),
    ],
)
def test_sizes_of_a_padded_vocabulary_pair_with_a_warning(trained, found):
    config = tiny_config(vocab_size=trained, mask_token_id=100)
    assert pairing_problems(config, facts(found)) == []
    (text,) = pairing_warnings(config, facts(found))
    assert f"vocabulary of {trained}, the target has one of {found}" in text
    assert f"ids from {min(trained, found)} on are never proposed" in text
    with pytest.warns(UserWarning, match="taken for padding"):
        check_pairing(config, facts(found))


@pytest.mark.parametrize(
    ("trained", "found"), [(128, 256), (64, 128), (128, 7), (32000, 32768), (151936, 128256), (151936, 248320)]
)
def test_sizes_of_another_vocabulary_do_not_pair(trained, found):
    with pytest.raises(PairingError, match=f"a vocabulary of {trained}, the/target has one of {found}"):
        check_pairing(tiny_config(vocab_size=trained, mask_token_id=5), facts(found))


def test_equal_vocabularies_pair_without_a_warning():
    config = Qwen3Config(hidden_size=64, vocab_size=128, num_hidden_layers=6)
    assert pairing_warnings(tiny_config(target_vocab_size=128), TargetFacts.of_config("the/target", config)) == []


@pytest.mark.parametrize("version", [1, 2])
def test_the_padding_of_a_head_is_never_proposed(version):
    draft = tiny_draft(version)
    head = nn.Linear(64, 192, bias=False)
    with torch.no_grad():
        head.weight[128:] *= 100
    hidden = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0))
    assert (head(hidden).argmax(-1) >= 128).all(), "this head cannot show whether its padding is left out"
    cut = nn.Linear(64, 128, bias=False)
    cut.weight.data.copy_(head.weight[:128])
    anchors = torch.tensor([5, 127])
    assert torch.equal(draft.propose(hidden, anchors, head), draft.propose(hidden, anchors, cut))
    # An anchor that is itself padding has no row in the draft's tables.
    assert draft.propose(hidden, torch.tensor([128, 191]), head).max() < 128


def test_a_token_beyond_the_own_embeddings_is_embedded_as_the_mask_token():
    draft = tiny_draft(own_embeddings=True)
    embedded = draft.embed(torch.tensor([[127, 128, 500, 0]]), nn.Embedding(512, 64))
    assert torch.equal(embedded[0], draft.embed_tokens.weight[[127, 127, 127, 0]])
    assert draft.config.mask_token_id == 127


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_padded_target_gives_the_same_text(kind):
    target = FAMILIES["qwen3"].build(0)
    target.resize_token_embeddings(VOCABULARY + 1, pad_to_multiple_of=64)
    assert target.config.vocab_size == VOCABULARY + 64
    with torch.no_grad():
        # The new tokens are often the most probable ones, in the draft's proposals too.
        target.get_output_embeddings().weight[VOCABULARY:] = 2 * target.get_output_embeddings().weight[20:84]
    draft = draft_of(kind)
    proposed = proposals_of(draft)
    ids = prompt()
    text = target.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
    assert len(set((text[text >= VOCABULARY]).tolist())) > 2, "no anchor is beyond the draft's vocabulary"
    for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        with pytest.warns(UserWarning, match="taken for padding"):
            result = compare(target, draft, ids, max_new_tokens=40, **sampling)
        assert result.same
    assert len(proposed) > 80 and max(proposed) < VOCABULARY


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_cut_target_gives_the_same_text(kind):
    target = FAMILIES["qwen3"].build(0)
    target.resize_token_embeddings(310, pad_to_multiple_of=64)
    assert target.config.vocab_size == VOCABULARY - 64
    draft = draft_of(kind)
    if draft.lm_head is not None:
        with torch.no_grad():
            # The draft's own head prefers tokens that the target no longer has.
            draft.lm_head.weight[-40:] *= 100
    with pytest.warns(UserWarning, match="taken for padding"):
        result = compare(target, draft, prompt(), max_new_tokens=40, do_sample=False)
    assert result.same
