"""Targets whose RoPE depends on the length: how many tokens a block may hold, and the text around that length."""

import sys

import pytest
import torch
import transformers
from families import DENSE, FAMILIES, FULL_AND_SLIDING, HEAD_DIM, WINDOW
from lossless import BLOCK, MODES, Pair, assert_same, assert_varied, prompt, unpadded
from oracle import all_right, none_right, oracle_draft, randomly
from packaging.version import Version
from transformers import DynamicCache

from hf_dflash import UnsupportedOptionError
from hf_dflash.decoding import loop
from hf_dflash.target import rope
from hf_dflash.target.cache import CACHE_KEYWORD
from hf_dflash.target.rope import LengthDependentRope, length_dependent_rope

ORIGINAL, NEW = 32, 40
THETA = {"rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, **THETA}


def longrope(width: int = HEAD_DIM) -> dict:
    return {
        "rope_type": "longrope",
        "short_factor": [1.0] * (width // 2),
        "long_factor": [2.0] * (width // 2),
        "original_max_position_embeddings": ORIGINAL,
        **THETA,
    }


LONG = {"max_position_embeddings": 256}
SHORT = {"max_position_embeddings": ORIGINAL}
TARGETS = {
    "dynamic": ("Llama", DENSE | SHORT | {"rope_parameters": DYNAMIC}),
    "longrope": ("Llama", DENSE | LONG | {"rope_parameters": longrope()}),
    "dynamic in some layers": (
        "Gemma3",
        DENSE
        | SHORT
        | {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": HEAD_DIM,
            "layer_types": FULL_AND_SLIDING,
            "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", **THETA}},
        },
    ),
    # Phi-3 also starts a new cache where its frequencies switch.
    "phi3": ("Phi3", DENSE | LONG | {"original_max_position_embeddings": ORIGINAL, "rope_parameters": longrope()}),
    "phi3, half rotated": (
        "Phi3",
        DENSE
        | LONG
        | {
            "original_max_position_embeddings": ORIGINAL,
            "rope_parameters": longrope(HEAD_DIM // 2) | {"partial_rotary_factor": 0.5},
        },
    ),
}
#: Before transformers 5.24, Phi-3 reads only the last token into the cache that it starts within a text.
PHI3_READS_AGAIN = Version(transformers.__version__).release >= (5, 24)


def build(name: str):
    """Build a new target: `dynamic` frequencies are kept on the model between two calls."""
    prefix, values = TARGETS[name]
    config = getattr(transformers, f"{prefix}{'Text' if prefix == 'Gemma3' else ''}Config")(**values)
    config.initializer_range = 0.4
    torch.manual_seed(0)
    return getattr(transformers, f"{prefix}ForCausalLM")(config).eval()


def both(name: str, inputs: dict, pattern, seed: int = 0, **options) -> Pair:
    """Run plain generate and the oracle, each on a target of its own."""
    target = build(name)
    torch.manual_seed(seed)
    plain = target.generate(**inputs, **options)
    sequences = plain if isinstance(plain, torch.Tensor) else plain.sequences
    mask, target, statistics = inputs.get("attention_mask"), build(name), []
    references = [unpadded(row, None if mask is None else mask[i]) for i, row in enumerate(sequences)]
    draft = oracle_draft(target, references, pattern, block_size=BLOCK)
    torch.manual_seed(seed)
    ours = target.generate(**inputs, **options, assistant_model=draft, stats=statistics.append)
    return Pair(plain, ours, statistics[0])


def ragged(*lengths: int) -> dict:
    """Left-padded prompts of these lengths."""
    ids = [prompt(n, seed=n)[0] for n in lengths]
    pad = [(max(lengths) - n, 0) for n in lengths]
    return {
        "input_ids": torch.stack([torch.nn.functional.pad(row, width) for row, width in zip(ids, pad, strict=True)]),
        "attention_mask": torch.stack(
            [torch.nn.functional.pad(torch.ones_like(row), width) for row, width in zip(ids, pad, strict=True)]
        ),
    }


# The rule


def test_a_block_ends_where_the_frequencies_switch_and_may_be_of_any_size_beyond():
    rope = LengthDependentRope(switches=frozenset({32}))
    assert [rope.block_limit(position) for position in (0, 28, 31)] == [32, 4, 1]
    assert rope.block_limit(32) == rope.block_limit(1000) == sys.maxsize and rope


def test_beyond_drifting_frequencies_a_block_has_one_token(monkeypatch):
    said = []
    monkeypatch.setattr(rope.logger, "warning_once", said.append)
    drifting = LengthDependentRope(drifts_after=32)
    assert [drifting.block_limit(position) for position in (0, 31)] == [32, 1] and not said
    assert drifting.block_limit(32) == drifting.block_limit(33) == 1
    assert "Beyond 32 tokens" in said[0] and "without the draft" in said[0]


def test_several_layer_types_have_several_switches():
    mixed = LengthDependentRope(switches=frozenset({8, 64}), drifts_after=32)
    assert [mixed.block_limit(position) for position in (0, 7, 8, 31, 32, 70)] == [8, 1, 24, 1, 1, 1]
    assert mixed.first_change == 8


@pytest.mark.parametrize("name", TARGETS)
def test_the_rule_is_read_from_the_rotary_modules(name):
    expected = (None, ORIGINAL) if "dynamic" in name else (ORIGINAL, None)
    found = length_dependent_rope(build(name))
    assert (min(found.switches, default=None), found.drifts_after) == expected


FIXED = {
    "linear": {"rope_type": "linear", "factor": 2.0, **THETA},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, **THETA},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        **THETA,
    },
}


