"""`hf-dflash chat`: turns, commands, the cache over turns, Ctrl-C."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_dflash.pair import load_pair
from hf_dflash_cli import chat
from hf_dflash_cli import conversation as module
from hf_dflash_cli.conversation import Conversation

TOKENS = 12
ARGUMENTS = {"max_new_tokens": TOKENS, "do_sample": False}


@pytest.fixture(scope="module")
def pair(tiny_folders):
    return load_pair(tiny_folders.target, tiny_folders.draft)


@pytest.fixture
def conversation(pair):
    return Conversation(pair, ARGUMENTS)


@pytest.fixture
def reads(pair):
    """How many tokens each forward of the target reads."""
    lengths: list[int] = []
    hook = pair.target.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield lengths
    hook.remove()


def fresh_answer(pair, messages) -> str:
    """What plain generate says to a chat that it reads from its beginning, in another copy of the target."""
    target = AutoModelForCausalLM.from_pretrained(pair.target_name)
    inputs = pair.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = target.generate(**inputs, **ARGUMENTS)[0, inputs["input_ids"].shape[1] :]
    return pair.tokenizer.decode(ids, skip_special_tokens=True)


def test_every_turn_is_plain_generates(pair, conversation):
    for turn in ("first", "and then?", "last"):
        conversation.answer(turn)
        assert conversation.messages[-1]["content"] == fresh_answer(pair, conversation.messages[:-1])


def test_the_cache_is_kept_over_turns(conversation, reads, monkeypatch):
    # Bytes that are no text decode to a replacement mark and come back as other tokens, so say something readable.
    monkeypatch.setattr(conversation.pair.tokenizer, "decode", lambda ids, **_: "readable")
    conversation.answer("a long first question, to be read only once")
    first = reads[0]
    reads.clear()
    conversation.answer("short")
    whole = first + TOKENS + len("short")
    assert reads[0] < whole / 2


def test_reset_forgets_the_turns_and_keeps_the_system_message(pair):
    conversation = Conversation(pair, ARGUMENTS, system="Be brief.")
    conversation.answer("hello")
    first = conversation.messages[-1]
    conversation.reset()
    assert conversation.messages == []
    conversation.answer("hello")
    assert conversation.messages[-1] == first


def test_ctrl_c_ends_the_answer_and_not_the_chat(pair, conversation, monkeypatch, capsys):
    put, count = module.TextStreamer.put, 0

    def interrupted(self, value):
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        put(self, value)

    monkeypatch.setattr(module.TextStreamer, "put", interrupted)
    conversation.answer("hello")
    said = conversation.messages[-1]["content"]
    monkeypatch.undo()
    whole = fresh_answer(pair, [{"role": "user", "content": "hello"}])
    assert said and whole.startswith(said.rstrip("�")) and len(said) < len(whole)
    conversation.answer("go on")
    assert conversation.messages[-1]["content"] == fresh_answer(pair, conversation.messages[:-1])


def test_block_size_is_checked_and_used(conversation):
    assert "2 to 8" in chat.run_command(conversation, "/block", ["9"])
    assert "number" in chat.run_command(conversation, "/block", ["two"])
    chat.run_command(conversation, "/block", ["3"])
    conversation.answer("hello")
    assert max(conversation.statistics.proposed) == 2
    assert "8" in chat.run_command(conversation, "/block", [])


def test_commands_between_turns(run_cli, tiny_folders):
    typed = "/stats\n/help\n/nonsense\n\nhello\n/stats\n/reset\n/quit\nnot read\n"
    ended = run_cli("chat", "-t", tiny_folders.target, "-d", tiny_folders.draft, "-n", "8", stdin=typed)
    assert ended.code == 0
    for expected in (
        "No answer yet",
        "forget the conversation",
        "Unknown command /nonsense",
        "acceptance length tau",
        "new conversation",
    ):
        assert expected in ended.err


def test_end_of_input_leaves(run_cli, tiny_folders):
    ended = run_cli("chat", "-t", tiny_folders.target, "-d", tiny_folders.draft, "-n", "4", "--stats", stdin="hello\n")
    assert ended.code == 0
    assert "acceptance length tau" in ended.err


def test_a_cache_that_shares_nothing_is_left(conversation):
    conversation.answer("hello")
    conversation._read = torch.full_like(conversation._read, 1)
    before = conversation._cache
    assert conversation._cache_for(torch.tensor([[5, 6, 7]])) is not before


def test_a_message_that_is_not_utf8_is_named_and_not_sent(run_cli, tiny_folders):
    typed = b"\xef\xbb\xbfhello\nabc\xff\n/stats\n"
    ended = run_cli("chat", "-t", tiny_folders.target, "-d", tiny_folders.draft, "-n", "8", stdin=typed)
    assert ended.code == 0
    assert "The message was not sent: found the byte 0xff at character 4" in ended.err
    assert ended.err.count("tokens/s") == 1, "the other message is answered"
