"""Loads a target, its tokenizer and a draft by name (with dtype, quantization, device), and turns prompts and sampling
options into arguments of `generate`.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    QuantoConfig,
    TorchAoConfig,
)
from transformers.utils import logging

from hf_dflash.draft.errors import MissingPackageError, PairingError, UnsupportedOptionError
from hf_dflash.draft.loading import is_draft_checkpoint, load_draft
from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.files import check_text

DTYPES = ("auto", "bfloat16", "float16", "float32")
#: `quant_method` in a checkpoint's config -> the extra of hf-dflash that installs the packages to load it.
EXTRAS = {
    "awq": "awq",
    "gptq": "gptq",
    "bitsandbytes": "bnb",
    "compressed-tensors": "compressed-tensors",
    "torchao": "torchao",
    "quanto": "quanto",
    "gguf": "gguf",
}


@dataclass(frozen=True)
class Pair:
    """A target, its tokenizer and its draft, the names they were loaded from, and arguments for the chat template."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: DFlashDraftModel
    target_name: str
    draft_name: str
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


def load_pair(target: str, draft: str, chat_template_kwargs: dict[str, Any] | None = None, **options: Any) -> Pair:
    """Load a target and its draft; options are those of `load_target`. The draft is put on the device of the target's
    first layers.
    """
    model, tokenizer = load_target(target, **options)
    return Pair(model, tokenizer, load_draft_for(model, draft), target, draft, chat_template_kwargs or {})


def load_draft_for(target: PreTrainedModel, draft: str) -> DFlashDraftModel:
    """Load a draft on the device of the target's first layers."""
    return load_draft(draft, device_map=str(target.device))


def available_accelerators() -> list[str]:
    """Return the kinds of accelerator that torch finds on this machine, in order of preference."""
    kinds = {"cuda": torch.cuda.is_available, "xpu": torch.xpu.is_available, "mps": torch.backends.mps.is_available}
    return [name for name, is_available in kinds.items() if is_available()]


def default_device() -> str:
    """Return the device for models that were given none: the accelerator if there is one, else the CPU."""
    return next(iter(available_accelerators()), "cpu")


def placement(target: PreTrainedModel, draft: DFlashDraftModel | None = None) -> str:
    """Describe where the models are: "target and draft on cuda:0", "target on cuda:0 and cpu, draft on cuda:0"."""
    # A device map names accelerators by number only.
    entries = getattr(target, "hf_device_map", None) or {"": target.device}
    names = [f"{default_device()}:{entry}" if isinstance(entry, int) else str(entry) for entry in entries.values()]
    places = " and ".join(dict.fromkeys(names))
    if draft is None:
        return f"target on {places}"
    together = places == str(draft.device)
    return f"target and draft on {places}" if together else f"target on {places}, draft on {draft.device}"


def load_target(
    name: str,
    *,
    dtype: str = "auto",
    device_map: str | None = None,
    quantization: str | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target and its tokenizer, without progress bars.

    Args:
        device_map: as for any transformers model. Default: see `default_device`.
        gguf_file: the file to load, if the folder or repository holds GGUF files.

    Raises:
        UnsupportedOptionError: unknown dtype or quantization.
        PairingError: `name` is a draft.
        MissingPackageError: a package that the checkpoint or the quantization needs is not installed, or is too old.
    """
    if dtype not in DTYPES:
        raise UnsupportedOptionError(f"Unknown dtype '{dtype}'; choose one of {', '.join(DTYPES)}.")
    be_quiet()
    if is_draft_checkpoint(name):
        raise PairingError(f"{name} is a DFlash draft, not a target. Check whether target and draft are swapped.")
    if device_map is None and (device := default_device()) != "cpu":
        device_map = device
    shared = {"trust_remote_code": trust_remote_code, **({"gguf_file": gguf_file} if gguf_file else {})}
    # Passed only if requested: a None would override the entry of a quantized checkpoint.
    given = {"quantization_config": quantization_config(quantization)} if quantization else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map, **given, **shared)
        return model.eval(), AutoTokenizer.from_pretrained(name, **shared)
    except ImportError as error:
        raise MissingPackageError(_install_hint(name, quantization, gguf_file, trust_remote_code, error)) from error


def _install_hint(
    name: str, quantization: str | None, gguf_file: str | None, trust_remote_code: bool, error: ImportError
) -> str:
    """Return a message with what transformers is missing and the command that installs it."""
    reason = str(error).strip().splitlines()[0]
    method = "gguf" if gguf_file is not None else None
    if method is None and quantization is None:
        entry = (
            AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).to_dict().get("quantization_config")
        )
        method = (entry or {}).get("quant_method")
    if method not in EXTRAS:
        return f"{name} cannot be loaded: {reason}"
    command = f'pip install -U "hf-dflash[{EXTRAS[method]}]"'
    return f"{name} is a {method} checkpoint ({reason}). Install the packages to load it: {command}."


def be_quiet() -> None:
    """Turn off transformers' progress bars and log messages below warnings."""
    logging.disable_progress_bar()
    logging.set_verbosity_warning()


def quantization_config(name: str) -> Any:
    """Return the transformers configuration for a `--quantization` name.

    Raises:
        UnsupportedOptionError: the name is unknown.
        MissingPackageError: its package is not installed.
    """

    def torchao_int8() -> Any:
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())

    kinds = {
        "bnb4": (
            "bitsandbytes",
            "bnb",
            lambda: BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            ),
        ),
        "bnb8": ("bitsandbytes", "bnb", lambda: BitsAndBytesConfig(load_in_8bit=True)),
        "torchao-int8": ("torchao", "torchao", torchao_int8),
        "quanto-int8": ("optimum", "quanto", lambda: QuantoConfig(weights="int8")),
    }
    if name not in kinds:
        raise UnsupportedOptionError(f"Unknown quantization '{name}'; choose one of {', '.join(kinds)}.")
    module, extra, make = kinds[name]
    if find_spec(module) is None:
        raise MissingPackageError(f'Quantization {name} needs an extra package: pip install "hf-dflash[{extra}]".')
    return make()


def sampling_arguments(
    temperature: float,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
) -> dict[str, Any]:
    """Return arguments of `generate` for the sampling options; temperature 0 means greedy decoding, regardless of the
    checkpoint's defaults.
    """
    chosen = {"top_p": top_p, "top_k": top_k, "min_p": min_p} if temperature else {}
    chosen |= {"repetition_penalty": repetition_penalty}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    return {"do_sample": True, "temperature": temperature, **chosen} if temperature else {"do_sample": False, **chosen}


def encode(pair: Pair, prompt: str | list[dict[str, str]]) -> BatchEncoding:
    """Encode a prompt for `generate`, on the target's device: plain text, or messages through the chat template.

    Raises:
        PromptError: a text that is not valid Unicode, which no tokenizer reads.
        UnsupportedOptionError: messages were given, but the tokenizer has no chat template.
    """
    tokenizer = pair.tokenizer
    if isinstance(prompt, str):
        return tokenizer(check_text(prompt, "The prompt"), return_tensors="pt").to(pair.target.device)
    for message in prompt:
        if isinstance(message["content"], str):
            check_text(message["content"], f"The {message['role']} message")
    if not tokenizer.chat_template:
        raise UnsupportedOptionError(
            "The target's tokenizer has no chat template: pass plain text instead of chat messages."
        )
    inputs = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True, **pair.chat_template_kwargs
    )
    return inputs.to(pair.target.device)
