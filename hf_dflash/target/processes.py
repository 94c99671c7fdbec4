"""A target that several processes share.

Owns: what keeps these processes in step: agreement on ids where the target's tensors are split over them (tensor
parallel), and equal sequences of calls where its weights are gathered for every call (FSDP, ZeRO-3: `synced_gpus`).

Does not know: drafts, acceptance, the order of a round.
"""

from collections.abc import Callable

import torch
from torch import distributed
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from hf_dflash.target.target import Target

Agreement = Callable[[torch.LongTensor], torch.LongTensor]


def alone(ids: torch.LongTensor) -> torch.LongTensor:
    """The agreement of a process with itself."""
    return ids


def agreement_over(model: PreTrainedModel) -> Agreement:
    """How the processes of a tensor-parallel target agree on ids: all take those of the first of them.

    Every process runs the whole loop with a draft of its own, so a token that one of them drafted, drew or rounded in
    another way would let their forwards part, which then wait for each other for ever.

    Returns:
        a function of ids of any shape; `alone` for a target in one process.
    """
    if (getattr(model, "tp_size", None) or 1) == 1:
        return alone
    mesh = model._device_mesh
    group = (mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh).get_group()
    first = distributed.get_global_rank(group, 0)

    def agree(ids: torch.LongTensor) -> torch.LongTensor:
        ids = ids.contiguous()
        distributed.broadcast(ids, src=first, group=group)
        return ids

    return agree


def needs_lockstep(model: PreTrainedModel, synced_gpus: bool | None) -> bool:
    """What `synced_gpus` of a `generate` call means: None asks the target, as in plain generate."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return False
    return bool(is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model) if synced_gpus is None else synced_gpus)


class Lockstep:
    """Equal sequences of calls in processes that decode different texts with one sharded target.

    Each call of a sharded module gathers its weights from all processes, so all must call the same modules in the same
    order: a forward of the whole target, then embedding and head for the next proposal, and so on until the last
    process is done. A process that has no use for one of the calls makes it all the same.

    Args:
        target: the sharded target.
        active: False where nothing is shared; then nothing here does anything.
    """

    def __init__(self, target: Target, active: bool):
        self._target = target
        self._active = active

    def before_forward(self) -> None:
        """Tell the others that there is one more forward to come. Call before each prefill and each verify."""
        if self._active:
            self._count_unfinished(1)

    def instead_of_proposal(self) -> None:
        """Call embedding and head to no purpose, after a forward that no proposal follows."""
        if self._active:
            self._target.head(self._target.embed(self._dummy_ids()))

    def until_all_finish(self) -> None:
        """Keep the others company until they, too, have written their texts."""
        while self._active and self._count_unfinished(0):
            self._target.model(input_ids=self._dummy_ids(), use_cache=False)
            self.instead_of_proposal()

    def _dummy_ids(self) -> torch.LongTensor:
        return torch.zeros(1, 1, dtype=torch.long, device=self._target.model.device)

    def _count_unfinished(self, mine: int) -> int:
        count = torch.tensor(mine, device=self._target.model.device)
        distributed.all_reduce(count)
        return int(count)
