"""Uses of the public interface with the types that users see: mypy checks them (`make types`), nothing runs.

A line that must be an error carries `# type: ignore[code]`: mypy complains where it is not one.
"""

from pathlib import Path
from typing import Any, assert_type

import torch
from transformers import BatchEncoding, PreTrainedModel

import hf_dflash


def loading(network: torch.nn.Module) -> hf_dflash.DFlashDraftModel:
    draft = hf_dflash.load_draft("z-lab/Qwen3-8B-DFlash-b16", device_map="auto", dtype=torch.bfloat16, block_size=8)
    assert_type(draft, hf_dflash.DFlashDraftModel)
    assert_type(hf_dflash.adopt_draft(network), hf_dflash.DFlashDraftModel)
    assert_type(hf_dflash.is_draft(network), bool)
    inspection = hf_dflash.inspect_draft(Path("draft"), "Qwen/Qwen3-8B")
    assert_type(inspection.problems, list[str])
    assert_type(inspection.pairs, bool | None)
    assert_type(hf_dflash.export_draft("draft", "folder", target="Qwen/Qwen3-8B", dtype="bfloat16"), Path)
    hf_dflash.load_draft()  # type: ignore[call-arg]
    hf_dflash.load_draft("draft", block_size="8")  # type: ignore[arg-type]
    return draft


def decoding(target: PreTrainedModel, draft: hf_dflash.DFlashDraftModel, inputs: BatchEncoding) -> None:
    method = hf_dflash.DFlashGenerate(draft, block_size=4, stats=lambda statistics: print(statistics.tau))
    output: Any = target.generate(**inputs, custom_generate=method)  # type: ignore[operator]
    assert isinstance(output, hf_dflash.DFlashOutput)
    assert_type(output.dflash_stats, hf_dflash.DFlashStatistics | None)
    comparison = hf_dflash.compare(target, draft, inputs, max_new_tokens=8)
    assert_type(comparison, hf_dflash.Comparison)
    assert_type(comparison.same, bool)
    assert_type(comparison.first_difference, int | None)
    assert_type(hf_dflash.CACHE_KEYWORD, str)
    hf_dflash.DFlashGenerate("draft")  # type: ignore[arg-type]


def statistics(found: hf_dflash.DFlashStatistics) -> None:
    assert_type(found.tau, float)
    assert_type(found.acceptance_by_position, list[float])
    assert_type(found.as_dict(), dict[str, Any])


def pairs() -> None:
    pair = hf_dflash.load_pair(str(hf_dflash.demo_target()), str(hf_dflash.demo_draft()), dtype="bfloat16")
    assert_type(pair, hf_dflash.Pair)
    prompts = hf_dflash.load_prompts("humaneval:3")
    assert_type(prompts, list[hf_dflash.Prompt])
    assert_type(hf_dflash.encode(pair, prompts[0].messages), BatchEncoding)


def training(target: PreTrainedModel, draft: hf_dflash.DFlashDraftModel, tokenizer: Any) -> None:
    settings = hf_dflash.TrainingSettings(target="target", data="responses.jsonl", out="folder", block_size=8)
    result = hf_dflash.train(settings, resume=True)
    assert_type(result, hf_dflash.TrainingResult)
    responses = hf_dflash.regenerate(
        target,
        tokenizer,
        hf_dflash.read_prompts("prompts.jsonl", tokenizer),
        "out.jsonl",
        hf_dflash.RegenerationSettings(),
    )
    assert_type(responses, Path)
    acceptance = hf_dflash.measure_acceptance(draft, target, [([1, 2], [3, 4])])
    assert_type(acceptance, hf_dflash.Acceptance)
    assert_type(acceptance.tau, float)
    assert_type(hf_dflash.save_draft(draft, "folder", layout="zlab"), Path)
    hf_dflash.TrainingSettings(no_such_setting=1)  # type: ignore[call-arg]


def errors() -> None:
    try:
        hf_dflash.load_draft("draft")
    except hf_dflash.DFlashError as error:
        assert_type(error, hf_dflash.DFlashError)
