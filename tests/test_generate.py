"""`generate` with a DFlash draft: streamers, turns, refusals, threads and interruptions."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from lossless import BLOCK, assert_same, both, prompt
from oracle import all_right, fixed, oracle_draft, randomly
from tiny_drafts import tiny_draft
from transformers import (
    AsyncTextIteratorStreamer,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)

from hf_dflash import (
    DFlashDraftModel,
    DFlashGenerate,
    DFlashOutput,
    PairingError,
    UnsupportedOptionError,
    UnsupportedTargetError,
)
from hf_dflash.target.cache import CACHE_KEYWORD

NEW = 24


@pytest.fixture(scope="module")
def target():
    return FAMILIES["llama"].build(0)


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer of 384 tokens, some with several letters, so that stop strings cross tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=["<pad>"], initial_alphabet=alphabet)
    inner.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>")


def greedy(target, ids, **options):
    return target.generate(ids, max_new_tokens=NEW, do_sample=False, **options)


def oracle_for(target, ids, pattern=all_right, **options):
    """Return a draft that knows the greedy text of `ids`."""
    return oracle_draft(target, greedy(target, ids, **options), pattern)


class Recorder(TextStreamer):
    """Records what a streamer receives."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.values, self.ends = [], 0

    def put(self, value):
        self.values.append((tuple(value.shape), value.device.type, value.flatten().tolist()))

    def end(self):
        self.ends += 1


# Streamers


@pytest.mark.parametrize("sampled", [False, True])
def test_a_streamer_gets_the_same_calls(target, tokenizer, sampled):
    recorders = [Recorder(tokenizer), Recorder(tokenizer)]
    draft = None
    for recorder in recorders:
        torch.manual_seed(0)
        more = {} if draft is None else {"assistant_model": draft}
        text = target.generate(prompt(), max_new_tokens=NEW, do_sample=sampled, streamer=recorder, **more)
        draft = oracle_draft(target, text, randomly(1, 7))
    assert recorders[0].values == recorders[1].values
    assert len(recorders[1].values) == 1 + NEW
    assert recorders[1].ends == 1


def test_text_iterator_streamer_in_a_thread(target, tokenizer):
    def text_of(draft):
        streamer = TextIteratorStreamer(tokenizer, timeout=60)
        worker = threading.Thread(target=lambda: greedy(target, prompt(), streamer=streamer, assistant_model=draft))
        worker.start()
        text = "".join(streamer)
        worker.join()
        return text

    plain = text_of(None)
    assert plain == text_of(oracle_for(target, prompt(), randomly(2, 7))) and len(plain) > NEW


def test_async_text_iterator_streamer(target, tokenizer):
    async def text_of(draft):
        streamer = AsyncTextIteratorStreamer(tokenizer)
        worker = threading.Thread(target=lambda: greedy(target, prompt(), streamer=streamer, assistant_model=draft))
        worker.start()
        text = "".join([piece async for piece in streamer])
        worker.join()
        return text

    plain = asyncio.run(text_of(None))
    assert plain == asyncio.run(text_of(oracle_for(target, prompt(), randomly(2, 7)))) and len(plain) > NEW


def hooks_of(target):
    """Return the forward hooks of every module, by id."""
    return [list(module._forward_hooks) + list(module._forward_pre_hooks) for module in target.modules()]


def failing(after: int, error: BaseException):
    """Return a logits processor that raises on its `after`-th call."""
    calls = []

    def processor(input_ids, scores):
        calls.append(1)
        if len(calls) == after:
            raise error
        return scores

    return LogitsProcessorList([processor])


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["exception", "Ctrl-C"])
def test_after_an_exception_the_streamer_has_ended_and_the_next_call_is_correct(target, tokenizer, error):
    draft = oracle_for(target, prompt(), randomly(2, 7))
    recorder, before = Recorder(tokenizer), hooks_of(target)
    with pytest.raises(type(error)):
        greedy(target, prompt(), assistant_model=draft, streamer=recorder, logits_processor=failing(9, error))
    assert recorder.ends == 1
    assert hooks_of(target) == before
    draft._row, draft.rounds = -1, 0
    assert torch.equal(greedy(target, prompt(), assistant_model=draft), greedy(target, prompt()))


