"""The dispatch of `assistant_model=`: which calls reach the DFlash loop and which do not."""

from pathlib import Path

import pytest
import torch
from families import FAMILIES
from lossless import prompt
from oracle import all_right, oracle_draft
from packaging.version import Version
from tiny_drafts import tiny_draft
from transformers import GenerationConfig, GenerationMixin, LlamaForCausalLM, MuseGlimmerAssistantModel, __version__

import hf_dflash
from hf_dflash import DFlashGenerate
from hf_dflash.decoding import dispatch, generate

NEW = 20


@pytest.fixture(scope="module")
def target():
    return FAMILIES["llama"].build(0)


@pytest.fixture
def rows_decoded(monkeypatch):
    """One entry per row that our loop decoded."""
    decoded = []
    decode = generate.decode
    monkeypatch.setattr(generate, "decode", lambda *a, **k: (decoded.append(1), decode(*a, **k))[1])
    return decoded


def greedy(target, **options):
    return target.generate(prompt(), max_new_tokens=NEW, do_sample=False, **options)


def test_installing_twice_dispatches_once():
    wrapped = GenerationMixin.generate
    dispatch.install()
    assert GenerationMixin.generate is wrapped


def test_a_dflash_draft_reaches_the_loop(target, rows_decoded):
    assert torch.equal(greedy(target, assistant_model=tiny_draft(hidden_size=64, vocab_size=384)), greedy(target))
    assert len(rows_decoded) == 1


def test_positional_arguments_reach_it_too(target, rows_decoded):
    draft = oracle_draft(target, greedy(target), all_right)
    config = target.generation_config
    out = target.generate(prompt(), config, None, None, None, None, draft, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, greedy(target)) and len(rows_decoded) == 1


def without_dispatch(monkeypatch):
    monkeypatch.setattr(GenerationMixin, "generate", GenerationMixin.generate.__wrapped__)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", ["assistant", "prompt lookup"])
def test_other_assistants_are_left_alone(target, rows_decoded, monkeypatch, kind, sampled):
    options = {"max_new_tokens": NEW, "do_sample": sampled}
    options |= (
        {"assistant_model": FAMILIES["llama"].build(3)} if kind == "assistant" else {"prompt_lookup_num_tokens": 3}
    )
    texts = []
    for dispatched in (True, False):
        if not dispatched:
            without_dispatch(monkeypatch)
        torch.manual_seed(0)
        texts.append(target.generate(prompt(), **options).tolist())
    assert texts[0] == texts[1] and not rows_decoded


def test_the_native_muse_assistant_is_left_alone(target, rows_decoded, monkeypatch):
    from transformers import MuseGlimmerAssistantConfig

    config = MuseGlimmerAssistantConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        block_size=4,
        mask_token_id=3,
        target_layer_ids=[0, 2],
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
    )
    torch.manual_seed(0)
    muse = MuseGlimmerAssistantModel(config).eval()
    texts = []
    for dispatched in (True, False):
        if not dispatched:
            without_dispatch(monkeypatch)
        texts.append(greedy(target, assistant_model=muse, speculation_type="dflash").tolist())
    assert texts[0] == texts[1] and not rows_decoded


def test_a_class_that_overrides_generate(rows_decoded):
    class Shouting(LlamaForCausalLM):
        def generate(self, *args, **kwargs):
            return super().generate(*args, **kwargs) + 1

    plain = FAMILIES["llama"].build(0)
    shouting = Shouting(plain.config).eval()
    shouting.load_state_dict(plain.state_dict())
    draft = tiny_draft(hidden_size=64, vocab_size=384)
    assert torch.equal(greedy(shouting, assistant_model=draft), greedy(plain) + 1)
    assert len(rows_decoded) == 1


@pytest.mark.parametrize("merged", [False, True])
def test_a_lora_target(rows_decoded, merged):
    peft = pytest.importorskip("peft")
    base = FAMILIES["llama"].build(0)
    unadapted = greedy(base)
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    target = peft.get_peft_model(base, config).eval()
    if merged:
        target = target.merge_and_unload()
    plain = target.generate(input_ids=prompt(), max_new_tokens=NEW, do_sample=False)
    assert not torch.equal(plain, unadapted), "the adapter changes nothing, so the test proves nothing"
    draft = oracle_draft(base, plain, all_right)
    ours = target.generate(input_ids=prompt(), max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert torch.equal(ours, plain) and len(rows_decoded) == 1


def test_a_draft_loaded_by_the_authors_package(target, rows_decoded):
    authors = pytest.importorskip("dflash.model")
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 2], "block_size": 6},
        num_target_layers=4,
        architectures=["DFlashDraftModel"],
    )
    torch.manual_seed(0)
    draft = authors.DFlashDraftModel(config).eval()
    weights = {p.data_ptr() for p in draft.parameters()}
    adopted = hf_dflash.adopt_draft(draft)
    assert {p.data_ptr() for p in adopted.parameters()} == weights
    assert hf_dflash.adopt_draft(draft) is adopted, "the next turn of a chat would not find its context"
    assert adopted not in set(draft.modules())
    assert torch.equal(greedy(target, assistant_model=draft), greedy(target)) and len(rows_decoded) == 1


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(384)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", pad_token="w0")


