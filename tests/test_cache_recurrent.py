"""Replay of recurrent states: closed forms compared with the recurrences, ragged rows, trust, the fallback."""

import threading

import pytest
import torch
from families import FAMILIES
from rollback import cycle, decode_plainly, forward, read_in_blocks
from torch import nn
from transformers import DynamicCache

from hf_dflash.target.cache import TargetCache, mixers, replay_group
from hf_dflash.target.cache.convolution import ConvolutionInputs, StackedConvolution
from hf_dflash.target.cache.delta_rule import DeltaReplay, advance_delta_states
from hf_dflash.target.cache.mixers import mixers_by_layer
from hf_dflash.target.cache.reading import Reading
from hf_dflash.target.cache.recurrent import RecurrentLayer
from hf_dflash.target.cache.replay import OutputRecorder
from hf_dflash.target.cache.state_space import StateSpaceReplay, advance_state_spaces

LAYERS, BATCH, HEADS, TOKENS, KEY, VALUE = 2, 3, 4, 9, 8, 6
PROMPT = torch.arange(20, 31)[None]
REPLAYED = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "mamba2", "bamba", "falcon_h1"]
CLOSE = 1e-2


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def delta_step(state, key, value, log_decay, beta):
    """One token of the delta rule, by its definition."""
    state = state * log_decay.exp().unsqueeze(-1)
    recalled = torch.einsum("bhkv,bhk->bhv", state, key)
    return state + torch.einsum("bhk,bhv->bhkv", key, beta * (value - recalled))


@pytest.mark.parametrize("channels", [1, KEY])
@pytest.mark.parametrize("strength", [0.1, 30.0])
def test_the_delta_rule_in_closed_form_equals_its_steps(channels, strength):
    """Even if the decay is so strong that nothing of the old state is left."""
    states = [torch.randn(BATCH, HEADS, KEY, VALUE) for _ in range(LAYERS)]
    keys = nn.functional.normalize(torch.randn(LAYERS, BATCH, HEADS, TOKENS, KEY), dim=-1)
    values = torch.randn(LAYERS, BATCH, HEADS, TOKENS, VALUE)
    log_decay = -strength * torch.rand(LAYERS, BATCH, HEADS, TOKENS, channels)
    beta = torch.rand(LAYERS, BATCH, HEADS, TOKENS, 1)
    results = [torch.empty_like(state) for state in states]
    advance_delta_states(states, keys, values, log_decay, beta, results)
    for layer, state in enumerate(states):
        for token in range(TOKENS):
            state = delta_step(state, *(tensor[layer, :, :, token] for tensor in (keys, values, log_decay, beta)))
        assert torch.allclose(results[layer], state, atol=1e-5)


def test_a_token_without_decay_and_strength_leaves_the_state_unchanged():
    states, results = [torch.randn(1, HEADS, KEY, VALUE)], [torch.empty(1, HEADS, KEY, VALUE)]
    keys = nn.functional.normalize(torch.randn(1, 1, HEADS, 3, KEY), dim=-1)
    zeros = torch.zeros(1, 1, HEADS, 3, 1)
    advance_delta_states(states, keys, torch.randn(1, 1, HEADS, 3, VALUE), zeros, zeros, results)
    assert torch.equal(results[0], states[0])


