"""The probe before the first token: targets that do not read a block as they read single tokens are refused by name."""

import copy

import pytest
import torch
import transformers
from families import FAMILIES, HIDDEN, SERVED, VOCAB, WINDOW
from lossless import assert_same, both, prompt
from oracle import randomly
from tiny_drafts import tiny_draft
from transformers import LlamaForCausalLM

from hf_dflash import UnsupportedTargetError
from hf_dflash.target import probe
from hf_dflash.target.probe import check_block_reading
from hf_dflash.target.target import Target

CPU = torch.device("cpu")
REACH = 40
#: What core prepares for a prompt of text.
ARGUMENTS = {"use_cache": True, "logits_to_keep": 1, "attention_mask": None, "position_ids": torch.arange(9)[None]}

SHARED = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
#: Model class -> (configuration class, its arguments): causal in name, but a block is read differently or not at all.
OTHERS = {
    "MoshiForCausalLM": (
        "MoshiConfig",
        SHARED
        | {"hidden_size": HIDDEN, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16, "ffn_dim": 96}
        | {"sliding_window": WINDOW},
    ),
    "CpmAntForCausalLM": (
        "CpmAntConfig",
        SHARED
        | {
            "hidden_size": HIDDEN,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "dim_head": 16,
            "dim_ff": 96,
            "prompt_length": 4,
            "prompt_types": 4,
            "segment_types": 4,
            "position_bias_num_buckets": 32,
            "init_std": 0.4,
        },
    ),
    "ProphetNetForCausalLM": (
        "ProphetNetConfig",
        SHARED
        | {
            "hidden_size": HIDDEN,
            "num_encoder_layers": 4,
            "num_decoder_layers": 4,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "is_decoder": True,
            "is_encoder_decoder": False,
            "add_cross_attention": False,
        },
    ),
    "XLMWithLMHeadModel": (
        "XLMConfig",
        SHARED | {"emb_dim": HIDDEN, "n_layers": 4, "n_heads": 4, "causal": True, "n_langs": 1, "lang_id": 0},
    ),
}


def build_other(name: str):
    config_class, values = OTHERS[name]
    config = getattr(transformers, config_class)(**values)
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        # Wide enough for a difference to show, whatever the model's own initialization is.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


class Counter:
    """A streamer that counts what it receives."""

    def __init__(self):
        self.puts = 0

    def put(self, value):
        self.puts += 1

    def end(self):
        pass


@pytest.mark.parametrize("name", OTHERS)
def test_a_target_that_reads_a_block_differently_is_refused_before_the_first_token(name):
    target, streamer = build_other(name), Counter()
    draft = tiny_draft(hidden_size=HIDDEN, vocab_size=VOCAB)
    target.generate(prompt(), max_new_tokens=6, do_sample=False)
    with pytest.raises(UnsupportedTargetError, match=rf"{name}\) (does not read|cannot read) a block of 3 tokens"):
        target.generate(prompt(), max_new_tokens=6, do_sample=False, assistant_model=draft, streamer=streamer)
    assert streamer.puts == 1, "only the prompt was streamed"


def test_a_call_that_stays_within_the_window_is_not_refused_for_what_happens_beyond():
    target = build_other("MoshiForCausalLM")
    target.config.sliding_window = 30
    assert_same(both(target, {"inputs": prompt()}, randomly(3, 5), max_new_tokens=20, do_sample=False))
    with pytest.raises(UnsupportedTargetError, match="beyond its sliding window, after 30 tokens"):
        check_block_reading(Target(target), ARGUMENTS, CPU, 31)


