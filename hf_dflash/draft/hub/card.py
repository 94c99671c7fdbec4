"""The model card of an exported draft.

Owns: what a README.md on the Hub says about a draft and how to use it. Does not know: files.
"""

from hf_dflash.draft.modeling_dflash import DFlashDraftModel

_CARD = """---
{metadata}
---

# DFlash{version} draft{for_target}

A draft for speculative decoding: it reads hidden states of its target and proposes {candidates} tokens in one pass.
The target checks them all at once, so the text is exactly what the target generates alone.

{facts}

## Use

With [hf-dflash](https://pypi.org/project/hf-dflash/) (`pip install hf-dflash`), greedy or sampled, any target:

```python
import hf_dflash
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}")
target = AutoModelForCausalLM.from_pretrained("{target}", dtype="auto", device_map="auto")
draft = hf_dflash.load_draft("<this repository>", device_map=target.device)

inputs = tokenizer("How many positive divisors does 196 have?", return_tensors="pt").to(target.device)
print(tokenizer.decode(target.generate(**inputs, assistant_model=draft, max_new_tokens=200)[0]))
```

The same without loading the draft by hand:
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
    """The README.md for a draft: metadata, what it is, how it is used."""
    config = draft.config
    target = config.target_name_or_path
    metadata = [
        *([f"base_model: {target}"] if target else []),
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        *(f"- {tag}" for tag in ("dflash", "speculative-decoding", "custom_generate")),
    ]
    return (
        _CARD.format(
            metadata="\n".join(metadata),
            version=" 2" if config.dflash_version == 2 else "",
            for_target=f" for {target}" if target else "",
            candidates=config.block_size - 1,
            facts=_facts(draft),
            target=target or "<its target>",
            native=_NATIVE
            if _runs_natively(draft)
            else "\nDo not run the draft in float16: use bfloat16 or float32.\n",
        ).rstrip()
        + "\n"
    )


def _runs_natively(draft: DFlashDraftModel) -> bool:
    """Whether transformers' own loop proposes what this draft means: it knows only the target's embeddings and head."""
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