@pytest.mark.parametrize("kind", FIXED)
def test_other_kinds_have_no_rule_and_need_none(kind, monkeypatch):
    monkeypatch.setitem(
        TARGETS, kind, ("Llama", DENSE | {"max_position_embeddings": 128, "rope_parameters": FIXED[kind]})
    )
    assert not length_dependent_rope(build(kind))
    pair = both(kind, {"inputs": prompt(28)}, all_right, max_new_tokens=NEW, do_sample=False)
    assert_same(pair)
    assert max(pair.statistics.committed) == BLOCK


@pytest.mark.parametrize("family", FAMILIES)
def test_no_rule_for_ordinary_families(family):
    assert not length_dependent_rope(FAMILIES[family].build(0))


def test_a_model_without_known_rotary_modules_is_judged_by_its_configuration():
    model = build("longrope")
    del model.model.rotary_emb.rope_type
    assert length_dependent_rope(model).switches == {ORIGINAL}
    model = build("dynamic")
    del model.model.rotary_emb.rope_type
    model.config.rope_parameters = {"type": "dynamic", "factor": 2.0}
    assert length_dependent_rope(model).drifts_after == ORIGINAL


# The text


@pytest.mark.parametrize(
    ("pattern", "mode"),
    [(all_right, "greedy"), (randomly(3, BLOCK - 1), "greedy"), (randomly(4, BLOCK - 1), "sampled")],
)
@pytest.mark.parametrize("length", [5, 28, ORIGINAL + 1, 60])
@pytest.mark.parametrize("name", TARGETS)
def test_the_text_is_plain_generates_across_the_original_length(name, length, pattern, mode):
    pair = both(name, {"inputs": prompt(length)}, pattern, max_new_tokens=NEW, **MODES[mode])
    assert_same(pair)
    if PHI3_READS_AGAIN or "phi3" not in name:
        assert_varied(pair.plain, NEW)


COMMITTED = {
    # Prompt of 5, so anchors at 5, 11, 17, 23, 29; the block there holds the 3 tokens up to the switch at 32.
    "longrope": [6, 6, 6, 6, 3, 6, 6],
    "phi3": [6, 6, 6, 6, 3, 1, 6, 5] if PHI3_READS_AGAIN else [6, 6, 6, 6, 3] + [1] * 12,
    "dynamic": [6, 6, 6, 6, 3] + [1] * 12,
}


@pytest.mark.parametrize("name", COMMITTED)
def test_blocks_end_at_the_switch_and_are_whole_beyond_it_if_they_may_be(name):
    pair = both(name, {"inputs": prompt(5)}, all_right, max_new_tokens=NEW, do_sample=False)
    assert pair.statistics.committed == COMMITTED[name]


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_without_the_rule_the_text_differs(name, monkeypatch):
    """Control: these fixtures notice a block that is rotated by its last position."""
    monkeypatch.setattr(loop, "length_dependent_rope", lambda model: LengthDependentRope())
    with pytest.raises(AssertionError):
        assert_same(both(name, {"inputs": prompt(28)}, all_right, max_new_tokens=NEW, do_sample=False))


