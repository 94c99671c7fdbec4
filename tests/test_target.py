"""The target as decoding sees it: taps, layers, embedding, prefill and `model_kwargs` of later tokens."""

import threading

import pytest
import torch
import transformers
from families import FAMILIES, MOE
from lossless import PATTERNS, assert_same, assert_varied, both, prompt
from tiny_drafts import tiny_draft
from torch import nn
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from hf_dflash import UnsupportedTargetError
from hf_dflash.target.cache.mixers import _outputs_per_token
from hf_dflash.target.target import Target


@pytest.fixture(scope="module")
def llama():
    return FAMILIES["llama"].build(0)


def run(model, ids, **options):
    with torch.no_grad():
        return model(ids, use_cache=False, **options)


def test_taps_are_the_layers_own_outputs(llama):
    target = Target(llama)
    with target.taps([0, 2]) as taps, taps.recording():
        output = run(llama, prompt(), output_hidden_states=True)
    result = None
    with target.taps([2, 0]) as taps:
        with taps.recording():
            run(llama, prompt())
        result = taps.take(torch.device("cpu"))
    # Tap i is what transformers calls hidden_states[i + 1]; the order is that of the ids.
    assert torch.equal(result, torch.cat([output.hidden_states[3], output.hidden_states[1]], dim=-1))


def test_the_last_layers_tap_is_taken_before_the_final_norm(llama):
    """`hidden_states[-1]` is after the norm. Computed by hand: the last layer's residual sum."""
    target = Target(llama)
    last = llama.model.layers[-1]
    seen = {}
    handle = last.post_attention_layernorm.register_forward_hook(lambda m, i, o: seen.update(residual=i[0], normed=o))
    with target.taps([3]) as taps, taps.recording():
        output = run(llama, prompt(), output_hidden_states=True)
        result = taps.take(torch.device("cpu"))
    handle.remove()
    expected = seen["residual"] + last.mlp(seen["normed"])
    assert torch.equal(result, expected)
    assert torch.equal(llama.model.norm(result), output.hidden_states[-1])
    assert not torch.allclose(result, output.hidden_states[-1], atol=0.1)


def test_taps_only_record_their_own_thread_inside_recording(llama):
    target, before = Target(llama), dict(llama.model.layers[1]._forward_hooks)
    with target.taps([1]) as taps:
        run(llama, prompt(5))
        with taps.recording():
            other = threading.Thread(target=run, args=(llama, prompt(7)))
            other.start()
            other.join()
            run(llama, prompt(3))
        assert taps.take(torch.device("cpu")).shape == (1, 3, 64)
        with pytest.raises(UnsupportedTargetError, match="output of decoder layer 1 .*was not captured"):
            taps.take(torch.device("cpu"))
    assert llama.model.layers[1]._forward_hooks == before


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.available])
def test_the_decoder_layers_of_every_family_are_found(family):
    model = FAMILIES[family].build(0)
    config = model.config.get_text_config(decoder=True)
    target = Target(model)
    assert len(target.layers) == config.num_hidden_layers
    assert target.num_embeddings >= config.vocab_size


def test_a_model_without_layers_or_head_is_refused(llama):
    class Headless(type(llama)):
        def get_output_embeddings(self):
            return None

    headless = Headless(llama.config)
    with pytest.raises(UnsupportedTargetError, match="no output embeddings"):
        Target(headless)
    headless.model.layers = nn.ModuleList()
    with pytest.raises(UnsupportedTargetError, match="No list of 4 decoder layers"):
        Target(headless)


