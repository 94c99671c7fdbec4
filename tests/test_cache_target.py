"""Entering and leaving a `TargetCache`: which layer objects it holds, their state, and what is refused."""

import threading

import pytest
import torch
from families import FAMILIES
from rollback import cycle, decode_plainly, forward, largest_differences, read_in_blocks, states
from transformers import DynamicCache, StaticCache, cache_utils
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from hf_dflash.draft.errors import UnsupportedOptionError, UnsupportedTargetError
from hf_dflash.target.cache import TargetCache
from hf_dflash.target.cache.block_layer import LayerPlan
from hf_dflash.target.cache.sliding import SlidingAttentionLayer

PROMPT = torch.arange(20, 31)[None]
KINDS = ["llama", "mistral", "gemma3", "gemma4", "qwen3_5", "lfm2", "falcon_h1", "kimi_linear", "mamba2"]
#: fp32 rounding, amplified by random weights. A state of another position differs by its own magnitude, 1 to 20.
CLOSE = 2e-3


@pytest.fixture(scope="module")
def models():
    return {name: FAMILIES[name].build(0) for name in KINDS}


def plain_cache(model, ids) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    forward(model, ids, cache)
    return cache


def assert_same_states(one: DynamicCache, other: DynamicCache) -> None:
    assert max(largest_differences(one, other).values()) < CLOSE


