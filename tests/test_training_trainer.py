"""How training stops on Ctrl-C, in one process and in several, and on which devices it runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.training_args import ParallelMode

from hf_dflash.training.folder import last_complete_checkpoint
from hf_dflash.training.trainer import StopOnInterrupt, make_arguments
from tests.tiny_training import tiny_settings, write_records

WORKER = Path(__file__).parent / "training_worker.py"


def test_the_second_ctrl_c_stops_at_once():
    before, callback = signal.getsignal(signal.SIGINT), StopOnInterrupt()
    callback.on_train_begin()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
    finally:
        callback.restore()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("steps", "seconds"), [(2, 0), (0, 1.0)])
def test_processes_that_get_their_ctrl_c_at_different_steps_stop_after_the_same(tmp_path, steps, seconds):
    """Some steps apart, or so late that the other process has stopped and saved already."""
    write_records(tmp_path / "data.jsonl")
    paths = os.pathsep.join([str(WORKER.parent.parent), str(WORKER.parent)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(WORKER), str(tmp_path), str(steps), str(seconds)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (done_steps, interrupted), other = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [done_steps, interrupted] == other and interrupted and done_steps >= 3
    latest = last_complete_checkpoint(tmp_path / "run")
    assert latest.name == f"checkpoint-{done_steps}"
    files = json.loads((latest / "complete").read_text())["files"]
    assert {"model.safetensors", "rng_state_0.pth", "rng_state_1.pth"} <= set(files)  # complete: both have written


def test_several_visible_gpus_do_not_become_data_parallel(tmp_path, monkeypatch):
    """One process uses one device; all of them take `torchrun`."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    arguments = make_arguments(tiny_settings(tmp_path, device=None))
    assert arguments.n_gpu == 1 and arguments.parallel_mode != ParallelMode.NOT_DISTRIBUTED
    assert arguments.train_batch_size == tiny_settings(tmp_path).batch_size