def test_the_embedding_is_called_and_a_norm_on_top_is_bypassed():
    gemma = FAMILIES["gemma3"].build(0)
    ids = prompt()
    rows = nn.functional.embedding(ids, gemma.get_input_embeddings().weight)
    assert torch.allclose(Target(gemma).embed(ids), rows * 64**0.5), "Gemma scales its embeddings"

    class Normed(nn.Embedding):
        def __init__(self, weight):
            super().__init__(*weight.shape)
            self.weight = weight
            self.embed_norm = nn.LayerNorm(weight.shape[1])

        def forward(self, ids):
            return self.embed_norm(super().forward(ids))

    llama = FAMILIES["llama"].build(1)
    plain = llama.get_input_embeddings()(ids)
    llama.set_input_embeddings(Normed(llama.get_input_embeddings().weight))
    assert torch.equal(Target(llama).embed(ids), plain)


def test_token_types_are_extended_one_token_at_a_time(llama):
    """Type 1 marks image positions. The prompt ends with a text token, so everything after it is text."""
    target = Target(llama)
    kwargs = {"token_type_ids": torch.tensor([[1, 1, 1, 0]]), "position_ids": torch.arange(4)[None]}
    advanced = target.advance(ModelOutput(), kwargs, 3)
    assert advanced["token_type_ids"].tolist() == [[1, 1, 1, 0, 0, 0, 0]]
    assert advanced["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert kwargs["token_type_ids"].shape == (1, 4), "the caller's arguments must not be modified"
    assert target.advance(ModelOutput(), kwargs, 0) == kwargs


def test_the_whole_prompt_is_tapped_if_late_layers_share_keys():
    family = FAMILIES.get("gemma4")
    if family is None or not family.available:
        pytest.skip("this transformers has no Gemma 4")
    target = Target(family.build(0))
    with target.taps([3]) as taps, taps.recording():
        config = GenerationConfig()
        kwargs = {"logits_to_keep": 1, "attention_mask": torch.ones(1, 9).long(), "use_cache": True}
        with torch.no_grad():
            outputs = target.prefill(prompt(), config, kwargs)
        assert taps.take(torch.device("cpu")).shape[1] == 9
    assert outputs.logits.shape[1] == 1


def test_a_models_own_update_is_called_once_per_token(llama):
    """Llama 3.2 Vision's update adds one row per call, and requires `is_encoder_decoder`."""

    class Growing(type(llama)):
        def _update_model_kwargs_for_generation(self, outputs, model_kwargs, is_encoder_decoder, **kwargs):
            assert is_encoder_decoder is False
            model_kwargs = super()._update_model_kwargs_for_generation(
                outputs, model_kwargs, is_encoder_decoder, **kwargs
            )
            rows = model_kwargs["rows"]
            return {**model_kwargs, "rows": torch.cat([rows, rows[:, -1:]], dim=1)}

    kwargs = {"rows": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 2).long()}
    advanced = Target(Growing(llama.config)).advance(ModelOutput(), kwargs, 3)
    assert advanced["rows"].tolist() == [[1, 2, 2, 2, 2]] and advanced["attention_mask"].shape == (1, 5)
    assert kwargs["rows"].tolist() == [[1, 2]]


def test_a_skipped_layer_is_not_blamed_on_compilation(llama):
    """`skipped` is what a model does with a cross-attention layer when there is no image."""

    class Skipping(type(llama.model)):
        def forward(self, *args, **kwargs):
            layers, self.layers = self.layers, nn.ModuleList([*self.layers[:1], *self.layers[2:]])
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.layers = layers

    model = FAMILIES["llama"].build(0)
    target = Target(model)
    model.model.__class__ = Skipping
    with target.taps([0, 1]) as taps:
        with taps.recording():
            run(model, prompt())
        with pytest.raises(UnsupportedTargetError, match="layer 1 .*LlamaDecoderLayer.*the model skips") as caught:
            taps.take(torch.device("cpu"))
    assert "compile" not in str(caught.value)
    with target.taps([1]) as taps:
        with taps.recording():
            run(model, prompt())
        with pytest.raises(UnsupportedTargetError, match="layer 1 .*compiled.*; or the model skips"):
            taps.take(torch.device("cpu"))


