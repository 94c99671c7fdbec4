"""The draft's side: the context kept for a target cache, and the block proposed from it."""

import contextlib
import copy
import gc
import pickle

import pytest
import torch
from families import FAMILIES
from lossless import prompt
from tiny_drafts import tiny_draft
from transformers import DynamicCache

from hf_dflash.decoding.drafting import DFlashCandidateGenerator, DraftContext, draft_context, without_autocast
from hf_dflash.target.cache import CACHE_KEYWORD
from hf_dflash.target.target import Target

WIDTH = 2 * 64


def draft_of(**options):
    return tiny_draft(hidden_size=64, vocab_size=384, **options)


def taps(n, start=0):
    return torch.arange(start, start + n, dtype=torch.float)[None, :, None].expand(1, n, WIDTH) / 10


def filled(draft, cache, num_cached=0, tokens=6):
    context = draft_context(draft, cache, num_cached, 100)
    context.extend(taps(tokens))
    return context


def test_a_context_counts_taps_that_are_not_fused_yet():
    context = DraftContext(draft_of(), first=3, max_length=50)
    context.extend(taps(4))
    context.extend(taps(2, start=4))
    assert (context.first, context.fused_end, context.end) == (3, 3, 9)
    assert context.num_bytes() == 6 * WIDTH * 4
    assert torch.equal(context.take(), taps(6))
    assert context.end == 3, "taps that were taken but not fed to the draft are gone"


def test_the_context_is_found_by_its_cache_and_its_draft():
    draft, other, cache = draft_of(), draft_of(seed=1), DynamicCache()
    context = filled(draft, cache)
    assert draft_context(draft, cache, 6, 100) is context
    assert draft_context(other, cache, 6, 100) is not context
    assert draft_context(draft, cache, 6, 100) is context, "another draft on the same cache has its own"
    assert draft_context(draft, DynamicCache(), 6, 100) is not context


def test_a_copied_cache_has_its_own_context():
    draft, cache = draft_of(), DynamicCache()
    context = filled(draft, cache)
    copied = draft_context(draft, copy.deepcopy(cache), 6, 100)
    assert copied is not context and copied.end == 6
    copied.extend(taps(1))
    assert context.end == 6


def test_a_cropped_cache_crops_the_pending_taps():
    draft, cache = draft_of(), DynamicCache()
    context = filled(draft, cache)
    assert draft_context(draft, cache, 4, 100) is context
    assert torch.equal(context.take(), taps(4))


def test_a_cache_filled_without_the_draft_gets_a_new_context():
    draft, cache = draft_of(), DynamicCache()
    filled(draft, cache)
    context = draft_context(draft, cache, 9, 100)
    assert (context.first, context.end) == (9, 9)
    assert draft_context(draft, cache, 0, 100).first == 0


def test_contexts_of_deleted_drafts_are_dropped():
    cache = DynamicCache()
    filled(draft_of(), cache)
    gc.collect()
    draft_context(draft_of(), cache, 0, 100)
    assert len(cache._dflash_contexts) == 1


def test_cropping_past_the_window_of_a_sliding_draft_gets_a_new_context():
    draft = draft_of(layer_types=["sliding_attention"] * 2, sliding_window=4)
    target, cache = FAMILIES["llama"].build(0), DynamicCache()
    plain = target.generate(prompt(12), max_new_tokens=30, do_sample=False)
    for crop_to in (None, 14, 30):
        if crop_to is not None:
            cache.crop(crop_to - cache.get_seq_length())
        ids = plain[:, : (crop_to or 11) + 1]
        options = {"max_new_tokens": 42 - ids.shape[1], "do_sample": False, "assistant_model": draft}
        assert target.generate(ids, **options, past_key_values=cache).tolist() == plain.tolist()


def test_a_block_is_proposed_from_positions_and_taps_alone():
    """The generator's block against the network called by hand: anchor at 7, masks after it, context 0..6."""
    draft, target = draft_of(block_size=4), Target(FAMILIES["llama"].build(0))
    context = DraftContext(draft, 0, 100)
    generator = DFlashCandidateGenerator(draft, target, context)
    context.extend(taps(7))
    positions = []
    handle = draft.register_forward_pre_hook(
        lambda m, a, k: positions.extend(k["position_ids"][0].tolist()), with_kwargs=True
    )
    with torch.no_grad():
        candidates = generator.propose(torch.tensor([42]), 4)
        handle.remove()
        block = torch.tensor([[42, draft.config.mask_token_id, draft.config.mask_token_id, draft.config.mask_token_id]])
        hidden = draft(
            noise_embeds=target.embed(block), context_hidden_states=taps(7), position_ids=torch.arange(11)[None]
        ).last_hidden_state
        expected = target.head(hidden[:, 1:]).argmax(-1)
    assert candidates.tolist() == expected.tolist()
    # RoPE is relative, so the candidates would not reveal a shift of all positions.
    assert positions == list(range(11))
    assert (context.fused_end, context.end) == (7, 7), "the block itself is not kept"