@pytest.mark.parametrize("start", [3, 8, 13, 19])
def test_stop_strings(target, tokenizer, start):
    """The stop string is a piece of the plain text, from the middle of one token to the middle of another."""
    pieces = [tokenizer.decode([token]) for token in range(384)]
    # Single bytes of non-ASCII letters do not decode to text that a stop string could contain.
    options = {
        "suppress_tokens": [i for i, piece in enumerate(pieces) if not (piece.isascii() and piece.isprintable())]
    }
    new = greedy(target, prompt(), **options)[0, 9:]
    stop = (pieces[new[start]] + tokenizer.decode(new[start + 1 : start + 3]) + pieces[new[start + 3]])[1:-1]
    options |= {"stop_strings": [stop], "tokenizer": tokenizer}
    plain = greedy(target, prompt(), **options)
    assert 9 < plain.shape[1] <= 9 + start + 4
    for pattern in (fixed(0), fixed(2), all_right):
        ours = greedy(target, prompt(), assistant_model=oracle_for(target, prompt(), pattern, **options), **options)
        assert ours.tolist() == plain.tolist()


def test_stop_strings_in_the_generation_config(tokenizer):
    target = FAMILIES["llama"].build(0)
    stop = tokenizer.decode(greedy(target, prompt())[0, 15:17])
    draft = oracle_for(target, prompt())
    target.generation_config.stop_strings = [stop]
    plain = greedy(target, prompt(), tokenizer=tokenizer)
    assert plain.shape[1] < 9 + NEW
    assert greedy(target, prompt(), tokenizer=tokenizer, assistant_model=draft).tolist() == plain.tolist()
    assert target.generation_config.stop_strings == [stop]
    with pytest.raises(UnsupportedOptionError, match="stop_strings.*tokenizer"):
        greedy(target, prompt(), assistant_model=draft)


# Turns


def chat(target, use_draft: bool, family_turns=(9, 5, 1), **options):
    """Run several turns on one cache; return (ids of each turn, committed tokens of each round and turn, cache)."""
    from transformers import DynamicCache

    cache = DynamicCache(config=target.config)
    ids, texts, taus = prompt(family_turns[0]), [], []
    reference = chat(target, False, family_turns)[0][-1] if use_draft else None
    draft = oracle_draft(target, reference, fixed(3)) if use_draft else None
    for turn in range(len(family_turns)):
        stats = []
        more = {"assistant_model": draft, "stats": stats.append} if use_draft else {}
        ids = target.generate(ids, max_new_tokens=12, do_sample=False, **{CACHE_KEYWORD: cache}, **more, **options)
        texts.append(ids)
        taus += [stats[0].committed] if stats else []
        if turn + 1 < len(family_turns):
            ids = torch.cat([ids, prompt(family_turns[turn + 1], seed=turn + 50)], dim=1)
    return texts, taus, cache


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_turns_on_the_cache_of_the_previous_turn(family):
    target = FAMILIES[family].build(0)
    plain, _, _ = chat(target, False)
    ours, taus, cache = chat(target, True)
    assert [t.tolist() for t in plain] == [t.tolist() for t in ours]
    # Later turns accept as much as the first: the draft's context came along with the cache.
    assert [committed[0] for committed in taus] == [4, 4, 4]
    assert cache.get_seq_length() == ours[-1].shape[1] - 1


def test_the_drafts_context_of_turn_two_equals_a_fresh_one(target):
    """A real draft network proposes the same blocks in turn 2 as in one call over the whole conversation."""
    from transformers import DynamicCache

    class Watched(DFlashDraftModel):
        def propose(self, *arguments):
            proposals.append(super().propose(*arguments).tolist())
            return torch.tensor(proposals[-1])

    draft, proposals = tiny_draft(hidden_size=64, vocab_size=384), []
    draft.__class__ = Watched
    cache = DynamicCache(config=target.config)
    first = greedy(target, prompt(), assistant_model=draft, **{CACHE_KEYWORD: cache})
    conversation = torch.cat([first, prompt(5, seed=3)], dim=1)
    per_cache = []
    for turn_cache in (cache, DynamicCache(config=target.config)):
        proposals.clear()
        greedy(target, conversation, assistant_model=draft, **{CACHE_KEYWORD: turn_cache})
        per_cache.append(list(proposals))
    assert per_cache[0] == per_cache[1] and len(per_cache[0]) > 10