class LooksAhead(LlamaForCausalLM):
    """A Llama whose tokens also attend to those after them in the same forward."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        hidden = self.get_input_embeddings()(input_ids)
        hidden = hidden + 0.02 * (hidden.flip(1).cumsum(1).flip(1) - hidden)
        return super().forward(inputs_embeds=hidden, attention_mask=attention_mask, **kwargs)


def looks_ahead() -> LooksAhead:
    model = FAMILIES["llama"].build(0)
    model.__class__ = LooksAhead
    return model


def test_a_little_of_later_tokens_is_enough_to_be_refused():
    with pytest.raises(UnsupportedTargetError, match=r"LooksAhead\) does not read.*rounding explains 0.001"):
        check_block_reading(Target(looks_ahead()), ARGUMENTS, CPU, REACH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SERVED)
def test_every_served_family_passes(family, dtype):
    target = Target(FAMILIES[family].build(0).to(dtype))
    check_block_reading(target, ARGUMENTS, CPU, REACH)
    assert vars(target.layers)[probe._PASSED]


@pytest.mark.parametrize(
    "family", [name for name in ("llama", "gemma3", "gpt_oss", "qwen3_5", "mamba2") if name in SERVED]
)
def test_the_differences_of_served_families_are_far_below_the_limit(family):
    model = FAMILIES[family].build(0)
    with torch.no_grad():
        differences = [
            probe._difference(Target(model), ARGUMENTS, probe._random_ids(Target(model), seed, distance))
            for seed in range(3)
            for distance in (0, WINDOW)
        ]
    assert max(differences) < probe.ROUNDING / 2


def forwards_of(target, run) -> int:
    count = []
    handle = target.register_forward_pre_hook(lambda *_: count.append(1))
    try:
        run()
    finally:
        handle.remove()
    return len(count)


def test_a_model_is_probed_once_for_each_way_of_running_it():
    model = FAMILIES["llama"].build(0)

    def check():
        check_block_reading(Target(model), ARGUMENTS, CPU, REACH)

    # A prefill and 3 steps, then a prefill and a block.
    assert [forwards_of(model, check) for _ in range(2)] == [6, 0]
    assert (
        forwards_of(copy.copy(model), lambda: check_block_reading(Target(copy.copy(model)), ARGUMENTS, CPU, REACH)) == 0
    )
    model.set_attn_implementation("eager")
    assert forwards_of(model, check) == 6
    model.bfloat16()
    assert forwards_of(model, check) == 6
    assert forwards_of(model, check) == 0


def test_a_refusal_is_not_remembered_as_passed():
    model = looks_ahead()
    for _ in range(2):
        with pytest.raises(UnsupportedTargetError):
            check_block_reading(Target(model), ARGUMENTS, CPU, REACH)


def test_the_probe_leaves_no_trace():
    """The random state, the model's buffers and plain attributes, and the call's arguments are as before."""
    model = FAMILIES["llama"].build(0)
    rotary = model.model.rotary_emb
    model.model.rope_deltas, frequencies = torch.tensor([[7]]), rotary.inv_freq

    def leave_traces(*_):
        model.model.rope_deltas = None
        rotary.max_seq_len_cached = 99
        rotary.register_buffer("inv_freq", torch.zeros(8), persistent=False)

    handle = model.register_forward_hook(leave_traces)
    state, arguments = torch.random.get_rng_state(), dict(ARGUMENTS)
    check_block_reading(Target(model), arguments, CPU, REACH)
    handle.remove()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.model.rope_deltas.tolist() == [[7]]
    assert rotary.max_seq_len_cached == 1024 and rotary.inv_freq is frequencies
    assert arguments == ARGUMENTS


def test_one_text_that_agrees_is_enough(monkeypatch):
    """Rounding may tip a router to another expert in one text; a target that reads blocks differently fails in all."""
    for differences, refused in (
        ([0.5, 0.0], False),
        ([0.5, 0.5, 0.0], False),
        ([0.5, None], False),
        ([0.5] * 3, True),
    ):
        results = iter(differences)
        monkeypatch.setattr(probe, "_difference", lambda *_, results=results: next(results))
        target = Target(FAMILIES["llama"].build(0))
        if refused:
            with pytest.raises(UnsupportedTargetError, match="differ by 0.5"):
                check_block_reading(target, ARGUMENTS, CPU, REACH)
        else:
            check_block_reading(target, ARGUMENTS, CPU, REACH)
        assert not list(results)


def test_logits_that_are_not_numbers_are_no_reason_to_refuse(monkeypatch):
    model = FAMILIES["llama"].build(0)
    handle = model.lm_head.register_forward_hook(lambda m, i, out: out.index_fill(-1, torch.tensor([5]), float("nan")))
    check_block_reading(Target(model), ARGUMENTS, CPU, REACH)
    handle.remove()


def test_a_masked_vocabulary_passes_and_still_shows_a_difference():
    for model, refused in ((FAMILIES["llama"].build(0), False), (looks_ahead(), True)):
        model.lm_head.register_forward_hook(lambda m, i, out: out.index_fill(-1, torch.tensor([5]), float("-inf")))
        if refused:
            with pytest.raises(UnsupportedTargetError):
                check_block_reading(Target(model), ARGUMENTS, CPU, REACH)
        else:
            check_block_reading(Target(model), ARGUMENTS, CPU, REACH)


def test_a_target_that_cannot_be_probed_is_not_refused():
    """Some models run only on the inputs of their own call (an image, an audio)."""

    class Picky(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            if int(input_ids[0, 0]) != 7:
                raise ValueError("expected an image")
            return super().prepare_inputs_for_generation(input_ids, **kwargs)

    model = FAMILIES["llama"].build(0)
    model.__class__ = Picky
    ids = prompt()
    ids[0, 0] = 7
    assert_same(both(model, {"inputs": ids}, randomly(3, 5), max_new_tokens=20, do_sample=False))


def test_special_ids_are_not_among_the_random_ones():
    model = FAMILIES["llama"].build(0)
    drawn = probe._random_ids(Target(model), 0)[0].tolist()
    model.config.image_token_id, model.config.eos_token_id = drawn[0], [drawn[2], 1]
    assert not {drawn[0], drawn[2]} & set(probe._random_ids(Target(model), 0)[0].tolist())