def test_transformers_interface():
    draft, target = draft_of(block_size=4), Target(FAMILIES["llama"].build(0))
    generator = DFlashCandidateGenerator(draft, target, DraftContext(draft, 0, 100))
    generator.context.extend(taps(8))
    with torch.no_grad():
        ids, logits = generator.get_candidates(prompt(9))
    assert ids.shape == (1, 12) and torch.equal(ids[:, :9], prompt(9)) and logits is None
    assert generator.update_candidate_strategy(ids, None, 3) is None


# Between two turns


def test_a_pickled_cache_has_no_context_and_needs_no_hf_dflash():
    draft, cache = draft_of(), DynamicCache()
    filled(draft, cache)
    pickled = pickle.dumps(cache)
    assert b"hf_dflash" not in pickled
    for _ in range(2):  # a cache that was read back can be pickled again
        read = pickle.loads(pickled)
        context = filled(draft, read, num_cached=6, tokens=2)
        assert (context.first, context.end) == (6, 8)
        pickled = pickle.dumps(read)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_turns_on_a_copied_and_on_a_pickled_cache(family, mode):
    target, cache = FAMILIES[family].build(0), DynamicCache(config=FAMILIES[family].build(0).config)
    text = target.generate(prompt(), max_new_tokens=30, do_sample=False)
    draft = draft_of()
    with mode():
        first = target.generate(
            prompt(), max_new_tokens=15, do_sample=False, assistant_model=draft, **{CACHE_KEYWORD: cache}
        )
    copies = {"deep copy": copy.deepcopy(cache), "pickle": pickle.loads(pickle.dumps(cache)), "original": cache}
    options = {"max_new_tokens": 15, "do_sample": False, "assistant_model": draft}
    for name, copied in copies.items():
        assert torch.equal(target.generate(first.clone(), **options, **{CACHE_KEYWORD: copied}), text)
        (context,) = copied._dflash_contexts
        assert (context.first > 0) == (name == "pickle"), "only a pickle starts a new context"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_a_draft_that_was_cast_between_two_turns_continues(kind, dtype):
    target = FAMILIES["llama"].build(0)
    draft, cache = draft_of(layer_types=[kind] * 2), DynamicCache(config=target.config)
    text = target.generate(prompt(), max_new_tokens=40, do_sample=False)
    options = {"do_sample": False, "assistant_model": draft, CACHE_KEYWORD: cache}
    first = target.generate(prompt(), max_new_tokens=15, **options)
    (context,) = cache._dflash_contexts
    draft.to(dtype)
    assert torch.equal(target.generate(first, max_new_tokens=25, **options), text)
    assert cache._dflash_contexts == [context] and context.first == 0, "the context was not continued"
    assert {buffer._storage.dtype for buffer in context.cache._keys + context.cache._values} == {dtype}


def test_pending_taps_follow_a_draft_that_was_moved():
    draft, cache = draft_of(), DynamicCache()
    filled(draft, cache)
    draft.to("meta")
    assert draft_context(draft, cache, 6, 100).take().device.type == "meta"


# Autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_generate_reaches_the_target_and_never_the_draft(dtype):
    target, draft, flags = FAMILIES["llama"].build(0), draft_of(), {}

    def watch(name, module):
        def note(_module, _inputs, output):
            flags.setdefault(name, set()).add((torch.is_autocast_enabled("cpu"), output.dtype))

        module.register_forward_hook(note)

    for name, module in (("draft", draft), ("target", target.model)):
        for linear in (each for each in module.modules() if isinstance(each, torch.nn.Linear)):
            watch(name, linear)
    watch("head", target.lm_head)
    with torch.autocast("cpu", dtype=dtype):
        target.generate(prompt(), max_new_tokens=12, do_sample=False, assistant_model=draft)
        assert torch.is_autocast_enabled("cpu")
    assert flags["draft"] == {(False, torch.float32)}
    assert flags["target"] == {(True, dtype)}
    assert flags["head"] == {(True, dtype), (False, torch.float32)}, "the target's own call, and the draft's"


def test_the_candidates_under_autocast_are_those_without_it():
    draft, target = draft_of(block_size=4), Target(FAMILIES["llama"].build(0))
    proposals = []
    for enabled in (False, True):
        context = DraftContext(draft, 0, 100)
        context.extend(taps(7))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
            proposals.append(DFlashCandidateGenerator(draft, target, context).propose(torch.tensor([42]), 4).tolist())
        assert context.cache._keys[0]._storage.dtype == torch.float32
    assert proposals[0] == proposals[1]


def test_autocast_is_turned_off_on_every_type_in_use(monkeypatch):
    """Simulated: autocast on CUDA, with the draft on the GPU and the target's head offloaded to the CPU."""
    entered = []
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind in ("cuda", "cpu"))

    @contextlib.contextmanager
    def autocast(kind, enabled):
        entered.append((kind, enabled))
        yield

    monkeypatch.setattr(torch, "autocast", autocast)
    with without_autocast(*map(torch.device, ("cuda:1", "cuda:0", "cpu", "meta", "mps"))):
        pass
    assert entered == [("cpu", False), ("cuda", False)]
