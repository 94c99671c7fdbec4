"""The model card of an exported draft: what it is and how to use it."""

from pathlib import Path, PureWindowsPath

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_dflash.draft.modeling_dflash import DFlashDraftModel

_BODY = """# DFlash{version} draft{for_target}

A draft for speculative decoding: it reads hidden states of its target and proposes {candidates} tokens in one pass.
The target verifies them all at once, so the text is exactly what the target generates on its own.

{facts}

## Use

With [hf-dflash](https://pypi.org/project/hf-dflash/) (`pip install hf-dflash`), greedy or sampled, any target:

```python
import hf_dflash
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target_id}")
target = AutoModelForCausalLM.from_pretrained("{target_id}", dtype="auto", device_map="auto")
draft = hf_dflash.load_draft("<this repository>", device_map=target.device)

inputs = tokenizer("How many positive divisors does 196 have?", return_tensors="pt").to(target.device)
print(tokenizer.decode(target.generate(**inputs, assistant_model=draft, max_new_tokens=200)[0]))
```

The same without loading the draft yourself:
`target.generate(**inputs, custom_generate="<this repository>", trust_remote_code=True)`.
{native}
"""

_NATIVE = """
With transformers alone (5.24 or later, batch 1, targets whose cache can be cropped):

```python
from transformers import AutoModel

draft = AutoModel.from_pretrained("<this repository>", trust_remote_code=True).to(target.device)
target.generate(**inputs, assistant_model=draft, speculation_type="dflash")
```

Do not run the draft in float16: use bfloat16 or float32.
"""


def model_card(draft: DFlashDraftModel) -> str:
    """Return the README.md of a draft: metadata, description and usage.

    A target in a local folder has no `base_model`, and its path is not disclosed: only the folder's name is.
    """
    config = draft.config
    name = str(config.target_name_or_path or "")
    repo_id = name if _is_repo_id(name) else None
    target = repo_id or _folder_name(name)
    metadata = ModelCardData(
        base_model=repo_id,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["dflash", "speculative-decoding", "custom_generate"],
    )
    body = _BODY.format(
        version=" 2" if config.dflash_version == 2 else "",
        for_target=f" for {target}" if target else "",
        candidates=config.block_size - 1,
        facts=_facts(draft),
        target_id=repo_id or (f"<path of {target}>" if target else "<its target>"),
        native=_NATIVE if _runs_natively(draft) else "\nDo not run the draft in float16: use bfloat16 or float32.\n",
    )
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{body.rstrip()}\n"))


def _is_repo_id(name: str) -> bool:
    """Return whether a name is `name` or `org/name` on the Hub and not a local path."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _folder_name(path: str) -> str:
    """Return the last component of a POSIX or Windows path, or "" if that is no name (as in `.` or `~`)."""
    name = PureWindowsPath(path).name
    return name if name.strip(".~") else ""


def _runs_natively(draft: DFlashDraftModel) -> bool:
    """Return whether transformers' own loop can run this draft: it uses only the target's embeddings and head."""
    config = draft.config
    return config.dflash_version == 1 and not config.own_embeddings and config.draft_vocab_size is None


def _facts(draft: DFlashDraftModel) -> str:
    config = draft.config
    rows = {
        "parameters": f"{draft.num_parameters():,} ({str(draft.dtype).removeprefix('torch.')})",
        "layers": f"{config.num_hidden_layers} ({', '.join(config.layer_types)})",
        "hidden size": config.hidden_size,
        "block size": config.block_size,
        "mask token": config.mask_token_id,
        "taps (target layers read)": ", ".join(map(str, config.target_layer_ids)),
    }
    if config.sliding_window is not None:
        rows["sliding window"] = config.sliding_window
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])
