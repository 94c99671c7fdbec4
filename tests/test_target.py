"""The target as decoding sees it: taps, layers, embedding, prefill and `model_kwargs` of later tokens."""

import threading

import pytest
import torch
from families import FAMILIES
from lossless import prompt
from torch import nn
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from hf_dflash import UnsupportedTargetError
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
