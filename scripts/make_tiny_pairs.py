"""Make the tiny trained pairs of tests/data/pairs: a dense and a hybrid target, and a DFlash draft for each.

The targets are language models of about 1.5 million parameters, trained on the source of Python's standard library;
the drafts learn from text that their target wrote. Everything comes from what is installed: no downloads.

    OMP_NUM_THREADS=1 python scripts/make_tiny_pairs.py --out tests/data/pairs
    OMP_NUM_THREADS=1 python scripts/make_tiny_pairs.py --out tests/data/pairs --only hybrid
"""

import argparse
import ast
import json
import pathlib
import random
import sysconfig
import time

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hf_dflash.draft.configuration_dflash import DFlashConfig
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.target import Target
from hf_dflash.training.evaluation import Acceptance, measure_acceptance
from hf_dflash.training.losses import cross_entropy, decay_weights
from hf_dflash.training.packing import IGNORED, choose_anchors, pack_blocks
from hf_dflash.training.states import StateCapture, run_blocks

EOS, MASK, START, END = "<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>"
VOCABULARY, HIDDEN, LAYERS, BLOCK, TAPS = 512, 128, 8, 8, [1, 3, 6]
PROMPT, RESPONSE = 24, 104
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def functions() -> list[str]:
    """Sources of the functions of the standard library's top-level modules, in an order that is always the same."""
    found = set()
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                body = lines[node.lineno - 1 : node.end_lineno]
                text = "\n".join(line[node.col_offset :] for line in body)
                if 80 < len(text) < 1500 and text.isascii():
                    found.add(text)
    texts = sorted(found)
    random.Random(0).shuffle(texts)
    return texts


def make_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 512 entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS, MASK, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_target(kind: str) -> transformers.PreTrainedModel:
    """An untrained target: `dense` a Llama, `hybrid` a Qwen3.5 with three gated delta nets to each attention layer."""
    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 320,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "initializer_range": 0.05,
    }
    if kind == "dense":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared))
    return transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(
            **shared,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_conv_kernel_dim=4,
            layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (LAYERS // 4),
        )
    )


def schedule(step: int, steps: int) -> float:
    """Warm-up over 4 %, then a straight line down to a tenth."""
    return min(1.0, (step + 1) / (0.04 * steps), 0.1 + 0.9 * (1 - step / steps))


def train(model: torch.nn.Module, loss_at, steps: int, rate: float, name: str) -> None:
    """AdamW on `loss_at(step)`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.95))
    began = time.time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(step, steps)
        loss = loss_at(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(f"{name} step {step} loss {loss.item():.3f} ({time.time() - began:.0f} s)", flush=True)


def train_target(model: transformers.PreTrainedModel, stream: torch.Tensor, steps: int, name: str) -> None:
    """Next-token prediction on windows of the token stream."""
    generator = torch.Generator().manual_seed(1)

    def loss_at(step: int) -> torch.Tensor:
        starts = torch.randint(0, len(stream) - 129, (12,), generator=generator)
        batch = torch.stack([stream[start : start + 128] for start in starts.tolist()])
        return model(input_ids=batch, labels=batch).loss

    train(model, loss_at, steps, 3e-3, name)


@torch.no_grad()
def responses(model: transformers.PreTrainedModel, prompts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """The target's greedy continuation of every prompt, its end-of-text token kept."""
    pairs = []
    for at in range(0, len(prompts), 128):
        batch = prompts[at : at + 128]
        output = model.generate(
            input_ids=torch.tensor(batch),
            attention_mask=torch.ones(len(batch), PROMPT),
            max_new_tokens=RESPONSE,
            do_sample=False,
        )
        for prompt, row in zip(batch, output[:, PROMPT:].tolist(), strict=True):
            pairs.append((prompt, row[: row.index(0) + 1] if 0 in row else row))
    return pairs


