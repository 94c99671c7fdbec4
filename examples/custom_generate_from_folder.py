"""Export a draft as a Hub-ready folder and use it by path: `generate(custom_generate=FOLDER)`.

python examples/custom_generate_from_folder.py [TARGET DRAFT]     default: SmolLM2-135M-Instruct and the draft of this
repository
"""

import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dflash import demo_draft, demo_target, export_draft

TARGET, DRAFT = sys.argv[1:3] or (demo_target(log=print), demo_draft())

with tempfile.TemporaryDirectory() as work:
    folder = export_draft(DRAFT, Path(work) / "my-draft", target="HuggingFaceTB/SmolLM2-135M-Instruct")
    print("exported:", sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype="auto")
    inputs = tokenizer("Water boils at", return_tensors="pt")
    # A Hub ID works too. trust_remote_code is needed because the folder contains code, which needs hf-dflash installed.
    output = target.generate(
        **inputs, custom_generate=str(folder), trust_remote_code=True, max_new_tokens=32, do_sample=False
    )
    print(tokenizer.decode(output[0]))