@pytest.mark.parametrize("name", ["longrope", "dynamic", "phi3"])
def test_padding_does_not_count_for_the_frequencies(name):
    mask = torch.nn.functional.pad(torch.ones(1, 20).long(), (6, 0))
    inputs = {"input_ids": torch.nn.functional.pad(prompt(20), (6, 0)), "attention_mask": mask}
    assert_same(both(name, inputs, all_right, max_new_tokens=NEW, do_sample=False))


# Phi-3's new cache


@pytest.mark.parametrize("length", [28, 40])
@pytest.mark.parametrize("mode", MODES)
def test_the_outputs_of_a_text_with_a_new_cache(length, mode, monkeypatch):
    monkeypatch.setitem(TARGETS, "eager", (TARGETS["phi3"][0], TARGETS["phi3"][1] | {"attn_implementation": "eager"}))
    names = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    options = {"return_dict_in_generate": True, "max_new_tokens": 12, **dict.fromkeys(names, True), **MODES[mode]}
    pair = both("eager", {"inputs": prompt(length)}, randomly(4, BLOCK - 1), **options)
    assert_same(pair)
    caches = [getattr(output, CACHE_KEYWORD) for output in (pair.plain, pair.ours)]
    assert [type(layer) for layer in caches[0].layers] == [type(layer) for layer in caches[1].layers]
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    for plain, ours in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.allclose(plain.keys, ours.keys, atol=1e-3) and torch.allclose(plain.values, ours.values, atol=1e-3)


@pytest.mark.parametrize("lengths", [(9, 5, 20), (28, 9, 3), (40, 3, 3)])
def test_turns_on_one_cache_across_the_switch(lengths):
    def chat(draft_for):
        target, cache = build("phi3"), DynamicCache(config=build("phi3").config)
        ids, texts = prompt(lengths[0]), []
        for turn, more in enumerate((*lengths[1:], 0)):
            options = {"assistant_model": draft_for(target)} if draft_for else {}
            ids = target.generate(ids, max_new_tokens=10, do_sample=False, **{CACHE_KEYWORD: cache}, **options)
            texts.append(ids.tolist())
            ids = torch.cat([ids, prompt(more, seed=turn + 50)], dim=1)
        return texts

    plain = chat(None)
    assert chat(lambda target: oracle_draft(target, plain[-1], randomly(2, 7), strict=False)) == plain


def test_the_drafts_context_follows_to_the_new_cache():
    """In the next turn the draft knows the text from before the switch."""
    target, stats = build("phi3"), []
    reference = target.generate(prompt(28), max_new_tokens=30, do_sample=False)
    draft = oracle_draft(target, reference, all_right, block_size=BLOCK)
    options = {"do_sample": False, "assistant_model": draft, "return_dict_in_generate": True, "stats": stats.append}
    first = target.generate(prompt(28), max_new_tokens=15, **options)
    cache = getattr(first, CACHE_KEYWORD)
    (context,) = cache._dflash_contexts
    assert (context.first, context.end) == (0, first.sequences.shape[1] - 1)
    if PHI3_READS_AGAIN:
        second = target.generate(first.sequences, max_new_tokens=15, **{CACHE_KEYWORD: cache}, **options)
        assert second.sequences.tolist() == reference.tolist()
        assert cache._dflash_contexts == [context] and stats[1].committed[0] == BLOCK


# Batches


def test_a_ragged_batch_beyond_the_original_length_is_refused():
    draft = oracle_draft(build("longrope"), [[0] * 99] * 2, none_right, strict=False)
    options = {"do_sample": False, "assistant_model": draft}
    for name, inputs in (
        ("longrope", ragged(9, 5)),
        ("dynamic", ragged(9, 5)),
        ("dynamic", {"inputs": prompt().repeat(2, 1)}),
    ):
        with pytest.raises(UnsupportedOptionError, match=r"2 rows of up to 39 tokens.*beyond 32 tokens"):
            build(name).generate(**inputs, max_new_tokens=30, **options)


@pytest.mark.parametrize(
    ("name", "inputs", "new"),
    [
        ("longrope", {"inputs": torch.cat([prompt(seed=1), prompt(seed=2)])}, NEW),
        ("longrope", ragged(9, 5), 20),
        ("dynamic", ragged(9, 5), 20),
    ],
)
def test_batches_with_the_frequencies_of_their_rows_are_exact(name, inputs, new):
    assert_same(both(name, inputs, randomly(3, BLOCK - 1), max_new_tokens=new, do_sample=False))