def test_plain_generate_continues_on_our_cache_and_vice_versa(target):
    from transformers import DynamicCache

    reference = target.generate(prompt(), max_new_tokens=36, do_sample=False)
    for order in ((True, False, True), (False, True, False)):
        cache, ids = DynamicCache(config=target.config), prompt()
        for use_draft in order:
            more = {"assistant_model": oracle_draft(target, reference, randomly(7, 5))} if use_draft else {}
            ids = target.generate(ids, max_new_tokens=12, do_sample=False, **{CACHE_KEYWORD: cache}, **more)
        assert ids.tolist() == reference.tolist()


def test_a_cropped_cache_is_continued(target):
    """A prefix shared by many prompts: the cache is cropped back to it between calls."""
    from transformers import DynamicCache

    cache, draft = DynamicCache(config=target.config), tiny_draft(hidden_size=64, vocab_size=384)
    system = prompt(11)
    for seed in range(3):
        ids = torch.cat([system, prompt(4, seed=seed)], dim=1)
        ours = greedy(target, ids, assistant_model=draft, **{CACHE_KEYWORD: cache})
        assert ours.tolist() == greedy(target, ids).tolist()
        cache.crop(11 - cache.get_seq_length())


@pytest.mark.parametrize("first,second", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_inference_mode_and_no_grad_share_a_cache(target, first, second):
    from transformers import DynamicCache

    draft = tiny_draft(hidden_size=64, vocab_size=384)
    reference = target.generate(prompt(), max_new_tokens=2 * NEW, do_sample=False)
    cache, ids = DynamicCache(config=target.config), prompt()
    for mode in (first, second):
        with mode():
            ids = greedy(target, ids.clone(), assistant_model=draft, **{CACHE_KEYWORD: cache})
    assert ids.tolist() == reference.tolist()


def test_a_draft_in_training_mode_runs_without_dropout(target, tmp_path):
    draft = tiny_draft(hidden_size=64, vocab_size=384, attention_dropout=0.9).train()
    trace = tmp_path / "rounds.jsonl"
    for seed in range(2):
        torch.manual_seed(seed)
        greedy(target, prompt(), assistant_model=draft, trace=trace)
    rounds = trace.read_text().splitlines()
    assert draft.training
    assert rounds[: len(rounds) // 2] == rounds[len(rounds) // 2 :] and len(rounds) > 20


# Interleaving


def test_two_threads_on_one_target_and_one_draft(target):
    draft = tiny_draft(hidden_size=64, vocab_size=384, block_size=6)
    prompts = [prompt(9, seed=1), prompt(17, seed=2)]
    expected = [target.generate(p, max_new_tokens=60, do_sample=False).tolist() for p in prompts]
    stats_alone = []
    for p in prompts:
        target.generate(p, max_new_tokens=60, do_sample=False, assistant_model=draft, stats=stats_alone.append)
    results, errors, gate = [None, None], [], threading.Barrier(2)

    def work(which):
        try:
            gate.wait()
            for _ in range(3):
                stats = []
                ids = target.generate(
                    prompts[which], max_new_tokens=60, do_sample=False, assistant_model=draft, stats=stats.append
                )
                results[which] = (ids.tolist(), stats[0].accepted)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors
    assert [r[0] for r in results] == expected
    assert [r[1] for r in results] == [s.accepted for s in stats_alone]


def test_a_generation_abandoned_midway_leaves_nothing_behind(target, tokenizer):
    class Abandoned(Exception):
        pass

    class Abandoning(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.values) == 8:
                raise Abandoned

    draft, before = oracle_for(target, prompt(), randomly(3, 7)), hooks_of(target)
    with pytest.raises(Abandoned):
        greedy(target, prompt(), assistant_model=draft, streamer=Abandoning(tokenizer))
    draft._row, draft.rounds = -1, 0
    assert greedy(target, prompt(), assistant_model=draft).tolist() == greedy(target, prompt()).tolist()
    assert hooks_of(target) == before


# Refusals, before any forward


@pytest.fixture
def no_forward(target, monkeypatch):
    """Fail if the target's forward is called."""
    monkeypatch.setattr(target, "forward", lambda *a, **k: pytest.fail("the target ran before the refusal"))


REFUSED = {
    "num_beams": {"num_beams": 3},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "high"},
    "use_cache": {"use_cache": False},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 2},
    "assistant_confidence_threshold": {"assistant_confidence_threshold": 0.3},
    "num_assistant_tokens_schedule": {"num_assistant_tokens_schedule": "heuristic"},
    "static cache": {"cache_implementation": "static"},
    "paged": {"cache_implementation": "paged"},
    "offloaded cache": {"cache_implementation": "offloaded"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_option(target, no_forward, name):
    draft = tiny_draft(hidden_size=64, vocab_size=384)
    with pytest.raises(UnsupportedOptionError, match=name):
        target.generate(prompt(), max_new_tokens=4, assistant_model=draft, **REFUSED[name])


@pytest.mark.parametrize(
    "option", [{"block_size": 9}, {"block_size": 1}, {"block_size": True}, {"num_assistant_tokens": 8}]
)
def test_block_sizes_out_of_range_name_the_option_and_the_checkpoint(target, no_forward, option):
    draft = tiny_draft(hidden_size=64, vocab_size=384)
    with pytest.raises(UnsupportedOptionError, match="dflash_config.block_size"):
        target.generate(prompt(), max_new_tokens=4, assistant_model=draft, **option)
    with pytest.raises(UnsupportedOptionError, match="disagree"):
        target.generate(prompt(), max_new_tokens=4, assistant_model=draft, block_size=4, num_assistant_tokens=4)


def test_attentions_that_sdpa_does_not_compute_are_refused_before_the_first_token(target, tokenizer):
    assert target.config._attn_implementation == "sdpa"
    draft, recorder = tiny_draft(hidden_size=64, vocab_size=384), Recorder(tokenizer)
    options = {"return_dict_in_generate": True, "output_attentions": True, "streamer": recorder}
    with pytest.raises(UnsupportedOptionError, match='`output_attentions` .*attn_implementation="eager"'):
        target.generate(prompt(), max_new_tokens=4, assistant_model=draft, **options)
    assert len(recorder.values) == 1, "more than the prompt was streamed"


def test_encoder_decoder_targets_are_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2))
    with pytest.raises(UnsupportedOptionError, match="encoder-decoder"):
        t5.generate(prompt(4, high=60), assistant_model=tiny_draft(hidden_size=16, vocab_size=64))


