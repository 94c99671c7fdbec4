"""A training process launched by `test_training_trainer.py` with torchrun.

`training_worker.py <folder> <steps> <seconds>`: Ctrl-C reaches rank 0 in the third step, and rank 1 so much later.
Each process writes its result to `<folder>/<rank>.json`.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
from pathlib import Path

faulthandler.dump_traceback_later(120, exit=True)  # processes that wait for each other would never end

import torch  # noqa: E402
from tiny_training import tiny_settings, tiny_target  # noqa: E402

import hf_dflash.training.trainer as trainer_module  # noqa: E402
from hf_dflash.training import train  # noqa: E402

FOLDER, STEPS, SECONDS, RANK = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(os.environ["RANK"])


class Interrupted(trainer_module.StopOnInterrupt):
    """Gets its Ctrl-C from a timer."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2 + STEPS * RANK:
            threading.Timer(SECONDS * RANK, os.kill, (os.getpid(), signal.SIGINT)).start()


torch.set_num_threads(1)
# On a fast machine training ends before the late Ctrl-C, which must not end the process before its result is written.
signal.signal(signal.SIGINT, signal.SIG_IGN)
trainer_module.StopOnInterrupt = Interrupted
settings = tiny_settings(FOLDER, max_steps=10**5, held_out=0, save_every=10**5, batch_size=1, log_every=10**5)
result = train(settings, target_model=tiny_target(), log=lambda line: None)
(FOLDER / f"{RANK}.json").write_text(json.dumps([result.steps, result.interrupted]))