def hooks_of(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("name", KINDS)
class TestRestoring:
    def test_plain_decoding_continues_on_the_restored_cache(self, models, name):
        model = models[name]
        text, logits = decode_plainly(model, PROMPT, 24)
        _, cache = read_in_blocks(model, text[:, :24], PROMPT.shape[1], 8, cycle([3, 8, 1]))
        outputs = forward(model, text[:, 23:24], cache)[:, -1]
        assert (outputs - logits[24 - PROMPT.shape[1]]).abs().max() < CLOSE * 5

    def test_the_same_layer_objects_are_in_the_same_list(self, models, name):
        model = models[name]
        cache = DynamicCache(config=model.config)
        layers, members = cache.layers, list(cache.layers)
        with TargetCache(cache, model, max_length=40, block_size=4):
            forward(model, PROMPT, cache)
        assert cache.layers is layers and all(a is b for a, b in zip(layers, members, strict=True))
        assert_same_states(cache, plain_cache(model, PROMPT))

    def test_a_filled_cache_is_continued_and_its_tensors_are_not_written(self, models, name):
        model = models[name]
        text, logits = decode_plainly(model, PROMPT, 12)
        cache = plain_cache(model, PROMPT)
        tensors = [state for _, state in states(cache)]
        copies = [state.clone() for state in tensors]
        with TargetCache(cache, model, max_length=60, block_size=8) as target_cache:
            target_cache.begin_block()
            block = torch.cat([text[:, 11:14], torch.full((1, 5), 7)], dim=1)
            outputs = forward(model, block, cache)[0, :3]
            target_cache.commit(torch.tensor([3]), 8)
        assert (outputs - logits[1:4]).abs().max() < CLOSE * 5
        assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
        assert_same_states(cache, plain_cache(model, text[:, :14]))

    @pytest.mark.parametrize("length", [1, 8])
    def test_an_exception_in_a_round_leaves_the_last_committed_state(self, models, name, length):
        model = models[name]
        cache = DynamicCache(config=model.config)
        with pytest.raises(KeyError), TargetCache(cache, model, max_length=60, block_size=8) as target_cache:
            forward(model, PROMPT, cache)
            target_cache.begin_block()
            forward(model, torch.arange(7, 7 + length)[None], cache)
            raise KeyError
        assert_same_states(cache, plain_cache(model, PROMPT))
        assert hooks_of(model) == 0

    def test_an_exception_inside_a_forward_leaves_the_last_committed_state(self, models, name):
        model = models[name]
        cache = DynamicCache(config=model.config)
        with pytest.raises(ZeroDivisionError), TargetCache(cache, model, max_length=60, block_size=8) as target_cache:
            forward(model, PROMPT, cache)
            target_cache.begin_block()
            self.fail_in_a_forward(model, torch.arange(7, 15)[None], cache)
        assert_same_states(cache, plain_cache(model, PROMPT))

    def test_a_prompt_that_fails_midway_leaves_the_cache_unchanged(self, models, name):
        model = models[name]
        cache = plain_cache(model, PROMPT)
        with pytest.raises(ZeroDivisionError), TargetCache(cache, model, max_length=60, block_size=4):
            self.fail_in_a_forward(model, torch.arange(7, 47)[None], cache)
        assert_same_states(cache, plain_cache(model, PROMPT))

    def test_a_first_prompt_that_fails_midway_leaves_an_empty_cache(self, models, name):
        model = models[name]
        cache = DynamicCache(config=model.config)
        with pytest.raises(ZeroDivisionError), TargetCache(cache, model, max_length=60, block_size=4):
            self.fail_in_a_forward(model, torch.arange(7, 47)[None], cache)
        forward(model, PROMPT, cache)
        assert_same_states(cache, plain_cache(model, PROMPT))

    def test_an_interrupted_commit_is_completed(self, models, name):
        model = models[name]
        text, _ = decode_plainly(model, PROMPT, 8)
        cache = DynamicCache(config=model.config)
        with pytest.raises(KeyboardInterrupt), TargetCache(cache, model, max_length=60, block_size=8) as target_cache:
            forward(model, PROMPT, cache)
            target_cache.begin_block()
            forward(model, torch.cat([text[:, 11:14], torch.full((1, 5), 7)], dim=1), cache)
            last = target_cache._block_layers[-1]
            last.commit = self.interrupt
            try:
                target_cache.commit(torch.tensor([3]), 8)
            finally:
                del last.commit
        assert_same_states(cache, plain_cache(model, text[:, :14]))

    def fail_in_a_forward(self, model, ids, cache) -> None:
        """Run a forward whose third layer raises, after two layers have read the tokens."""
        stop = model.get_decoder().layers[2].register_forward_pre_hook(self.fail)
        try:
            forward(model, ids, cache)
        finally:
            stop.remove()

    @staticmethod
    def fail(*_):
        raise ZeroDivisionError

    @staticmethod
    def interrupt(*_):
        raise KeyboardInterrupt


class TestLazyCaches:
    def test_a_cache_without_config_is_filled_and_stays_lazy(self, models):
        model = models["gemma3"]
        cache = DynamicCache()
        with TargetCache(cache, model, max_length=60, block_size=8) as target_cache:
            outputs = forward(model, PROMPT, cache)
            target_cache.begin_block()
            forward(model, torch.full((1, 8), 9), cache)
            target_cache.commit(torch.tensor([2]), 8)
        assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 4
        assert cache.get_seq_length() == PROMPT.shape[1] + 2
        assert torch.allclose(outputs, forward(model, PROMPT, DynamicCache()), atol=1e-4)

    def test_no_layer_remains_that_the_model_never_wrote(self, models):
        cache = DynamicCache()
        with TargetCache(cache, models["gemma4"], max_length=60, block_size=8):
            pass
        assert cache.layers == []

    def test_a_recurrent_target_needs_a_cache_with_config(self, models):
        with pytest.raises(UnsupportedTargetError, match=r"4 DynamicLayer, but .*3 LinearAttentionLayer"):
            TargetCache(DynamicCache(), models["qwen3_5"], max_length=60, block_size=8)


class UnknownLayer(DynamicLayer):
    """An unknown layer kind."""


class TestRefusals:
    def test_a_static_cache(self, models):
        model = models["llama"]
        with pytest.raises(UnsupportedOptionError, match="static cache"):
            TargetCache(StaticCache(config=model.config, max_cache_len=64), model, max_length=60, block_size=8)

    def test_an_offloaded_cache(self, models):
        cache = DynamicCache(config=models["llama"].config)
        cache.offloading = True
        with pytest.raises(UnsupportedOptionError, match="offloaded"):
            TargetCache(cache, models["llama"], max_length=60, block_size=8)

    def test_another_kind_of_cache(self, models):
        cache = cache_utils.EncoderDecoderCache(DynamicCache(), DynamicCache())
        with pytest.raises(UnsupportedOptionError, match="EncoderDecoderCache"):
            TargetCache(cache, models["llama"], max_length=60, block_size=8)

    @pytest.mark.parametrize("layer", [UnknownLayer(), DynamicIndexedLayer()])
    def test_an_unknown_layer_is_named_with_its_index(self, models, layer):
        cache = DynamicCache(config=models["llama"].config)
        cache.layers[2] = layer
        with pytest.raises(UnsupportedTargetError, match=f"Layer 2 .* is a {type(layer).__name__}"):
            TargetCache(cache, models["llama"], max_length=60, block_size=8)

    def test_the_cache_of_a_shallower_model(self, models):
        cache = DynamicCache(config=models["llama"].config)
        del cache.layers[3]
        with pytest.raises(UnsupportedTargetError, match="3 DynamicLayer, but .* needs 4 DynamicLayer"):
            TargetCache(cache, models["llama"], max_length=60, block_size=8)

    def test_a_recurrent_layer_whose_module_is_not_found(self, models):
        model = FAMILIES["qwen3_5"].build(0)
        model.model.layers[1].linear_attn.layer_idx = None
        with pytest.raises(UnsupportedTargetError, match="Layer 1 .* has no module that was recognized as its owner"):
            TargetCache(DynamicCache(config=model.config), model, max_length=60, block_size=8)

    def test_the_checks_do_not_change_the_random_state(self, models):
        before = torch.get_rng_state()
        TargetCache(DynamicCache(config=models["qwen3_5"].config), models["qwen3_5"], max_length=60, block_size=8)
        assert torch.equal(before, torch.get_rng_state())

    @pytest.mark.parametrize("kept", [[0], [9], [3, 9]])
    def test_more_or_less_than_was_verified(self, models, kept):
        cache = DynamicCache(config=models["llama"].config)
        with TargetCache(cache, models["llama"], max_length=60, block_size=8) as target_cache:
            forward(models["llama"], PROMPT.expand(len(kept), -1), cache)
            with pytest.raises(UnsupportedOptionError, match="must be in 1..8"):
                target_cache.commit(torch.tensor(kept), 8)

    def test_rows_of_different_lengths_in_an_attention_layer(self, models):
        cache = DynamicCache(config=models["llama"].config)
        with TargetCache(cache, models["llama"], max_length=60, block_size=8) as target_cache:
            forward(models["llama"], PROMPT.expand(2, -1), cache)
            target_cache.begin_block()
            forward(models["llama"], PROMPT[:, :8].expand(2, -1), cache)
            with pytest.raises(UnsupportedOptionError, match=r"different numbers of tokens \(\[2, 3\]\)"):
                target_cache.commit(torch.tensor([2, 3]), 8)
            target_cache.commit(torch.tensor([2, 2]), 8)
        assert cache.get_seq_length() == PROMPT.shape[1] + 2


class TestSlidingLayers:
    @pytest.mark.parametrize("window", [1, 2, 5, 64])
    def test_returns_what_the_original_returns(self, window):
        reference = DynamicSlidingWindowLayer(sliding_window=window) if window > 1 else None
        layer = SlidingAttentionLayer(DynamicSlidingWindowLayer(sliding_window=window), LayerPlan(900, 8, None, None))
        all_entries: list[int] = []
        for new in [3, 1, 30, 8, 8, 1, 5, 100, 8, 2] + [8] * 40:
            fed = torch.arange(len(all_entries), len(all_entries) + new, dtype=torch.float32).view(1, 1, -1, 1)
            all_entries += range(len(all_entries), len(all_entries) + new)
            assert reference is None or layer.get_mask_sizes(new) == reference.get_mask_sizes(new)
            keys, values = layer.update(fed, -fed)
            assert [int(value) for value in keys.flatten()] == all_entries[-(window - 1 + new) :]
            assert torch.equal(values, -keys)
            if reference is not None:
                assert torch.equal(keys, reference.update(fed, -fed)[0])
                assert torch.equal(layer.keys, reference.keys)
            layer.begin_block()
            # A block that is rolled back entirely leaves no trace.
            layer.update(torch.full((1, 1, 8, 1), -1.0), torch.full((1, 1, 8, 1), -1.0))
            layer.roll_back()
            assert layer.get_seq_length() == len(all_entries)


def test_two_threads_on_one_model_do_not_disturb_each_other(models):
    model = models["qwen3_5"]
    prompts = [torch.arange(20 + 7 * i, 31 + 7 * i)[None] for i in range(4)]
    texts = [decode_plainly(model, prompt, 24) for prompt in prompts]
    results: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        # Different block sizes and patterns, so the threads enter and leave in any order.
        text, _ = texts[number]
        results[number], _ = read_in_blocks(model, text, 11, 4 + number, cycle([1 + number, 2]))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (_, logits) in enumerate(texts):
        assert (results[number] - logits).abs().max() < CLOSE * 5
    assert hooks_of(model) == 0


def test_interleaved_generations_in_one_thread_leave_in_any_order(models):
    model = models["qwen3_5"]
    (one, logits), (two, others) = (decode_plainly(model, PROMPT + shift, 12) for shift in (0, 40))
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    first = TargetCache(caches[0], model, max_length=60, block_size=4)
    second = TargetCache(caches[1], model, max_length=60, block_size=4)
    first.__enter__(), second.__enter__()
    outputs: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    forward(model, PROMPT, caches[0]), forward(model, PROMPT + 40, caches[1])
    for position in range(11, 19, 2):
        for number, (owner, text) in enumerate(((first, one), (second, two))):
            owner.begin_block()
            block = torch.cat([text[:, position : position + 2], torch.full((1, 2), 5)], dim=1)
            outputs[number].append(forward(model, block, caches[number])[0, :2])
            owner.commit(torch.tensor([2]), 4)
    first.__exit__(None, None, None)
    assert hooks_of(model) > 0
    second.__exit__(None, None, None)
    assert hooks_of(model) == 0
    assert (torch.cat(outputs[0]) - logits[1:9]).abs().max() < CLOSE * 5
    assert (torch.cat(outputs[1]) - others[1:9]).abs().max() < CLOSE * 5


class TestReplacedCaches:
    """A target that starts another cache within a call."""

    def test_the_same_cache_or_none_changes_nothing(self, models):
        cache = DynamicCache(config=models["llama"].config)
        with TargetCache(cache, models["llama"], max_length=60, block_size=8) as target_cache:
            forward(models["llama"], PROMPT, cache)
            layers = cache.layers
            assert not target_cache.replaced_by(cache, 8) and not target_cache.replaced_by(None, 8)
            assert cache.layers is layers and target_cache.cache is cache

    @pytest.mark.parametrize("name", KINDS)
    def test_decoding_continues_on_the_new_cache(self, models, name):
        """The old cache keeps what was committed, and the new one is rolled back to what is accepted."""
        model = models[name]
        text, logits = decode_plainly(model, PROMPT, 20)
        old = plain_cache(model, PROMPT[:, :4])
        old_layers = list(old.layers)
        with TargetCache(old, model, max_length=60, block_size=8) as target_cache:
            target_cache.begin_block()
            new = plain_cache(model, text[:, :12])
            assert target_cache.replaced_by(new, 1) and target_cache.cache is new
            assert old.layers == old_layers
            target_cache.begin_block()
            block = torch.cat([text[:, 12:15], torch.full((1, 5), 7)], dim=1)
            outputs = forward(model, block, new)[0, :3]
            target_cache.commit(torch.tensor([3]), 8)
        assert (outputs - logits[2:5]).abs().max() < CLOSE * 5
        assert_same_states(new, plain_cache(model, text[:, :15]))
        assert_same_states(old, plain_cache(model, PROMPT[:, :4]))
        assert hooks_of(model) == 0

    def test_a_block_in_another_cache_is_refused(self, models):
        model = models["llama"]
        cache = DynamicCache(config=model.config)
        with (
            pytest.raises(UnsupportedTargetError, match=r"block of 8 tokens into another cache \(a DynamicCache\)"),
            TargetCache(cache, model, max_length=60, block_size=8) as target_cache,
        ):
            forward(model, PROMPT, cache)
            target_cache.begin_block()
            target_cache.replaced_by(plain_cache(model, PROMPT), 8)
        assert_same_states(cache, plain_cache(model, PROMPT))

    def test_a_new_cache_of_another_kind_is_refused_and_the_old_one_restored(self, models):
        model = models["llama"]
        cache = DynamicCache(config=model.config)
        with (
            pytest.raises(UnsupportedOptionError, match="static cache"),
            TargetCache(cache, model, max_length=60, block_size=8) as target_cache,
        ):
            forward(model, PROMPT, cache)
            target_cache.replaced_by(StaticCache(config=model.config, max_cache_len=64), 1)
        assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 4