@pytest.mark.parametrize("given", ["object", "folder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_pipeline_reaches_the_loop_and_never_runs_the_draft_in_fp16(tmp_path, tokenizer, rows_decoded, given, dtype):
    from transformers import pipeline

    target = FAMILIES["llama"].build(0).to(dtype)
    draft = tiny_draft(hidden_size=64, vocab_size=384).to(torch.bfloat16)
    if given == "folder":
        draft.save_pretrained(tmp_path)
    text = "w17 w200 w31 w8 w99"
    options = {"max_new_tokens": NEW, "do_sample": False, "return_tensors": True}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)(text, **options)
    assistant = draft if given == "object" else str(tmp_path)
    drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=assistant)
    assert drafted.assistant_model.dtype == torch.bfloat16
    assert drafted(text, **options) == plain and len(rows_decoded) == 1


def test_defaults_in_a_prepared_generation_config_are_not_refused(target, rows_decoded):
    """Pipelines pass `generate` a config into which core has filled its defaults for other assistants."""
    config = GenerationConfig(**{**GenerationConfig._get_default_generation_params(), "max_new_tokens": NEW})
    draft = tiny_draft(hidden_size=64, vocab_size=384)
    out = target.generate(prompt(), generation_config=config, assistant_model=draft)
    assert torch.equal(out, greedy(target)) and len(rows_decoded) == 1
    config.assistant_confidence_threshold = 0.7
    with pytest.raises(hf_dflash.UnsupportedOptionError, match="assistant_confidence_threshold=0.7"):
        target.generate(prompt(), generation_config=config, assistant_model=draft)


def test_the_exported_folder_reaches_the_loop(target, tmp_path, rows_decoded):

    from hf_dflash.draft.hub import export_draft

    source, folder = tmp_path / "draft", tmp_path / "exported"
    tiny_draft(hidden_size=64, vocab_size=384).save_pretrained(source)
    export_draft(source, folder)
    out = greedy(target, custom_generate=str(folder), trust_remote_code=True)
    assert torch.equal(out, greedy(target)) and len(rows_decoded) == 1


@pytest.mark.skipif(Version(__version__) < Version("5.24"), reason="the native path is complete since 5.24")
def test_the_draft_also_runs_on_the_native_path(target, monkeypatch):
    """Without the dispatch, transformers' own generator runs the draft."""
    draft = tiny_draft(hidden_size=64, vocab_size=384)
    plain = greedy(target)
    without_dispatch(monkeypatch)
    assert torch.equal(greedy(target, assistant_model=draft, speculation_type="dflash"), plain)


# What is given instead of a loaded draft


@pytest.mark.parametrize("as_type", [str, Path])
def test_the_name_of_a_draft_is_answered_with_how_to_load_it(target, rows_decoded, tmp_path, as_type):
    tiny_draft(hidden_size=64, vocab_size=384).save_pretrained(tmp_path)
    for options in ({"assistant_model": as_type(tmp_path)}, {"custom_generate": DFlashGenerate(as_type(tmp_path))}):
        with pytest.raises(hf_dflash.UnsupportedOptionError, match=r"hf_dflash\.load_draft\('.*'\)"):
            greedy(target, **options)
    assert not rows_decoded


def test_no_message_prints_a_module(target):
    draft = tiny_draft(hidden_size=64, vocab_size=384)
    with pytest.raises(hf_dflash.UnsupportedOptionError, match="a DFlashGenerate") as caught:
        greedy(target, assistant_model=draft, custom_generate=DFlashGenerate(draft))
    assert len(str(caught.value)) < 500 and "Linear" not in str(caught.value)


