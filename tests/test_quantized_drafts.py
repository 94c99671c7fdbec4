"""A draft quantized at the caller's request: it loads with a warning, and the text stays the same."""

import pytest
import torch
from families import FAMILIES
from lossless import prompt
from tiny_drafts import tiny_draft
from transformers import BitsAndBytesConfig, TorchAoConfig

from hf_dflash import compare, load_draft

pytestmark = pytest.mark.quantized


def bnb(**options):
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(**options)


def torchao_int8():
    quantization = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(quantization.Int8WeightOnlyConfig())


CONFIGS = {
    "bnb-int8": lambda: bnb(load_in_8bit=True),
    "bnb-nf4": lambda: bnb(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
    "torchao-int8": torchao_int8,
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_quantized_draft_loads_with_a_warning_and_keeps_the_text(kind, version, tmp_path):
    # nf4 kernels need at least 64 outputs, so DFlash 2 gets more groups than usual.
    dense = tiny_draft(version, vocab_size=384, **({"conv_group_size": 2} if version == 2 else {})).to(torch.bfloat16)
    dense.save_pretrained(tmp_path)
    config = CONFIGS[kind]()
    with pytest.warns(UserWarning, match="watch the acceptance"):
        draft = load_draft(tmp_path, quantization_config=config)
    assert type(draft.fc.weight) is not type(dense.fc.weight)
    assert draft.dtype is torch.bfloat16
    for dtype in (torch.float32, torch.float16):
        result = compare(FAMILIES["qwen3"].build(0).to(dtype), draft, prompt(), max_new_tokens=12, do_sample=False)
        assert result.same or (dtype is torch.float16 and result.within_tolerance), result
