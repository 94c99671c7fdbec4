"""Targets shared by two processes: tensor parallel and FSDP. Each test launches two real processes with gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from families import FAMILIES

WORKER = Path(__file__).parent / "parallel_worker.py"
PROCESSES = 2


def run_in_two_processes(results: Path, *arguments: str) -> list[dict]:
    """Run the worker in two processes and return what each reports."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    paths = os.pathsep.join([str(WORKER.parent.parent), str(WORKER.parent)])
    # Processes that get out of sync wait forever, hence the timeout.
    done = subprocess.run(
        [*command, str(WORKER), *arguments, str(results)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_tensor_parallel_target_gives_the_plain_text_and_stays_in_sync(family, tmp_path):
    FAMILIES[family].build(0).save_pretrained(tmp_path / "target")
    first, second = run_in_two_processes(tmp_path, "tensor", str(tmp_path / "target"))
    assert first["local_rows"] * PROCESSES == 64
    for mode in ("greedy", "sampled"):
        assert first[mode]["ids"] == first[mode]["plain"] == second[mode]["ids"]
        assert first[mode]["accepted"] == second[mode]["accepted"]
        assert len(set(first[mode]["accepted"])) > 2
        assert first[f"{mode}, different drafts"] == second[f"{mode}, different drafts"]
    # Greedy text does not depend on the seed or the draft.
    assert first["greedy, different drafts"]["ids"] == first["greedy"]["plain"]


def test_processes_with_a_sharded_target_wait_for_each_other(tmp_path):
    results = run_in_two_processes(tmp_path, "sharded")
    for name in ("root", "root sharded again", "units"):
        for process in results:
            assert process[name]["ids"] == process[name]["plain"]
            assert "prefill_chunk_size" in process[name]["refusal"]
        short, long = (len(process[name]["accepted"]) for process in results)
        assert short == 0 and long > 4  # rounds after the prefill
