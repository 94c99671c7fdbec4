"""How much of a verify round the roll-back of recurrent layers takes.

Builds targets of Qwen3.5's architecture with random weights (24 layers, 18 of them gated delta nets), verifies blocks
on a `TargetCache` and times `begin_block` and `commit` beside the forward, in one process. Prints a table; the share is
(begin_block + commit) / forward, median and quartiles over the rounds.

    python scripts/measure_rollback.py --hidden 1024 2048 --block 8 16 --rounds 21 --dtype bfloat16
"""

import argparse
import statistics
import time

import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from hf_dflash.target.cache import CACHE_KEYWORD, TargetCache

PROMPT = 128


def build(hidden: int, dtype: torch.dtype, device: str) -> Qwen3_5ForCausalLM:
    """A random target with the proportions of Qwen3.5's small models, and a vocabulary of 32k."""
    config = Qwen3_5TextConfig(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=24,
        num_attention_heads=hidden // 128,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 6,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3_5ForCausalLM._from_config(config, dtype=dtype).eval()


@torch.no_grad()
def measure(model: Qwen3_5ForCausalLM, block_size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round: the forward, and the roll-back when half a block, all but one or all of it is kept."""
    device = model.device
    synchronize = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    cache = DynamicCache(config=model.config)
    times: dict[str, list[float]] = {"forward": [], "half": [], "all but one": [], "all": []}
    kept = {"half": block_size // 2, "all but one": block_size - 1, "all": block_size}
    patterns = ["half", "all but one", "all"]
    length = PROMPT + (2 + rounds * len(patterns)) * block_size
    with TargetCache(cache, model, max_length=length, block_size=block_size) as target_cache:
        ids = torch.randint(0, 32_000, (1, PROMPT), device=device)
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_KEYWORD: cache})
        # The first round also checks the replay, so it is left out.
        for number in range(-1, rounds * len(patterns)):
            pattern = patterns[number % len(patterns)]
            block = torch.randint(0, 32_000, (1, block_size), device=device)
            synchronize()
            start = time.perf_counter()
            target_cache.begin_block()
            began = time.perf_counter()
            model(input_ids=block, use_cache=True, **{CACHE_KEYWORD: cache})
            synchronize()
            read = time.perf_counter()
            target_cache.commit(torch.tensor([kept[pattern]]), block_size)
            synchronize()
            end = time.perf_counter()
            if number >= 0:
                times["forward"].append(read - began)
                times[pattern].append(began - start + end - read)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--block", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=21, help="rounds of each pattern")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, {arguments.dtype}, {arguments.device}, torch {torch.__version__}")
    print("| hidden | block | kept | forward ms | roll-back ms | share % (quartiles) |")
    print("|---|---|---|---|---|---|")
    for hidden in arguments.hidden:
        model = build(hidden, getattr(torch, arguments.dtype), arguments.device)
        for block_size in arguments.block:
            times = measure(model, block_size, arguments.rounds)
            forward = statistics.median(times.pop("forward"))
            for pattern, seconds in times.items():
                low, middle, high = (100 * value / forward for value in statistics.quantiles(seconds, n=4))
                print(
                    f"| {hidden} | {block_size} | {pattern} | {1e3 * forward:.1f} | "
                    f"{1e3 * statistics.median(seconds):.2f} | {middle:.2f} ({low:.2f} to {high:.2f}) |"
                )


if __name__ == "__main__":
    main()