def test_the_state_space_in_closed_form_equals_its_steps():
    groups = 2
    states = [torch.randn(BATCH, HEADS, KEY, VALUE) for _ in range(LAYERS)]
    inputs = torch.randn(LAYERS, BATCH, TOKENS, HEADS, KEY)
    directions = torch.randn(LAYERS, BATCH, TOKENS, groups, VALUE)
    log_decay = -torch.rand(LAYERS, BATCH, TOKENS, HEADS)
    results = [torch.empty_like(state) for state in states]
    advance_state_spaces(states, inputs, directions, log_decay, results)
    per_head = directions.repeat_interleave(HEADS // groups, dim=3)
    for layer, state in enumerate(states):
        for token in range(TOKENS):
            arriving = torch.einsum("bhp,bhn->bhpn", inputs[layer, :, token], per_head[layer, :, token])
            state = state * log_decay[layer, :, token].exp()[..., None, None] + arriving
        assert torch.allclose(results[layer], state, atol=1e-5)


class TestConvolution:
    def test_the_state_after_a_prefix(self):
        inputs = torch.arange(7.0).expand(2, 3, 7)
        recorded = ConvolutionInputs(inputs, tokens=3, width=4)
        assert recorded.state_after([2, 2])[0, 0].tolist() == [2, 3, 4, 5]
        ragged = recorded.state_after([1, 3])
        assert ragged[0, 0].tolist() == [1, 2, 3, 4]
        assert ragged[1, 0].tolist() == [3, 4, 5, 6]

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("past", [0, 2, 4])
    def test_several_convolutions_at_once(self, past, bias):
        convolutions = [nn.Conv1d(6, 6, 4, groups=6, padding=3, bias=bias) for _ in range(LAYERS)]
        recorded = [ConvolutionInputs(torch.randn(BATCH, 6, past + 5), 5, 4) for _ in range(LAYERS)]
        outputs = StackedConvolution(convolutions, "silu", first_channel=2)(recorded, 3)
        for layer, (convolution, inputs) in enumerate(zip(convolutions, recorded, strict=True)):
            whole = nn.functional.silu(convolution(inputs.inputs)[..., : past + 5]).transpose(1, 2)
            assert torch.allclose(outputs[:, :, layer], whole[:, past : past + 3, 2:], atol=1e-6)


def commit_once(model, prompts, blocks, kept, commit=None):
    """Prefill, read one block and commit; return the still entered `TargetCache` and its recurrent layers."""
    cache = DynamicCache(config=model.config)
    target_cache = TargetCache(cache, model, max_length=64, block_size=blocks.shape[1]).__enter__()
    forward(model, prompts, cache)
    target_cache.begin_block()
    forward(model, blocks, cache)
    layers = [layer for layer in target_cache._layers if isinstance(layer, RecurrentLayer)]
    if commit is None:
        target_cache.commit(kept, blocks.shape[1])
    return target_cache, layers


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_each_row_keeps_its_own_number_of_tokens(name):
    """Attention layers cannot do that yet, so only the recurrent layers are committed."""
    model = FAMILIES[name].build(0)
    prompts, blocks, kept = torch.randint(5, 300, (3, 7)), torch.randint(5, 300, (3, 6)), [2, 6, 1]
    target_cache, layers = commit_once(model, prompts, blocks, None, commit="no")
    for group in target_cache._replay_groups:
        group.replay(kept, 6)
    for layer in layers:
        layer.commit(kept, 6)
    for row, count in enumerate(kept):
        alone, its_layers = commit_once(model, prompts[row, None], blocks[row, None], torch.tensor([count]))
        for layer, single in zip(layers, its_layers, strict=True):
            assert torch.allclose(layer.recurrent_states[0][row], single.recurrent_states[0][0], atol=1e-3)
            assert torch.allclose(layer.conv_states[0][row], single.conv_states[0][0], atol=1e-4)
        alone.__exit__(None, None, None)
    target_cache.__exit__(None, None, None)


@pytest.mark.parametrize("name", REPLAYED)
class TestReplayAndFallback:
    def test_the_projections_never_run_again(self, name):
        """A replay calls no module of the target at all."""
        model = FAMILIES[name].build(0)
        target_cache, _ = commit_once(model, PROMPT, torch.randint(5, 300, (1, 8)), None, commit="no")
        called = []
        handles = [m.register_forward_pre_hook(lambda module, _: called.append(module)) for m in model.modules()]
        target_cache.commit(torch.tensor([3]), 8)
        for handle in handles:
            handle.remove()
        target_cache.__exit__(None, None, None)
        assert called == []

    def test_running_the_mixer_again_gives_the_same_logits(self, name, monkeypatch):
        model = FAMILIES[name].build(0)
        text, logits = decode_plainly(model, PROMPT, 20)
        monkeypatch.setattr(replay_group, "REPLAYS", ())
        calls = []
        handle = TestReplayAndFallback.mixer_of(model).register_forward_pre_hook(lambda *_: calls.append(1))
        outputs, _ = read_in_blocks(model, text, PROMPT.shape[1], 8, cycle([3, 1, 8, 5]))
        handle.remove()
        assert (outputs - logits).abs().max() < CLOSE
        # One call per forward, plus one per round that rejects something (all but the full ones).
        assert len(calls) > 7

    @staticmethod
    def mixer_of(model):
        return next(m for m in model.modules() if any(isinstance(child, nn.Conv1d) for child in m.children()))


def test_a_replay_with_the_wrong_formula_is_not_trusted(monkeypatch):
    """OLMo-Hybrid doubles its write strength. For other layers that replay is wrong, so the mixer runs again."""
    model = FAMILIES["qwen3_5"].build(0)
    text, logits = decode_plainly(model, PROMPT, 20)
    original_init = DeltaReplay.__init__

    def wrong(self, mixers):
        original_init(self, mixers)
        self._largest_beta = 2.0

    monkeypatch.setattr(DeltaReplay, "__init__", wrong)
    outputs, _ = read_in_blocks(model, text, PROMPT.shape[1], 8, cycle([3, 1, 8, 5]))
    assert (outputs - logits).abs().max() < CLOSE


def test_negative_control_trusting_a_wrong_replay_changes_the_logits(monkeypatch):
    """The same fault shows once the comparison is switched off."""
    model = FAMILIES["qwen3_5"].build(0)
    text, logits = decode_plainly(model, PROMPT, 20)
    original_init = DeltaReplay.__init__

    def wrong(self, mixers):
        original_init(self, mixers)
        self._largest_beta = 2.0

    monkeypatch.setattr(DeltaReplay, "__init__", wrong)
    monkeypatch.setattr(replay_group, "TRUSTED_ERROR", float("inf"))
    outputs, _ = read_in_blocks(model, text, PROMPT.shape[1], 8, cycle([3, 1, 8, 5]))
    assert (outputs - logits).abs().max() > 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3_5", "bamba"])
def test_states_keep_the_dtype_of_the_model(name, dtype):
    """The replay is trusted in half precision as well."""
    model = FAMILIES[name].build(0).to(dtype)
    plain = DynamicCache(config=model.config)
    forward(model, PROMPT, plain)
    target_cache, layers = commit_once(model, PROMPT, torch.randint(5, 300, (1, 8)), torch.tensor([3]))
    assert all(group._is_trusted for group in target_cache._replay_groups)
    cache = target_cache.cache
    target_cache.__exit__(None, None, None)
    for layer, expected in zip(cache.layers, plain.layers, strict=True):
        for states in ("conv_states", "recurrent_states"):
            for index, state in getattr(expected, states, {}).items():
                assert getattr(layer, states)[index].dtype == state.dtype


class TestOutputRecorder:
    def test_long_outputs_are_not_kept(self):
        module = nn.Linear(4, 4)
        recorder = OutputRecorder([module], longest=8)
        module(torch.randn(1, 8, 4))
        module(torch.randn(1, 9, 4))
        assert recorder.take() is None

    def test_an_output_is_returned_once_and_hooks_are_removed(self):
        modules = [nn.Linear(4, 4), nn.Linear(4, 2)]
        recorder = OutputRecorder(modules, longest=8)
        inputs = torch.randn(1, 3, 4)
        expected = [module(inputs) for module in modules]
        assert all(torch.equal(a, b) for a, b in zip(recorder.take(), expected, strict=True))
        assert recorder.take() is None
        recorder.remove()
        assert not modules[0]._forward_hooks

    def test_layers_without_the_expected_attributes_have_no_replay(self):
        assert not DeltaReplay.supports(nn.Linear(2, 2))
        assert not StateSpaceReplay.supports(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "lfm2", "llama"])
