"""Keep the processes that share a target in sync.

With tensor parallelism they agree on token ids. With FSDP and ZeRO-3 (`synced_gpus`), whose weights are gathered for
every call, they make the same sequence of calls.
"""

from collections.abc import Callable

import torch
from torch import distributed
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from hf_dflash.target.target import Target

Agreement = Callable[[torch.LongTensor], torch.LongTensor]


def single_process(ids: torch.LongTensor) -> torch.LongTensor:
    """Return the ids unchanged: a single process has nothing to agree on."""
    return ids


def agreement_for(model: PreTrainedModel) -> Agreement:
    """Return how the processes of a tensor-parallel target agree on ids: all use the first process's.

    Every process runs the whole loop with its own draft. If one of them drafted, sampled or rounded to another token,
    their forwards would diverge and wait for each other forever.

    Returns:
        a function of ids of any shape; `single_process` for a target in one process.
    """
    if (getattr(model, "tp_size", None) or 1) == 1:
        return single_process
    mesh = model._device_mesh
    group = (mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh).get_group()
    first = distributed.get_global_rank(group, 0)

    def agree(ids: torch.LongTensor) -> torch.LongTensor:
        ids = ids.contiguous()
        distributed.broadcast(ids, src=first, group=group)
        return ids

    return agree


def needs_lockstep(model: PreTrainedModel, synced_gpus: bool | None) -> bool:
    """Resolve `synced_gpus` of a `generate` call: None depends on the target, as in plain generate."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return False
    return bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model) if synced_gpus is None else synced_gpus)


class Lockstep:
    """The same sequence of calls in processes that decode different texts with one sharded target.

    Each call of a sharded module gathers its weights from all processes, so all must call the same modules in the same
    order: a forward of the whole target, then embedding and head for the next proposal, and so on until the last
    process is done. A process that does not need one of these calls makes it anyway.

    Args:
        target: the sharded target.
        active: False if nothing is shared; every method is then a no-op.
    """

    def __init__(self, target: Target, active: bool):
        self._target = target
        self._active = active

    def before_forward(self) -> None:
        """Announce one more forward to the other processes. Call before each prefill and each verify."""
        if self._active:
            self._count_unfinished(1)

    def dummy_proposal(self) -> None:
        """Call embedding and head on dummy input, after a forward that no proposal follows."""
        if self._active:
            self._target.head(self._target.embed(self._dummy_ids()))

    def run_until_all_finish(self) -> None:
        """Keep making dummy calls until the other processes have finished their texts."""
        while self._active and self._count_unfinished(0):
            self._target.model(input_ids=self._dummy_ids(), use_cache=False)
            self.dummy_proposal()

    def _dummy_ids(self) -> torch.LongTensor:
        return torch.zeros(1, 1, dtype=torch.long, device=self._target.model.device)

    def _count_unfinished(self, mine: int) -> int:
        count = torch.tensor(mine, device=self._target.model.device)
        distributed.all_reduce(count)
        return int(count)