SMALL = {"vocab_size": 384, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
OWN_CACHE = {
    "MiniMaxForCausalLM": lambda: transformers.MiniMaxConfig(**MOE, num_local_experts=4),
    "RwkvForCausalLM": lambda: transformers.RwkvConfig(**SMALL, hidden_size=64, num_hidden_layers=4),
    "XLNetLMHeadModel": lambda: transformers.XLNetConfig(**SMALL, d_model=64, n_layer=4, n_head=4, d_inner=96),
}


@pytest.mark.parametrize("name", OWN_CACHE)
def test_targets_with_a_cache_of_their_own_kind_are_refused_for_that(name):
    model = getattr(transformers, name)(OWN_CACHE[name]()).eval()
    with pytest.raises(UnsupportedTargetError, match=f"{name} creates a cache of its own kind") as caught:
        model.generate(prompt(), max_new_tokens=4, assistant_model=tiny_draft(hidden_size=64, vocab_size=384))
    assert "use_cache" not in str(caught.value)


OTHER_WIDTHS = {
    "OPTForCausalLM": lambda: transformers.OPTConfig(
        **SMALL, hidden_size=64, word_embed_proj_dim=32, ffn_dim=96, num_hidden_layers=4, num_attention_heads=4
    ),
    "RemBertForCausalLM": lambda: transformers.RemBertConfig(
        **SMALL,
        hidden_size=64,
        input_embedding_size=32,
        output_embedding_size=48,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        is_decoder=True,
    ),
}


@pytest.mark.parametrize("name", OTHER_WIDTHS)
def test_an_embedding_or_head_of_another_width_is_refused(name, monkeypatch):
    model = getattr(transformers, name)(OTHER_WIDTHS[name]()).eval()
    draft = tiny_draft(hidden_size=64, vocab_size=384)
    monkeypatch.setattr(model, "forward", lambda *a, **k: pytest.fail("the target ran before the refusal"))
    with pytest.raises(UnsupportedTargetError, match=f"input embedding of {name} .* width 32, .* have 64"):
        model.generate(prompt(), max_new_tokens=4, assistant_model=draft)
    half = tiny_draft(hidden_size=64, vocab_size=384, own_embeddings=True)
    with pytest.raises(UnsupportedTargetError, match=f"output head of {name} .* width (32|48), .* have 64"):
        model.generate(prompt(), max_new_tokens=4, assistant_model=half)


def test_a_draft_with_its_own_embeddings_and_head_works_with_any_width():
    torch.manual_seed(0)
    model = transformers.OPTForCausalLM(OTHER_WIDTHS["OPTForCausalLM"]()).eval()
    draft = tiny_draft(hidden_size=64, vocab_size=384, own_embeddings=True, draft_vocab_size=384)
    options = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(prompt(), **options)
    assert torch.equal(model.generate(prompt(), **options, assistant_model=draft), plain)


@pytest.mark.parametrize("pattern", ["none", "fixed2", "all"])
def test_a_mixer_that_returns_several_tensors(pattern):
    """Zaya's mixer returns queries, keys and values."""
    config = transformers.ZayaConfig(
        **{key: value for key, value in MOE.items() if key not in ("intermediate_size", "num_experts_per_tok")},
        num_experts=4,
        router_hidden_size=32,
        initializer_range=0.4,
    )
    torch.manual_seed(0)
    model = transformers.ZayaForCausalLM(config).eval()
    pair = both(model, {"inputs": prompt()}, PATTERNS[pattern], max_new_tokens=24, do_sample=False)
    assert_varied(pair.plain, 24)
    assert_same(pair)


def test_a_mixer_whose_output_has_no_tokens_is_named():
    class Odd(nn.Module):
        pass

    assert len(_outputs_per_token(Odd(), (torch.zeros(1, 3, 4), None, torch.zeros(1, 3, 2, 2)), 3)) == 2
    with pytest.raises(UnsupportedTargetError, match=r"Odd .* returned \[\(1, 4\), 'str'\] for 3"):
        _outputs_per_token(Odd(), (torch.zeros(1, 4), "x"), 3)
