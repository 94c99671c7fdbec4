"""The draft networks against other implementations: the authors' `dflash` package, transformers' MuseGlimmerAssistant.

The same random weights, saved in the published layout and loaded by ours, in float32, over decoding rounds in which the
context grows and the block is cropped again. The peers are called as in their own loops.
"""

import json
from inspect import signature
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import DynamicCache, Qwen3Config
from transformers.cache_utils import DFlashCache

from hf_dflash.draft.loading import load_draft
from hf_dflash.draft.modeling_dflash import DFlash2DraftModel, DFlashDraftModel

TOLERANCE = 1e-5
HIDDEN, VOCABULARY, BLOCK, WINDOW = 64, 128, 8, 6
# Tokens committed by each round; the first is the prompt. Up to 27 of context, so windows of 6 are full.
ROUNDS = (9, 3, 1, 8, 2, 4)
# 0.02 would make attention nearly uniform and hide wrong masks; version 2 amplifies rounding errors, so it uses less.
WEIGHT_SCALE = {1: 0.2, 2: 0.07}

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
CASES = {
    "full": {"layer_types": [FULL] * 2},
    "full, yarn": {"layer_types": [FULL] * 2, "rope": YARN},
    "sliding causal": {"layer_types": [SLIDING] * 2},
    "S,S,S,S,F": {"layer_types": [SLIDING] * 4 + [FULL]},
    "sliding bidirectional": {"layer_types": [SLIDING] * 2, "is_causal": False},
    "sliding bidirectional, window below the block": {"layer_types": [SLIDING] * 2, "is_causal": False, "window": 3},
    "window above the context": {"layer_types": [SLIDING] * 2, "window": 64},
}


def randomize(model: nn.Module, scale: float) -> None:
    """Set every parameter to random values, also those that the model's initialization would leave alone."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "norm_enc.weight")):
                weight.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("base_kernel"):
                weight.normal_(std=0.5, generator=generator)
            else:
                weight.normal_(std=scale, generator=generator)


def write_checkpoint(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape and theirs.isfinite().all()
    return (ours - theirs).abs().max().item()


# ---- the authors' package ----


def authors_config(version: int, case: dict) -> dict:
    """Return a `config.json` as z-lab publishes it: layout B, or D for version 2."""
    layer_types = case["layer_types"]
    nested = {"block_size": BLOCK, "mask_token_id": VOCABULARY - 1, "target_layer_ids": [1, 3]}
    if version == 2:
        nested |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
        nested |= {"output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    config = {
        "model_type": "qwen3",
        "architectures": ["DFlash2DraftModel" if version == 2 else "DFlashDraftModel"],
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": case.get("rope", {"rope_type": "default", "rope_theta": 1e4}),
        "layer_types": layer_types,
        "use_sliding_window": SLIDING in layer_types,
        "sliding_window": case.get("window", WINDOW) if SLIDING in layer_types else None,
        "num_target_layers": 6,
        "dflash_config": nested,
    }
    return config | ({"is_causal": case["is_causal"]} if "is_causal" in case else {})


def authors_pair(tmp_path: Path, version: int, case: dict):
    """Return the authors' draft, and ours loaded from a checkpoint with its weights."""
    dflash = pytest.importorskip("dflash.model", reason="the authors' package is only used in tests")
    raw = authors_config(version, case)
    config = Qwen3Config(**raw)
    config._attn_implementation = "sdpa"
    theirs = (dflash.DFlash2DraftModel if version == 2 else dflash.DFlashDraftModel)(config).eval()
    randomize(theirs, WEIGHT_SCALE[version])
    published = {name.replace("_codebook.weight", "_codebook"): w for name, w in theirs.state_dict().items()}
    ours = load_draft(write_checkpoint(tmp_path, raw, published), dtype=torch.float32)
    assert type(ours) is (DFlash2DraftModel if version == 2 else DFlashDraftModel)
    return theirs, ours


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@torch.no_grad()
def test_equal_to_the_authors_network_round_after_round(tmp_path, version: int, case: dict):
    theirs, ours = authors_pair(tmp_path, version, case)
    their_cache = DynamicCache(config=theirs.config)
    their_cache.activate_past_recording()
    our_cache = DFlashCache(config=ours.config)
    our_cache.activate_past_recording()

    torch.manual_seed(1)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    end, proposed = 0, []
    for new in ROUNDS:
        block, taps = torch.randn(1, BLOCK, HIDDEN), torch.randn(1, new, 2 * HIDDEN)
        positions = torch.arange(end, end + new + BLOCK)[None]
        anchor = torch.randint(VOCABULARY, (1,))
        their_hidden = theirs(
            target_hidden=taps,
            noise_embedding=block,
            position_ids=positions,
            past_key_values=their_cache,
            use_cache=True,
        )
        our_hidden = ours(
            noise_embeds=block, context_hidden_states=taps, position_ids=positions, cache=our_cache
        ).last_hidden_state
        end += new
        their_cache.crop(end - their_cache.get_seq_length())
        our_cache.crop(-BLOCK)

        assert largest_difference(our_hidden, their_hidden) <= TOLERANCE
        their_logits = theirs.compute_logits(their_hidden[:, 1:], head)
        our_logits = ours.compute_logits(our_hidden[:, 1:], head)
        assert largest_difference(our_logits, their_logits) <= TOLERANCE
        assert torch.equal(our_logits.argmax(-1), their_logits.argmax(-1))
        expected = their_logits.argmax(-1)
        if version == 2:
            expected = theirs.propose(their_hidden[:, 1:], anchor, head, temperature=0.0)[0]
        assert torch.equal(ours.propose(our_hidden[:, 1:], anchor, head), expected)
        proposed += expected[0].tolist()
    assert len(set(proposed)) > 20, "a draft with constant output cannot tell two networks apart"