@pytest.mark.parametrize(
    "draft,number", [({"hidden_size": 32}, "32"), ({"vocab_size": 300}, "300"), ({"taps": (0, 9)}, "9")]
)
def test_wrong_pairings_are_refused_before_any_forward(target, no_forward, draft, number):
    draft = tiny_draft(**{"hidden_size": 64, "vocab_size": 384, **draft})
    with pytest.raises(PairingError, match=number):
        target.generate(prompt(), max_new_tokens=4, assistant_model=draft)


def test_several_rows_refuse_what_cannot_be_split(target):
    draft = tiny_draft(hidden_size=64, vocab_size=384)
    ids = prompt().repeat(2, 1)
    options = {"return_dict_in_generate": True, "output_scores": True}
    with pytest.raises(UnsupportedOptionError, match="output_scores.*2 rows"):
        target.generate(ids, max_new_tokens=4, assistant_model=draft, **options)
    with pytest.raises(UnsupportedOptionError, match="max_time"):
        target.generate(ids, max_new_tokens=4, assistant_model=draft, max_time=9.0)
    with pytest.raises(UnsupportedOptionError, match="UnbatchedClassifierFreeGuidance"):
        target.generate(ids, max_new_tokens=4, assistant_model=draft, guidance_scale=2.0)

    class Never(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    with pytest.raises(UnsupportedOptionError, match="eos_token_id"):
        criteria = StoppingCriteriaList([Never()])
        target.generate(ids, max_new_tokens=4, assistant_model=draft, stopping_criteria=criteria)


def test_prefix_allowed_tokens_fn_gets_the_row_index(target):
    ids = torch.cat([prompt(seed=1), prompt(seed=2)])
    options = {"max_new_tokens": 9, "do_sample": False}
    options["prefix_allowed_tokens_fn"] = lambda row, seen: range(50 + 100 * row, 120 + 100 * row)
    plain = target.generate(ids, **options)
    ours = target.generate(ids, assistant_model=tiny_draft(hidden_size=64, vocab_size=384), **options)
    assert plain.tolist() == ours.tolist() and plain[0, 9:].max() < 120 and plain[1, 9:].min() >= 150


def test_a_target_with_several_residual_streams_is_refused():
    if not FAMILIES["gemma3n"].available:
        pytest.skip("this transformers has no Gemma 3n")
    target = FAMILIES["gemma3n"].build(0)
    draft = tiny_draft(hidden_size=target.config.get_text_config().hidden_size, vocab_size=target.config.vocab_size)
    with pytest.raises(UnsupportedTargetError, match="residual streams"):
        target.generate(prompt(), max_new_tokens=4, assistant_model=draft)


# Statistics


def test_statistics_trace_and_output(target, tmp_path):
    reference = greedy(target, prompt())
    collected, trace = [], tmp_path / "rounds.jsonl"
    options = {"stats": collected.append, "trace": trace, "return_dict_in_generate": True}
    out = greedy(target, prompt(), assistant_model=oracle_draft(target, reference, fixed(3), BLOCK), **options)
    assert isinstance(out, DFlashOutput)
    stats = out.dflash_stats
    assert collected == [stats]
    # 24 tokens: one from the prefill, then rounds of 4 until 3 are left for the last round.
    assert stats.committed == [4, 4, 4, 4, 4, 3] and stats.new_tokens == NEW
    assert stats.tau == 23 / 6
    assert stats.proposed == [5, 5, 5, 5, 5, 2] and stats.accepted == [3, 3, 3, 3, 3, 2]
    assert stats.acceptance_rate == 17 / 27
    # The last round proposed 2, both correct; position 3 was proposed in 5 rounds and correct in all of them.
    assert stats.acceptance_by_position == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert stats.histogram == [0, 0, 1, 5, 0, 0]
    assert stats.peak_draft_bytes > 0
    assert stats.total_seconds >= sum(stats.seconds.values()) > 0
    assert all(seconds > 0 for seconds in stats.seconds.values())
    rounds = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [r["accepted"] for r in rounds] == stats.accepted
    written = [token for r in rounds for token in r["committed"]]
    assert written == reference[0, 10:].tolist()
    assert rounds[0]["anchor"] == int(reference[0, 9]) and len(rounds[0]["candidates"]) == 5
    json.dumps(stats.as_dict())


def test_near_zero_acceptance_warns_once(target, monkeypatch):
    from hf_dflash.decoding import statistics

    messages = []
    monkeypatch.setattr(statistics.logger, "warning", messages.append)
    reference = target.generate(prompt(), max_new_tokens=80, do_sample=False)
    for pattern, expected in ((fixed(0), 1), (fixed(2), 0)):
        messages.clear()
        draft = oracle_draft(target, reference, pattern)
        target.generate(prompt(), max_new_tokens=80, do_sample=False, assistant_model=draft)
        assert len(messages) == expected
    assert not messages


@pytest.mark.parametrize("length", [8, 64])
def test_the_prompts_taps_are_freed(target, length):
    """After the first block nothing as long as the prompt is pending: the draft's peak is its cache plus the prompt's
    taps once.
    """
    from hf_dflash.decoding.drafting import DraftContext

    pending = []
    take = DraftContext.take

    def spying(self):
        pending.append(sum(taps.shape[1] for taps in self._pending))
        return take(self)

    DraftContext.take = spying
    try:
        greedy(target, prompt(length), assistant_model=oracle_for(target, prompt(length), fixed(1)))
    finally:
        DraftContext.take = take
    assert pending[0] == length and set(pending[1:]) == {2}


def test_no_full_vocabulary_logits_for_the_prompt(target, monkeypatch):
    shapes = []
    handle = target.lm_head.register_forward_hook(lambda m, i, o: shapes.append(o.shape[1]))
    draft = oracle_for(target, prompt(30), fixed(1))
    shapes.clear()
    greedy(target, prompt(30), assistant_model=draft)
    handle.remove()
    assert shapes[0] == 1 and max(shapes) <= 8


def test_custom_generate_callable_keeps_its_options(target):
    reference, stats = greedy(target, prompt()), []
    method = DFlashGenerate(oracle_draft(target, reference, all_right), block_size=4, stats=stats.append)
    assert greedy(target, prompt(), custom_generate=method).tolist() == reference.tolist()
    assert max(stats[0].committed) == 4
    with pytest.raises(UnsupportedOptionError, match="custom_generate"):
        greedy(target, prompt(), custom_generate=method, assistant_model=method.draft)


def test_sampled_texts_match_over_many_seeds(target):
    for seed in range(6):
        assert_same(
            both(target, {"inputs": prompt(seed=seed)}, randomly(seed, 5), seed=seed, max_new_tokens=20, do_sample=True)
        )
