"""`hf-dflash generate` on a tiny random pair, whose draft is never right: the text must be plain generate's."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dflash_cli import answer as module


@pytest.fixture
def generate(run_cli, tiny_folders):
    def run(*arguments, **options):
        return run_cli("generate", "-t", tiny_folders.target, "-d", tiny_folders.draft, *arguments, **options)

    return run


@pytest.fixture(scope="module")
def plain_ids(tiny_folders):
    """New ids that plain generate writes behind a prompt."""
    target = AutoModelForCausalLM.from_pretrained(tiny_folders.target)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folders.target)

    def ids(prompt: str, tokens: int, **arguments) -> list[int]:
        inputs = tokenizer(prompt, return_tensors="pt")
        torch.manual_seed(7)
        output = target.generate(**inputs, max_new_tokens=tokens, **arguments)
        return output[0, inputs["input_ids"].shape[1] :].tolist()

    return ids


def test_json_has_plain_generates_tokens(generate, plain_ids):
    ended = generate("hello there", "-n", "24", "--json")
    assert ended.code == 0, ended.err
    said = json.loads(ended.out)
    expected = plain_ids("hello there", 24, do_sample=False)
    assert len(set(expected)) > 8, "the reference text must be varied for this comparison to mean anything"
    assert said["token_ids"] == expected
    assert said["statistics"]["new_tokens"] == said["new_tokens"] == 24


def test_sampling_options_reach_generate(generate, plain_ids):
    said = json.loads(generate("hello", "-n", "24", "-T", "0.9", "--top-k", "30", "--seed", "7", "--json").out)
    expected = plain_ids("hello", 24, do_sample=True, temperature=0.9, top_k=30)
    assert said["token_ids"] == expected != plain_ids("hello", 24, do_sample=False)


def test_the_answer_alone_is_on_standard_output(generate):
    said = json.loads(generate("hello", "-n", "12", "--json").out)
    ended = generate("hello", "-n", "12", "--stats")
    assert ended.out.strip() == said["text"].strip()
    assert "acceptance length tau" in ended.err


@pytest.mark.parametrize("source", ["stdin", "dash", "file"])
def test_where_the_prompt_comes_from(generate, tmp_path, source):
    expected = json.loads(generate("a prompt", "-n", "8", "--json").out)["token_ids"]
    if source == "file":
        (tmp_path / "prompt.txt").write_text("a prompt")
        ended = generate("--file", tmp_path / "prompt.txt", "-n", "8", "--json")
    else:
        ended = generate(*["-"] * (source == "dash"), "-n", "8", "--json", stdin="a prompt")
    assert json.loads(ended.out)["token_ids"] == expected


def test_chat_and_system_use_the_template(generate):
    plain = json.loads(generate("hello", "-n", "4", "--json").out)["prompt_tokens"]
    chat = json.loads(generate("hello", "-n", "4", "--json", "--chat").out)["prompt_tokens"]
    system = json.loads(generate("hello", "-n", "4", "--json", "--system", "Be brief.").out)["prompt_tokens"]
    # <|user|>, <|end|> and <|assistant|> around the prompt; <|system|>, nine bytes and <|end|> in front of it.
    assert (chat - plain, system - chat) == (3, 11)


def test_template_options_reach_the_template(generate):
    brief = ["--chat-template-kwargs", '{"brief": true}']
    shorter = json.loads(generate("hello", "-n", "4", "--json", "--chat", *brief).out)
    chat = json.loads(generate("hello", "-n", "4", "--json", "--chat").out)
    assert shorter["prompt_tokens"] == chat["prompt_tokens"] - 1  # without <|end|>
    assert generate("hello", "--chat-template-kwargs", "brief").code == 2
    assert generate("hello", "--chat-template-kwargs", "[]").code == 2


def test_check_finds_the_same_text(generate):
    ended = generate("hello", "-n", "16", "--check")
    assert ended.code == 0
    assert "yes, all 16 tokens" in ended.err


def test_check_tells_a_difference_and_ends_with_1(generate, monkeypatch):
    decode_plainly = module.Answer.decode_plainly

    def spoiled(self, stream):
        decode_plainly(self, stream)
        self.ids = self.ids.clone()
        self.ids[self.prompt_length + 2] = (self.ids[self.prompt_length + 2] + 1) % 200

    monkeypatch.setattr(module.Answer, "decode_plainly", spoiled)
    ended = generate("hello", "-n", "16", "--check")
    assert ended.code == 1
    assert "no, they differ from token 3 of 16" in ended.err
    assert "NOT within the numerical tolerance of its float32 kernels" in " ".join(ended.err.split())


def test_block_size_and_trace(generate, tmp_path):
    ended = generate("hello", "-n", "10", "--block-size", "3", "--trace", tmp_path / "trace.jsonl", "--json")
    rounds = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert len(rounds) == json.loads(ended.out)["statistics"]["rounds"]
    assert max(len(each["candidates"]) for each in rounds) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["hello", "--block-size", "64"], "2 to 8, found 64"),
        (["hello", "--dtype", "int3"], "int3"),
        (["hello", "--quantization", "two-bits"], "two-bits"),
    ],
)
def test_what_cannot_be_done_is_one_line(generate, arguments, expected):
    ended = generate(*arguments)
    assert ended.code == 1
    assert expected in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["hello", "--file", __file__], ["  "]])
def test_no_prompt_or_two_is_wrong_usage(generate, arguments):
    assert generate(*arguments).code == 2


# --- text that is not UTF-8, and byte order marks


@pytest.mark.parametrize("source", ["stdin", "file", "argument", "system"])
def test_a_prompt_that_is_not_utf8_is_named(generate, tmp_path, source):
    bad = b"abc\xff\xfe def"
    (tmp_path / "prompt.txt").write_bytes(bad)
    argument = bad.decode(errors="surrogateescape")  # as Python hands arguments over
    ended, name = {
        "stdin": lambda: (generate("-n", "4", stdin=bad), "standard input"),
        "file": lambda: (generate("-n", "4", "--file", tmp_path / "prompt.txt"), str(tmp_path / "prompt.txt")),
        "argument": lambda: (generate("-n", "4", argument), "the prompt"),
        "system": lambda: (generate("-n", "4", "--system", argument, "hello"), "--system"),
    }[source]()
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"hf-dflash: {name}: found the byte 0xff at character 4, expected UTF-8")
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("source", ["stdin", "file"])
def test_a_byte_order_mark_is_no_part_of_the_prompt(generate, tmp_path, source):
    expected = json.loads(generate("hé", "-n", "8", "--json").out)
    marked = "\ufeffhé".encode()
    (tmp_path / "prompt.txt").write_bytes(marked)
    given = {"stdin": {"stdin": marked}, "file": {}}[source]
    ended = generate(*["--file", tmp_path / "prompt.txt"] * (source == "file"), "-n", "8", "--json", **given)
    result = json.loads(ended.out)
    assert (result["prompt_tokens"], result["token_ids"]) == (expected["prompt_tokens"], expected["token_ids"])


def test_a_folder_as_the_file_is_wrong_usage(generate, tmp_path):
    ended = generate("--file", tmp_path)
    assert ended.code == 2
    assert "directory" in ended.err


def test_a_trace_in_a_folder_that_is_not_there_is_wrong_usage(generate, tmp_path):
    ended = generate("hello", "--trace", tmp_path / "nowhere" / "trace.jsonl")
    assert ended.code == 2
    assert "there is no folder" in ended.err


def test_json_without_a_round_has_null_and_no_nan(generate):
    def fail(constant):
        raise AssertionError(f"{constant} is not JSON")

    result = json.loads(generate("hello", "-n", "1", "--json").out, parse_constant=fail)
    assert result["statistics"]["rounds"] == 0
    assert result["statistics"]["tau"] is None and result["statistics"]["acceptance_rate"] is None
