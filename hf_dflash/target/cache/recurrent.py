"""Recurrent and convolution layers of the target's cache (transformers' `LinearAttentionLayer`): accepted tokens are
replayed from a saved state.

The replays are in `delta_rule` and `state_space`. If none can be trusted, the mixer is run again.
"""

import torch
from torch import nn
from transformers.cache_utils import LinearAttentionLayer

from hf_dflash.draft.errors import UnsupportedTargetError
from hf_dflash.target.cache.block_layer import BlockLayer, LayerPlan, same_for_all_rows
from hf_dflash.target.cache.convolution import ConvolutionInputs
from hf_dflash.target.cache.reading import Call, Reading, num_tokens, read_one_by_one, slice_tokens, without_clamp
from hf_dflash.target.cache.replay import BlockRecord, OutputRecorder
from hf_dflash.target.cache.replay_group import replay_for

#: Convolution states, recurrent states, and which of them have been set.
Snapshot = tuple[dict[int, torch.Tensor | None], dict[int, torch.Tensor | None], dict[int, bool]]


class RecurrentLayer(BlockLayer, LinearAttentionLayer):
    """A `LinearAttentionLayer` that assigns new states instead of overwriting them, which preserves the state before a
    block.

    Args:
        original: the caller's layer; its tensors are never written.
        plan: sizes, the cache and the layer's mixer.
    """

    def __init__(self, original: LinearAttentionLayer, plan: LayerPlan):
        LinearAttentionLayer.__init__(self, number_of_states=original.number_of_states)
        self.original = original
        self._plan = plan
        self.mixer = plan.mixer
        self._reader = without_clamp(plan.mixer) if plan.reading is Reading.UNCLAMPED else plan.mixer
        self._recorder: OutputRecorder | None = None
        self._handles: list = []
        # Makes the mixers pass every token to `update_conv_state`, even a single one.
        self.record_past = True
        _copy_states(original, self)
        self._reading_block = False
        self._is_open = False
        self._before = self._snapshot()
        self._forget_block()

    def start(self) -> None:
        self._handles.append(self.mixer.register_forward_pre_hook(self._before_mixer, with_kwargs=True))
        if self._plan.reading is not Reading.TOGETHER:
            self._handles.append(self.mixer.register_forward_hook(self._after_mixer, with_kwargs=True))
        replay = replay_for(self.mixer)
        if replay is not None:
            self._recorder = OutputRecorder(replay.sources(self.mixer), self._plan.block_size)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs
    ) -> torch.Tensor:
        """Read `(batch, channels, n)` inputs and return them appended to the earlier ones from the state."""
        tokens = conv_states.shape[-1]
        if not self.is_conv_states_initialized[state_idx]:
            self.device, self.dtype = conv_states.device, conv_states.dtype
            self.conv_kernel_size[state_idx] = tokens if conv_kernel_size is None else conv_kernel_size
            self.is_conv_states_initialized[state_idx] = True
        width = self.conv_kernel_size[state_idx]
        if self.has_previous_state[state_idx]:
            inputs = torch.cat([self.conv_states[state_idx], conv_states], dim=-1)
        else:
            inputs = nn.functional.pad(conv_states, (max(width - tokens, 0), 0))
            self.has_previous_state[state_idx] = True
        state = inputs[..., -width:]
        if self._reading_block and conv_kernel_size is not None:
            self._inputs[state_idx] = ConvolutionInputs(inputs, tokens, width)
        else:
            # A view would keep the inputs of a whole prompt alive.
            state = state.clone()
        self.conv_states[state_idx] = state
        return inputs

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        """Store the state after a forward, in the dtype of the first one."""
        if self.is_recurrent_states_initialized[state_idx]:
            recurrent_states = recurrent_states.to(self.recurrent_states[state_idx].dtype)
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        if self._reading_block and self._recorder is not None:
            self._outputs = self._recorder.take()
        return recurrent_states

    def begin_block(self) -> None:
        self._before = self._snapshot()
        self._forget_block()
        self._reading_block = True
        self._is_open = True

    def record(self) -> BlockRecord | None:
        """Return what a replay needs of the open block; None if any of it is missing or nothing is recurrent (LFM2)."""
        if self._steps or self._outputs is None or 0 not in self._inputs or not self.is_recurrent_states_initialized[0]:
            return None
        return BlockRecord(self._before[1][0], self.recurrent_states[0], self._inputs[0], self._outputs)

    def set_replayed(self, state: torch.Tensor) -> None:
        """Set the recurrent state after the accepted tokens, for the `commit` that follows."""
        self._replayed = state.to(self.recurrent_states[0].dtype)

    def commit(self, kept: list[int], verified: int) -> None:
        if not self._is_open:
            return
        if min(kept) < verified:
            self._keep_prefix(kept, verified)
        self._reading_block = False
        self._before = self._snapshot()
        self._is_open = False
        self._forget_block()

    def roll_back(self) -> None:
        self._reading_block = False
        self._is_open = False
        self._restore()
        self._forget_block()

    def release(self) -> LinearAttentionLayer:
        for handle in self._handles:
            handle.remove()
        if self._recorder is not None:
            self._recorder.remove()
        _copy_states(self, self.original)
        return self.original

    def _before_mixer(self, mixer: nn.Module, args: tuple, kwargs: dict | None = None) -> Call | None:
        """Record the call of the mixer if it reads a block of this cache.

        Returns:
            the call restricted to the first token if the mixer's own forward must not read all of them; `_after_mixer`
            reads the rest. Hooks can replace a forward's inputs and output but cannot prevent it from running.
        """
        if kwargs is None or not self._reads_block((args, kwargs)):
            # No kwargs: the hook was removed while another thread's forward was about to call it.
            return None
        self._call = (args, kwargs)
        tokens = num_tokens(self._call)
        if tokens > 1 and self._plan.reading is Reading.TOGETHER:
            return None
        self._detach_states()
        return slice_tokens(self._call, tokens, 0, 1)

    def _after_mixer(self, mixer: nn.Module, args: tuple, *rest) -> torch.Tensor | None:
        """Read a block the way the mixer requires. The output replaces that of its own forward."""
        *kwargs, output = rest
        if not kwargs or not self._reads_block((args, kwargs[0])) or num_tokens(self._call) == 1:
            return None
        if self._plan.reading is Reading.UNCLAMPED:
            self._restore()
            args, kwargs = self._call
            return self._reader.forward(*args, **kwargs)
        return read_one_by_one(mixer, self._call, num_tokens(self._call), output, self._save_step)

    def _reads_block(self, call: Call) -> bool:
        """Whether a call of the mixer reads this cache's open block: other threads may use the model too."""
        return self._reading_block and any(value is self._plan.cache for value in (*call[0], *call[1].values()))

    def _save_step(self) -> None:
        """Save the states after one token of a block that is read one by one."""
        self._steps.append(self._snapshot())
        self._detach_states()

    def _detach_states(self) -> None:
        """Continue on copies, since single-token kernels update their states in place and these are the saved ones."""
        for states in (self.conv_states, self.recurrent_states):
            states.update({index: None if state is None else state.clone() for index, state in states.items()})

    def _keep_prefix(self, kept: list[int], verified: int) -> None:
        """Replace the states after the block with those after its first `kept[row]` tokens."""
        if self._steps:
            self._return_to_step(kept)
            return
        recurs = any(self.is_recurrent_states_initialized.values())
        convolved = all(index in self._inputs for index, is_set in self.is_conv_states_initialized.items() if is_set)
        if not convolved or (recurs and self._replayed is None):
            self._run_mixer_again(same_for_all_rows(kept), verified)
            return
        if recurs:
            self.recurrent_states[0] = self._replayed
        for index, inputs in self._inputs.items():
            self.conv_states[index] = inputs.state_after(kept)

    def _return_to_step(self, kept: list[int]) -> None:
        """Restore the states after the last accepted token of each row: for kept 3, those after the third step."""
        for position, states in enumerate((self.conv_states, self.recurrent_states)):
            for index in [index for index, state in states.items() if state is not None]:
                rows = [self._steps[count - 1][position][index][row] for row, count in enumerate(kept)]
                states[index] = torch.stack(rows)

    def _run_mixer_again(self, count: int, verified: int) -> None:
        """The generic fallback: run the mixer itself on the accepted tokens from the saved state."""
        if self._call is None:
            raise UnsupportedTargetError(
                f"A recurrent layer of the target ({type(self.mixer).__name__}) changed its state without being "
                "called with the target's cache, so its last block cannot be rolled back."
            )
        self._reading_block = False
        self._restore()
        self._detach_states()
        args, kwargs = slice_tokens(self._call, verified, 0, count)
        self._reader(*args, **kwargs)

    def _snapshot(self) -> Snapshot:
        """Return the current states. Nothing is copied, since updates assign new tensors."""
        return dict(self.conv_states), dict(self.recurrent_states), dict(self.has_previous_state)

    def _restore(self) -> None:
        conv_states, recurrent_states, has_previous_state = self._before
        self.conv_states.update(conv_states)
        self.recurrent_states.update(recurrent_states)
        self.has_previous_state.update(has_previous_state)
        self.is_conv_states_initialized = {index: state is not None for index, state in conv_states.items()}
        self.is_recurrent_states_initialized = {index: state is not None for index, state in recurrent_states.items()}

    def _forget_block(self) -> None:
        self._inputs: dict[int, ConvolutionInputs] = {}
        self._outputs: list[torch.Tensor] | None = None
        self._replayed: torch.Tensor | None = None
        self._call: Call | None = None
        self._steps: list[Snapshot] = []


def _copy_states(source: LinearAttentionLayer, destination: LinearAttentionLayer) -> None:
    """Copy all states of `source` to `destination`, trimmed to what the next forward needs."""
    destination.device, destination.dtype = source.device, source.dtype
    for name in (
        "conv_kernel_size",
        "has_previous_state",
        "is_conv_states_initialized",
        "is_recurrent_states_initialized",
    ):
        setattr(destination, name, dict(getattr(source, name)))
    for index in range(source.number_of_states):
        conv_state, recurrent_state = source.conv_states[index], source.recurrent_states[index]
        if conv_state is not None:
            conv_state = conv_state[..., -source.conv_kernel_size[index] :].clone()
        destination.conv_states[index] = conv_state
        destination.recurrent_states[index] = None if recurrent_state is None else recurrent_state.clone()