@pytest.mark.parametrize("options", [{"stats": 5}, {"trace": 5}])
def test_stats_and_trace_are_checked_before_decoding(target, monkeypatch, options):
    monkeypatch.setattr(target, "forward", lambda *a, **k: pytest.fail("the target ran before the refusal"))
    draft = tiny_draft(hidden_size=64, vocab_size=384)
    with pytest.raises(hf_dflash.UnsupportedOptionError, match=f"`{next(iter(options))}` must be .*found 5"):
        greedy(target, assistant_model=draft, **options)
    with pytest.raises(hf_dflash.UnsupportedOptionError, match=f"`{next(iter(options))}` must be .*found 5"):
        greedy(target, custom_generate=DFlashGenerate(draft, **options))


# `num_assistant_tokens`


def block_of(target, draft, **options) -> int:
    """Return the block size that a call used."""
    stats = []
    target.generate(prompt(), assistant_model=draft, stats=stats.append, **options)
    return max(stats[0].proposed) + 1


@pytest.mark.parametrize("left_over", [3, 10])
@pytest.mark.parametrize("place", ["target", "call"])
def test_a_left_over_num_assistant_tokens_is_reported_and_not_used(caplog, place, left_over):
    target, draft = FAMILIES["llama"].build(0), tiny_draft(hidden_size=64, vocab_size=384)
    options = {"max_new_tokens": NEW, "do_sample": False}
    if place == "target":
        target.generation_config.num_assistant_tokens = left_over
    else:
        options = {"generation_config": GenerationConfig(**options, num_assistant_tokens=left_over)}
    dispatch.logger.warning_once.cache_clear()
    assert block_of(target, draft, **options) == 8
    assert f"`num_assistant_tokens={left_over}` in the generation config" in caplog.text
    if place == "target":
        caplog.clear()
        dispatch.logger.warning_once.cache_clear()
        assert block_of(target, draft, **options, num_assistant_tokens=4) == 5
        assert block_of(target, draft, **options, block_size=3) == 3
        assert "num_assistant_tokens" not in caplog.text, "an explicit option needs no warning"


def test_num_assistant_tokens_of_the_draft_sets_its_block(target):
    draft = tiny_draft(hidden_size=64, vocab_size=384)
    options = {"max_new_tokens": NEW, "do_sample": False}
    draft.generation_config.num_assistant_tokens = 4
    assert block_of(target, draft, **options) == 5
    assert block_of(target, draft, **options, num_assistant_tokens=6) == 7
    draft.generation_config.num_assistant_tokens = 20
    with pytest.raises(hf_dflash.UnsupportedOptionError, match=r"draft\.generation_config\.num_assistant_tokens=20"):
        greedy(target, assistant_model=draft)
    assert hf_dflash.DFlashDraftModel(draft.config).generation_config.num_assistant_tokens is None


# Token healing


@pytest.fixture(scope="module")
def healing_tokenizer():
    """A byte-level tokenizer of 384 tokens, many of which start with another, and the BOS that healing requires."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special, alphabet = ["<pad>", "<s>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=special, initial_alphabet=alphabet)
    inner.train_from_iterator([(Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>")


@pytest.mark.parametrize("place", ["call", "config"])
@pytest.mark.parametrize("with_stop", [False, True])
def test_token_healing_gets_the_tokenizer(target, rows_decoded, healing_tokenizer, place, with_stop):
    """The last token of the prompt, s, is replaced by one that starts with it."""
    tokenizer, ids = healing_tokenizer, healing_tokenizer("draft(target.s", return_tensors="pt").input_ids
    pieces = [tokenizer.decode([token]) for token in range(384)]
    # Single bytes of non-ASCII letters do not decode to text that a stop string could contain.
    odd = [i for i, piece in enumerate(pieces) if not (piece.isascii() and piece.isprintable() and piece)]
    options = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": odd}
    unhealed = target.generate(ids, **options)
    options["token_healing"] = True
    whole = target.generate(ids, **options, tokenizer=tokenizer)
    assert not torch.equal(whole, unhealed), "healing changes nothing, so the test proves nothing"
    if with_stop:
        options["stop_strings"] = [tokenizer.decode(whole[0, -6:-4])]
    if place == "config":
        options = {"generation_config": GenerationConfig(**options, pad_token_id=0)}
    plain = target.generate(ids, **options, tokenizer=tokenizer)
    assert (plain.shape[1] < whole.shape[1]) == with_stop
    draft = oracle_draft(target, whole, all_right)
    assert torch.equal(target.generate(ids, **options, tokenizer=tokenizer, assistant_model=draft), plain)
    assert len(rows_decoded) == 1
    with pytest.raises(hf_dflash.UnsupportedOptionError, match="`(token_healing|stop_strings)=.*` requires"):
        target.generate(ids, **options, assistant_model=draft)
