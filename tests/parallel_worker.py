"""One of the processes that `test_parallel.py` starts with torchrun.

`parallel_worker.py tensor <target folder> <results>` and `parallel_worker.py sharded <results>`; each process writes
what it found to `<results>/<rank>.json`.
"""

import json
import os
import sys
from pathlib import Path

import torch
from families import FAMILIES
from lossless import MODES, prompt
from oracle import fixed, oracle_draft, randomly
from torch import distributed
from transformers import AutoModelForCausalLM

from hf_dflash import UnsupportedOptionError

BLOCK = 6
NEW = 24


def decode(target, text, pattern, seed: int, ids: torch.LongTensor | None = None, **options) -> dict:
    """DFlash generate from a seed, with an oracle that knows `text`: the ids and what was accepted."""
    statistics = []
    draft = oracle_draft(target, text, pattern, block_size=BLOCK, strict=False).to(torch.bfloat16)
    torch.manual_seed(seed)
    ids = prompt() if ids is None else ids
    found = target.generate(ids, assistant_model=draft, stats=statistics.append, **options)
    return {"ids": found.tolist(), "accepted": statistics[0].accepted}


def tensor_parallel(folder: str) -> dict:
    """Plain generate on one process, and DFlash on the target that both share."""
    whole = AutoModelForCausalLM.from_pretrained(folder)
    split = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    rank = distributed.get_rank()
    found = {"local_rows": split.model.layers[0].self_attn.q_proj.weight.to_local().shape[0]}
    for mode, options in MODES.items():
        options = {"max_new_tokens": NEW, **options}
        torch.manual_seed(3)
        text = whole.generate(prompt(), **options)
        found[mode] = {"plain": text.tolist(), **decode(split, text, randomly(2, BLOCK - 1), 3, **options)}
        # Another seed and another draft in each process: they must go on together all the same.
        alone = decode(split, text, fixed(rank * 3), 10 + rank, **options)
        found[f"{mode}, out of step"] = alone
    return found


def sharded() -> dict:
    """FSDP: each process decodes prompts of its own, of other lengths, in other numbers of rounds."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    ids = prompt(9 + 3 * rank, seed=rank)
    found = {}
    for name, units, again in (("root", False, None), ("root sharded again", False, True), ("units", True, None)):
        target = FAMILIES["qwen3"].build(0)
        options = {"max_new_tokens": 1 + 25 * rank, "do_sample": False}
        text = target.generate(ids, **options)
        for module in [*target.model.layers, *([target.model.embed_tokens, target.lm_head] if units else [])]:
            fully_shard(module, mesh=mesh)
        fully_shard(target, mesh=mesh, reshard_after_forward=again)
        pattern = randomly(rank, BLOCK - 1)
        found[name] = {
            "plain": text.tolist(),
            **decode(target, text, pattern, 0, ids=ids, synced_gpus=True, **options),
        }
        try:
            decode(target, text, pattern, 0, ids=ids, synced_gpus=True, prefill_chunk_size=4, **options)
        except UnsupportedOptionError as refusal:
            found[name]["refusal"] = str(refusal)
    return found


if __name__ == "__main__":
    kind, *folders = sys.argv[1:]
    found = tensor_parallel(folders[0]) if kind == "tensor" else sharded()
    Path(folders[-1], f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    # Both leave together, and at once: a thread of gloo's that still runs when the interpreter is taken down aborts the
    # process, behind results that are complete.
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)