def test_offloaded_weights(name):
    """They are on the meta device between forwards, so nothing can be replayed and the mixer runs again."""
    accelerate = pytest.importorskip("accelerate")
    model = FAMILIES[name].build(0)
    text, logits = decode_plainly(model, PROMPT, 20)
    model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    outputs, _ = read_in_blocks(model, text, PROMPT.shape[1], 8, cycle([3, 1, 8, 5]))
    assert (outputs - logits).abs().max() < CLOSE


@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "lfm2"])
def test_inference_mode_then_a_turn_outside_of_it(name):
    """Inference-mode tensors must not be written outside of it, but the second turn can still continue from them."""
    model = FAMILIES[name].build(0)
    text, logits = decode_plainly(model, PROMPT, 20)
    with torch.inference_mode():
        _, cache = read_in_blocks(model, text[:, :20], PROMPT.shape[1], 8, cycle([3, 1, 8, 5]))
    with torch.no_grad(), TargetCache(cache, model, max_length=60, block_size=8) as target_cache:
        target_cache.begin_block()
        block = torch.cat([text[:, 19:22], torch.full((1, 5), 7)], dim=1)
        outputs = forward(model, block, cache)[0, :3]
        target_cache.commit(torch.tensor([3]), 8)
        target_cache.begin_block()
        more = forward(model, text[:, 22:26], cache)[0]
        target_cache.commit(torch.tensor([4]), 4)
    assert (torch.cat([outputs, more]) - logits[9:16]).abs().max() < CLOSE


