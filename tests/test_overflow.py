"""A candidate that overflows turns the logits of the tokens before it in the same forward into NaN; the text must not
change, for every family, greedy and sampled.

In float16 this happens with real targets (Gemma 3): attention multiplies masked keys and values by zero, and zero times
infinity is NaN. Here, in float32, the embedding of one id that is in no text is infinite.
"""

import json
from contextlib import contextmanager

import pytest
import torch
from families import FAMILIES, SERVED
from lossless import BLOCK, MODES, assert_same, assert_varied, both, prompt
from oracle import fixed, none_right, randomly

NEW = 24


@contextmanager
def overflowing(target, token: int):
    """Make the embedding of one id infinite."""

    def overflow(_module, inputs, output):
        return output.masked_fill((inputs[0] == token)[..., None], float("inf"))

    handle = target.get_input_embeddings().register_forward_hook(overflow)
    try:
        yield
    finally:
        handle.remove()


def unused_token(target, mode: str) -> int:
    """Return an id that is neither in the prompt nor in plain generate's text."""
    torch.manual_seed(0)
    text = target.generate(prompt(), max_new_tokens=NEW, **MODES[mode])
    return min(set(range(5, 300)) - set(text[0].tolist()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SERVED)
def test_a_rejected_candidate_that_overflows_changes_nothing(name, mode):
    target = FAMILIES[name].build(0)
    token = unused_token(target, mode)
    with overflowing(target, token):
        pattern = randomly(2, BLOCK - 2)
        pair = both(target, {"inputs": prompt()}, pattern, wrong=token, max_new_tokens=NEW, **MODES[mode])
    assert_varied(pair.plain, NEW)
    assert_same(pair)


def test_a_block_that_commits_nothing_leaves_no_trace(tmp_path):
    target = FAMILIES["llama"].build(0)
    token = unused_token(target, "greedy")
    records = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    with overflowing(target, token):
        options = {"max_new_tokens": NEW, "do_sample": False, "wrong": token, **records}
        pair = both(target, {"inputs": prompt()}, fixed(2), trace=tmp_path / "trace.jsonl", **options)
    assert_same(pair)
    stats = pair.statistics
    assert stats.committed.count(0) > 2
    # After a block that committed nothing, the anchor is verified alone.
    for committed, proposed in zip(stats.committed, stats.proposed[1:], strict=False):
        assert (committed == 0) == (proposed == 0)
    assert sum(stats.committed) + 1 == NEW
    rounds = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [len(each["committed"]) for each in rounds] == stats.committed
    assert sum((each["committed"] for each in rounds), []) == pair.ours.sequences[0, -NEW + 1 :].tolist()


def test_a_target_that_overflows_by_itself_gives_the_same_text():
    """Plain generate continues with the argmax of NaN logits, and so does generate with a draft."""
    target = FAMILIES["llama"].build(0)
    text = target.generate(prompt(), max_new_tokens=NEW, do_sample=False)
    with overflowing(target, int(text[0, -8])):
        pair = both(target, {"inputs": prompt()}, none_right, max_new_tokens=NEW, do_sample=False)
    assert pair.plain[0, -8:].tolist() != text[0, -8:].tolist()
    assert_same(pair)