def draft_config(kind: str) -> DFlashConfig:
    """Two layers with the target's sizes."""
    return DFlashConfig(
        hidden_size=HIDDEN,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        vocab_size=VOCABULARY,
        block_size=BLOCK,
        mask_token_id=1,
        target_layer_ids=TAPS,
        target_name_or_path=f"tests/data/pairs/{kind}/target",
        target_hidden_size=HIDDEN,
        target_vocab_size=VOCABULARY,
        target_num_hidden_layers=LAYERS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def train_draft(
    draft: DFlashDraftModel, target: Target, pairs: list[tuple[list[int], list[int]]], steps: int, name: str
) -> None:
    """Weighted cross-entropy on 16 random blocks of 8 responses a step."""
    generator = torch.Generator().manual_seed(2)
    capture = StateCapture(target, TAPS)
    weights = decay_weights(BLOCK, 4.0)
    pairs = [(prompt, response) for prompt, response in pairs if len(response) > 2]

    def loss_at(step: int) -> torch.Tensor:
        chosen = [pairs[i] for i in torch.randint(0, len(pairs), (8,), generator=generator).tolist()]
        lengths = [len(prompt) + len(response) for prompt, response in chosen]
        ids = torch.zeros(len(chosen), max(lengths), dtype=torch.long)
        for row, (prompt, response) in enumerate(chosen):
            ids[row, : lengths[row]] = torch.tensor(prompt + response)
        anchors = [choose_anchors(PROMPT, length, 16, generator) for length in lengths]
        packed = pack_blocks(ids, lengths, anchors, BLOCK, draft.config.mask_token_id)
        hidden = run_blocks(draft, draft, target, capture(ids).taps, packed)
        learned = packed.labels != IGNORED
        entropy, _, _ = cross_entropy(hidden[learned], packed.labels[learned], target.head)
        weight = weights.expand(*learned.shape[:2], -1)[learned[..., 1:]]
        return (entropy * weight).sum() / weight.sum()

    train(draft, loss_at, steps, 2e-3, name)


def make_pair(kind: str, out: pathlib.Path, steps: tuple[int, int], prompts: int) -> dict:
    """Train, save and measure one pair."""
    began = time.time()
    texts = functions()
    held_out, texts = texts[:300], texts[300:]
    tokenizer = make_tokenizer(texts)
    encoded = [tokenizer(text)["input_ids"] for text in texts]
    stream = torch.tensor([token for ids in encoded for token in [*ids, 0]])
    torch.manual_seed(0)
    model = make_target(kind)
    train_target(model, stream, steps[0], f"{kind} target")
    # The draft must learn from the weights that the tests will load, so they are rounded first.
    model = model.to(torch.bfloat16)
    model.save_pretrained(out / kind / "target")
    tokenizer.save_pretrained(out / kind / "target")
    model = model.float().eval().requires_grad_(False)

    starts = [ids[:PROMPT] for ids in encoded if len(ids) > PROMPT]
    held_out_starts = [ids[:PROMPT] for ids in (tokenizer(text)["input_ids"] for text in held_out) if len(ids) > PROMPT]
    pairs = responses(model, starts[:prompts])
    target = Target(model)
    torch.manual_seed(3)
    draft = DFlashDraftModel(draft_config(kind))
    train_draft(draft, target, pairs, steps[1], f"{kind} draft")
    draft.to(torch.bfloat16).save_pretrained(out / kind / "draft")
    draft.float()
    held_out_starts = held_out_starts[:64]
    (out / "held_out.json").write_text(json.dumps(held_out_starts) + "\n", encoding="utf-8")
    evaluation = responses(model, held_out_starts)
    measured: Acceptance = measure_acceptance(draft, target, evaluation)
    return {
        "target parameters": model.num_parameters(),
        "draft parameters": draft.num_parameters(),
        "training tokens": len(stream),
        "steps (target, draft)": list(steps),
        "responses": len(pairs),
        "held-out prompts": len(evaluation),
        "held-out tokens": measured.tokens,
        "held-out responses that end": sum(response[-1] == 0 for _, response in evaluation),
        "distinct tokens per held-out response": round(sum(len(set(r)) for _, r in evaluation) / len(evaluation), 1),
        "tau": round(measured.tau, 2),
        "accepted by position": [round(share, 2) for share in measured.by_position],
        "seconds": round(time.time() - began),
    }


def main() -> None:
    """Make the requested pairs and print their metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", choices=["dense", "hybrid"])
    parser.add_argument("--steps", type=int, nargs=2, default=[1200, 1200], help="of target and draft")
    parser.add_argument("--prompts", type=int, default=1536, help="responses to train the draft on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for kind in [args.only] if args.only else ["dense", "hybrid"]:
        print(json.dumps({kind: make_pair(kind, args.out, tuple(args.steps), args.prompts)}, indent=2), flush=True)


if __name__ == "__main__":
    main()