class TestReading:
    """Mixers whose forward over several tokens differs from one token at a time."""

    @pytest.mark.parametrize(
        ("name", "reading"),
        [
            ("mamba", Reading.ONE_BY_ONE),
            ("jamba", Reading.ONE_BY_ONE),
            ("nemotron_h", Reading.UNCLAMPED),
            ("zamba2", Reading.UNCLAMPED),
            ("bamba", Reading.TOGETHER),
            ("qwen3_5", Reading.TOGETHER),
            ("lfm2", Reading.TOGETHER),
        ],
    )
    def test_how_each_family_must_read_a_block(self, name, reading):
        readings = mixers_by_layer(FAMILIES[name].build(0))
        assert readings and {value for _, value in readings.values()} == {reading}

    @pytest.mark.parametrize("name", ["mamba", "jamba", "nemotron_h", "zamba2"])
    def test_negative_control_their_own_forward_is_wrong(self, name, monkeypatch):
        """Read together, as other mixers are, the same text gives different logits."""
        model = FAMILIES[name].build(0)
        text, logits = decode_plainly(model, PROMPT, 20)
        plain, _ = read_in_blocks(model, text, PROMPT.shape[1], 8, cycle([3, 1, 8, 5]))
        monkeypatch.setattr(mixers, "_reading_of", lambda mixers, model: Reading.TOGETHER)
        wrong, _ = read_in_blocks(model, text, PROMPT.shape[1], 8, cycle([3, 1, 8, 5]))
        assert (plain - logits).abs().max() < CLOSE
        assert (wrong - logits).abs().max() > CLOSE

    @pytest.mark.parametrize("name", ["jamba", "nemotron_h"])
    def test_two_threads_do_not_read_each_others_blocks(self, name):
        model = FAMILIES[name].build(0)
        texts = [decode_plainly(model, PROMPT + 30 * number, 16) for number in range(3)]
        results: dict[int, torch.Tensor] = {}

        def run(number: int) -> None:
            results[number], _ = read_in_blocks(model, texts[number][0], PROMPT.shape[1], 4 + number, cycle([2, 1, 4]))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, (_, logits) in enumerate(texts):
            assert (results[number] - logits).abs().max() < CLOSE

    def test_each_row_returns_to_its_own_step(self):
        model = FAMILIES["mamba"].build(0)
        prompts, blocks, kept = torch.randint(5, 300, (3, 7)), torch.randint(5, 300, (3, 6)), [2, 6, 1]
        target_cache, layers = commit_once(model, prompts, blocks, torch.tensor(kept))
        for row, count in enumerate(kept):
            alone, its_layers = commit_once(model, prompts[row, None], blocks[row, None], torch.tensor([count]))
            for layer, single in zip(layers, its_layers, strict=True):
                own, expected = layer.recurrent_states[0][row], single.recurrent_states[0][0]
                assert (own - expected).abs().max() < 1e-4 * expected.abs().max()
            alone.__exit__(None, None, None)
        target_cache.__exit__(None, None, None)

    def test_the_models_clamp_is_unchanged(self):
        model = FAMILIES["nemotron_h"].build(0)
        limits = [mixer.time_step_limit for mixer, _ in mixers_by_layer(model).values()]
        text, _ = decode_plainly(model, PROMPT, 12)
        read_in_blocks(model, text, PROMPT.shape[1], 8, cycle([3]))
        assert [mixer.time_step_limit for mixer, _ in mixers_by_layer(model).values()] == limits
        assert limits[0][0] > 0

    @pytest.mark.parametrize("name", ["nemotron_h", "jamba"])
    def test_with_offloaded_weights(self, name):
        test_offloaded_weights(name)
