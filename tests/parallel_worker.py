"""A process launched by `test_parallel.py` with torchrun.

`parallel_worker.py tensor <target folder> <results>` and `parallel_worker.py sharded <results>`; each process writes
its results to `<results>/<rank>.json`.
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
    """Run DFlash generate with a seed and an oracle draft for `text`; return the ids and accepted counts."""
    statistics = []
    draft = oracle_draft(target, text, pattern, block_size=BLOCK, strict=False).to(torch.bfloat16)
    torch.manual_seed(seed)
    ids = prompt() if ids is None else ids
    output = target.generate(ids, assistant_model=draft, stats=statistics.append, **options)
    return {"ids": output.tolist(), "accepted": statistics[0].accepted}


def tensor_parallel(folder: str) -> dict:
    """Compare plain generate in one process with DFlash on the target that both share."""
    full = AutoModelForCausalLM.from_pretrained(folder)
    sharded_target = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    rank = distributed.get_rank()
    results = {"local_rows": sharded_target.model.layers[0].self_attn.q_proj.weight.to_local().shape[0]}
    for mode, options in MODES.items():
        options = {"max_new_tokens": NEW, **options}
        torch.manual_seed(3)
        text = full.generate(prompt(), **options)
        results[mode] = {"plain": text.tolist(), **decode(sharded_target, text, randomly(2, BLOCK - 1), 3, **options)}
        # A different seed and draft in each process: they must still stay in sync.
        results[f"{mode}, different drafts"] = decode(sharded_target, text, fixed(rank * 3), 10 + rank, **options)
    return results


def sharded() -> dict:
    """FSDP: each process decodes its own prompt, with its own length and number of rounds."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    ids = prompt(9 + 3 * rank, seed=rank)
    results = {}
    for name, units, again in (("root", False, None), ("root sharded again", False, True), ("units", True, None)):
        target = FAMILIES["qwen3"].build(0)
        options = {"max_new_tokens": 1 + 25 * rank, "do_sample": False}
        text = target.generate(ids, **options)
        for module in [*target.model.layers, *([target.model.embed_tokens, target.lm_head] if units else [])]:
            fully_shard(module, mesh=mesh)
        fully_shard(target, mesh=mesh, reshard_after_forward=again)
        pattern = randomly(rank, BLOCK - 1)
        results[name] = {
            "plain": text.tolist(),
            **decode(target, text, pattern, 0, ids=ids, synced_gpus=True, **options),
        }
        try:
            decode(target, text, pattern, 0, ids=ids, synced_gpus=True, prefill_chunk_size=4, **options)
        except UnsupportedOptionError as error:
            results[name]["refusal"] = str(error)
    return results


if __name__ == "__main__":
    kind, *folders = sys.argv[1:]
    results = tensor_parallel(folders[0]) if kind == "tensor" else sharded()
    Path(folders[-1], f"{distributed.get_rank()}.json").write_text(json.dumps(results))
    # Exit together and immediately: a gloo thread that is still running when the interpreter shuts down aborts the
    # process, even though the results are complete.
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)
