"""`import hf_dflash` in a process of its own: silent, repeatable, light, and known to transformers' Auto classes."""

import subprocess
import sys
import textwrap


def run_python(source: str, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=300
    )


def python_says(source: str) -> str:
    done = run_python(source)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_prints_nothing():
    done = run_python("import hf_dflash", "-W", "error::UserWarning:hf_dflash")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_importing_twice_registers_and_dispatches_once():
    said = python_says("""
        import sys
        from transformers import GenerationMixin
        import hf_dflash
        first = GenerationMixin.generate
        for name in [name for name in sys.modules if name.split(".")[0] == "hf_dflash"]:
            del sys.modules[name]
        import hf_dflash
        print(GenerationMixin.generate is first)
    """)
    assert said == "True\n"


def test_importing_brings_in_nothing_beyond_torch_and_transformers():
    # What transformers' own model and generation modules import is allowed, whatever it is in this environment.
    said = python_says("""
        import sys
        import torch, transformers
        from transformers import AutoConfig, AutoModel, PreTrainedModel, GenerationMixin
        from transformers.models.qwen3 import modeling_qwen3
        before = {name.split(".")[0] for name in sys.modules}
        import hf_dflash
        after = {name.split(".")[0] for name in sys.modules}
        print(sorted(after - before - set(sys.stdlib_module_names) - {"hf_dflash"}))
    """)
    assert said == "[]\n"


def test_the_command_line_and_training_stay_out():
    said = python_says("""
        import sys
        import hf_dflash
        packages = ["typer", "rich", "matplotlib", "datasets", "peft", "gguf"]
        rooms = ["hf_dflash.cli", "hf_dflash.bench", "hf_dflash.training", "hf_dflash.hub"]
        print([name for name in packages + rooms if name in sys.modules])
    """)
    assert said == "[]\n"


def test_auto_classes_know_drafts(tmp_path):
    said = python_says(f"""
        import hf_dflash
        from transformers import AutoConfig, AutoModel
        config = hf_dflash.DFlashConfig(
            dflash_version=1, block_size=4, mask_token_id=5, target_layer_ids=[0, 1], vocab_size=32,
            hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            head_dim=8, rope_parameters={{"rope_type": "default", "rope_theta": 1e4}},
            layer_types=["full_attention"], layer_causal=[False],
        )
        hf_dflash.DFlashDraftModel(config).save_pretrained({str(tmp_path)!r})
        found = [auto.from_pretrained({str(tmp_path)!r}) for auto in (AutoConfig, AutoModel)]
        print([type(each).__name__ for each in found])
    """)
    assert said.splitlines()[-1] == "['DFlashConfig', 'DFlashDraftModel']"


def test_every_public_name_is_there():
    said = python_says("""
        import hf_dflash
        print([name for name in hf_dflash.__all__ if not hasattr(hf_dflash, name)], hf_dflash.__version__)
    """)
    from hf_dflash.version import __version__

    assert said == f"[] {__version__}\n"
