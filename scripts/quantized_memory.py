"""Measure what a draft costs in memory: the peak of live tensors over plain decoding, behind a long prompt.

    python scripts/quantized_memory.py [--prompt 4096] [--tokens 32]

Every tensor's storage is counted from the operation that makes it to its release, so the figures are exact and the same
on every machine; scratch memory inside kernels is not seen. Target and draft are random and small, in bfloat16.
"""

import argparse
import gc
import sys
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
MIB = 2**20
HIDDEN, VOCABULARY, TAPS, BLOCK = 512, 4096, (0, 2), 8


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations make inside the `with` block, and their peak."""

    def __enter__(self) -> "LiveBytes":
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self._storages[reference.cdata] = (reference, storage.nbytes())
        self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        """Bytes of the storages that still exist."""
        self._storages = {key: held for key, held in self._storages.items() if not held[0].expired()}
        return sum(size for _, size in self._storages.values())


def small_target() -> Qwen3ForCausalLM:
    """Four layers with the usual proportions."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


def measure(prompt_length: int, tokens: int) -> dict[str, float]:
    """Peaks of plain and DFlash generate in MiB, and the parts that the draft should account for."""
    from tiny_drafts import tiny_draft

    import hf_dflash  # noqa: F401  (teaches `generate` about drafts)

    target = small_target()
    draft = tiny_draft(hidden_size=HIDDEN, vocab_size=VOCABULARY, taps=TAPS, block_size=BLOCK).to(torch.bfloat16)
    ids = torch.randint(5, 999, (1, prompt_length))
    statistics, found = [], {}
    for name, extra in (("plain", {}), ("dflash", {"assistant_model": draft, "stats": statistics.append})):
        with LiveBytes() as bytes_:
            kept = target.generate(ids, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, **extra)
        gc.collect()
        found |= {f"{name}: peak": bytes_.peak / MIB, f"{name}: left at the end": bytes_.live() / MIB}
        del kept
    config = draft.config
    width = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return {
        **found,
        "draft's weights (in a peak once they were used)": sum(p.nbytes for p in draft.parameters()) / MIB,
        "draft's context": prompt_length * width * 2 * 2 / MIB,
        "draft's state at its peak, as the statistics say": statistics[0].peak_draft_bytes / MIB,
        "taps of the prompt": prompt_length * len(TAPS) * HIDDEN * 2 / MIB,
        "taps of a block": BLOCK * len(TAPS) * HIDDEN * 2 / MIB,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    for name, value in measure(arguments.prompt, arguments.tokens).items():
        print(f"{value:9.2f} MiB  {name}")
