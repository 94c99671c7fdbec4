"""Quantized targets with a bfloat16 draft: plain generate's text, or a difference that the kernels' rounding explains.

Kinds whose packages are not installed are skipped. Kinds that take long are marked slow; their results are stored in
docs/data/quantized-targets.json by `scripts/make_quantized_table.py`.
"""

import pytest
import torch
from quantized_targets import KINDS, MODES, examine, load

pytestmark = pytest.mark.quantized


def case(name: str, dtype: torch.dtype, quick: bool):
    """One row of the matrix; quick kinds are only quick in float16."""
    marks = [] if quick and dtype is torch.float16 else [pytest.mark.slow]
    return pytest.param(name, dtype, marks=marks, id=f"{name}-{str(dtype).removeprefix('torch.')}")


CASES = [case(name, dtype, kind.quick) for name, kind in KINDS.items() for dtype in kind.dtypes]


def loaded(name: str, dtype: torch.dtype):
    if KINDS[name].missing:
        pytest.skip(f"not installed: {', '.join(KINDS[name].missing)}")
    return load(name, dtype)


@pytest.mark.parametrize("name, dtype", CASES)
def test_the_text_matches_plain_generate_or_rounding_explains_it(name, dtype):
    target = loaded(name, dtype)
    assert target.dtype is dtype
    for mode in MODES:
        findings = examine(target, 2, mode, KINDS[name].prompt)
        assert findings.unexplained == 0, findings
        assert len(findings.accepted) > 2
        assert findings.varied == findings.texts


@pytest.mark.parametrize("name, dtype", [("awq-128", torch.float16), ("awq-64", torch.float32)], ids=str)
def test_awq_with_the_torch_backend_is_exact(name, dtype):
    # In float16 one text in twelve may hit a tie between two logits, and does with groups of 32 and 64; see the docs.
    findings = examine(loaded(name, dtype), 12)
    assert findings.same == findings.texts == findings.varied == 12, findings


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.dense is not None])
@pytest.mark.parametrize("part", ["mlp.up_proj", "self_attn.k_proj"])
def test_the_checkpoint_matches_the_weights_it_was_quantized_from(name, part):
    """Otherwise the rows above would be meaningless. The relative error of 4 bits is below 0.2, of 8 bits lower."""
    target, dense = loaded(name, torch.float16), KINDS[name].dense()
    inputs = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        target(torch.tensor([[5]]))  # compressed-tensors unpacks its layers in the first forward of the whole model
        expected = dense.model.layers[1].get_submodule(part)(inputs)
        result = target.model.layers[1].get_submodule(part)(inputs.half()).float()
    assert (result - expected).norm() / expected.norm() < 0.2


@pytest.mark.parametrize("name, head", [("bnb-nf4-head", "Linear4bit"), ("bnb-int8-head", "Linear8bitLt")])
def test_the_heads_of_these_kinds_are_quantized(name, head):
    assert type(loaded(name, torch.float16).lm_head).__name__ == head


def test_the_embedding_and_head_of_torchao_are_quantized():
    target = loaded("torchao-int8-whole", torch.float16)
    for module in (target.get_input_embeddings(), target.get_output_embeddings()):
        assert type(module.weight).__name__.startswith("Int")