@torch.no_grad()
def test_the_selectors_path_is_not_the_position_by_position_argmax(tmp_path):
    """Guards the comparison of paths above: the selector must make a difference there."""
    theirs, ours = authors_pair(tmp_path, 2, CASES["full"])
    randomize(ours.candidate_selector, 1.0)
    for name in ("predecessor_codebook", "successor_codebook"):
        getattr(theirs.candidate_selector, name).weight.copy_(getattr(ours.candidate_selector, name))
    theirs.candidate_selector.hidden_projection.weight.copy_(ours.candidate_selector.hidden_projection.weight)
    torch.manual_seed(2)
    head, hidden, anchors = (
        nn.Linear(HIDDEN, VOCABULARY, bias=False),
        torch.randn(3, 7, HIDDEN),
        torch.tensor([0, 5, 99]),
    )
    path = ours.propose(hidden, anchors, head)
    assert torch.equal(path, theirs.propose(hidden, anchors, head, temperature=0.0)[0])
    assert not torch.equal(path, ours.compute_logits(hidden, head).argmax(-1))


# ---- transformers' own draft ----


def muse_pair(tmp_path: Path, layer_types: list[str], window: int):
    from transformers.models.muse_glimmer_assistant import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = MuseGlimmerAssistantConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=len(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        # In transformers' sdpa and eager masks this draft's window excludes the query (distance <= window); in its
        # flash kernels, in the authors' network and in ours it includes the query.
        sliding_window=window - 1,
        layer_types=layer_types,
        block_size=BLOCK,
        mask_token_id=VOCABULARY - 1,
        target_layer_ids=[1, 3],
    )
    theirs = MuseGlimmerAssistantModel(config).eval()
    randomize(theirs, WEIGHT_SCALE[1])
    raw = {**json.loads(config.to_json_string(use_diff=False)), "sliding_window": window}
    raw["architectures"] = ["MuseGlimmerAssistantModel"]
    return theirs, load_draft(write_checkpoint(tmp_path, raw, theirs.state_dict()), dtype=torch.float32)


@pytest.mark.parametrize(
    ("layer_types", "window"),
    [([SLIDING] * 2, 64), ([SLIDING] * 2, WINDOW), ([SLIDING] * 4 + [FULL], WINDOW)],
    ids=["window above the context", "window below the context", "S,S,S,S,F"],
)
@torch.no_grad()
def test_equal_to_transformers_muse_round_after_round(tmp_path, layer_types: list[str], window: int):
    theirs, ours = muse_pair(tmp_path, layer_types, window)
    # The peer's cache keeps as many keys as its mask may need.
    caches = [DFlashCache(config=ours.config), DFlashCache(config=ours.config)]
    for cache in caches:
        cache.activate_past_recording()

    torch.manual_seed(1)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    end = 0
    for new in ROUNDS:
        block, taps = torch.randn(1, BLOCK, HIDDEN), torch.randn(1, new, 2 * HIDDEN)
        inputs = {
            "noise_embeds": block,
            "context_hidden_states": taps,
            "position_ids": torch.arange(end, end + new + BLOCK)[None],
        }
        hidden = []
        for model, cache in zip((theirs, ours), caches, strict=True):
            cache.set_previous_accepted_tokens(new)
            # transformers before 5.24 uses the older name of the cache; our draft accepts both.
            name = "cache" if "cache" in signature(theirs.forward).parameters else "past_key_values"
            hidden.append(model(**inputs, **{name: cache}).last_hidden_state)
            cache.crop(-BLOCK)
        end += new
        assert largest_difference(hidden[1], hidden[0]) <= TOLERANCE
        assert torch.equal(head(hidden[1]).argmax(-1), head(hidden[0]).argmax(-1))
