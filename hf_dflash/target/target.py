"""The target model as decoding sees it: its decoder layers and taps (outputs of selected layers), embedding, head,
prefill and verify.

This is the only module that handles differences between target families.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from hf_dflash.draft.errors import UnsupportedTargetError
from hf_dflash.logs import get_logger
from hf_dflash.target.block_attention import block_attention
from hf_dflash.target.cache import CACHE_KEYWORD

logger = get_logger(__name__)


class Taps:
    """Outputs of selected decoder layers, kept while the owning thread records.

    A tap is what the decoder layer itself returns: the residual stream before the model's final norm, even for the last
    layer (transformers' `hidden_states[-1]` is *after* that norm and is not what drafts are trained on).

    The hooks belong to one generation. They ignore forwards from other threads and forwards outside `recording()`, such
    as those that a classifier-free guidance processor runs on the same model.

    Args:
        layers: the target's decoder layers.
        layer_ids: which of them to tap, 0-based: id i is transformers' `hidden_states[i + 1]`.
    """

    def __init__(self, layers: nn.ModuleList, layer_ids: Sequence[int]):
        self._layers = [layers[i] for i in layer_ids]
        self._layer_ids = list(layer_ids)
        self._outputs: list[list[torch.Tensor]] = [[] for _ in layer_ids]
        self._handles: list[Any] = []
        self._recording_thread: int | None = None

    def __enter__(self) -> "Taps":
        for slot, layer in enumerate(self._layers):
            self._handles.append(layer.register_forward_hook(self._hook_for(slot)))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._outputs = [[] for _ in self._layers]

    def _hook_for(self, slot: int):
        def keep(_module: nn.Module, _inputs: tuple, output: torch.Tensor | tuple) -> None:
            if self._recording_thread == threading.get_ident():
                self._outputs[slot].append(output if isinstance(output, torch.Tensor) else output[0])

        return keep

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the tapped outputs of the forwards that this thread runs inside the `with` block."""
        self._recording_thread = threading.get_ident()
        try:
            yield
        finally:
            self._recording_thread = None

    def take(self, device: torch.device) -> torch.Tensor:
        """Return what was recorded and clear it.

        Returns:
            `(batch, tokens, taps * hidden)` in the target's dtype on `device`, layers concatenated in the order of
            `layer_ids`. The chunks of a chunked prefill are concatenated along `tokens`.
        """
        outputs, self._outputs = self._outputs, [[] for _ in self._layers]
        for layer_id, chunks in zip(self._layer_ids, outputs, strict=True):
            if not chunks:
                raise UnsupportedTargetError(self._why_missing(layer_id, others_ran=any(outputs)))
            if chunks[0].dim() != 3:
                raise UnsupportedTargetError(
                    f"Decoder layer {layer_id} of the target returns a tensor of shape {tuple(chunks[0].shape)}; a "
                    "tap is expected to be (batch, tokens, hidden). This target keeps several residual streams and "
                    "cannot be tapped."
                )
        # The taps of a long prompt are large, so avoid copies.
        taps = [chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1) for chunks in outputs]
        return torch.cat([tap.to(device) for tap in taps], dim=-1)

    def _why_missing(self, layer_id: int, others_ran: bool) -> str:
        """Return the message for a tapped layer whose hook did not fire in a forward."""
        kind = type(self._layers[self._layer_ids.index(layer_id)]).__name__
        skipped = (
            "the model skips this layer for these inputs, as models do with cross-attention layers if there is no "
            "image. Pass inputs for which it runs, or use a draft that taps other layers"
        )
        compiled = (
            "a module that contains several layers was compiled (`target.model.forward = torch.compile(...)`). Use the "
            "uncompiled target, or compile it layer by layer"
        )
        reason = f"The other tapped layers ran: {skipped}" if others_ran else f"Either {compiled}; or {skipped}"
        return (
            f"The output of decoder layer {layer_id} of the target (a {kind}) was not captured, so the draft has no "
            f"context. {reason}."
        )


class Target:
    """A target model with the operations that decoding needs.

    Args:
        model: a causal language model, on its own or as the text tower of a multimodal model.

    Raises:
        UnsupportedTargetError: the decoder layers, the input embedding or the output head cannot be found.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model = _uncompiled(model)
        self.text_config = model.config.get_text_config(decoder=True)
        self.layers = _find_decoder_layers(model, self.text_config.num_hidden_layers)
        self._embedding = model.get_input_embeddings()
        self._output_head = model.get_output_embeddings()
        if self._output_head is None:
            raise UnsupportedTargetError(
                f"{self.name} has no output embeddings (`get_output_embeddings()` is None), which a DFlash draft "
                "borrows as its head. Pass a model with a language-modeling head, such as one loaded by "
                "AutoModelForCausalLM."
            )

    @property
    def name(self) -> str:
        """The target's name for messages: its path or Hub id, or else its class."""
        return getattr(self.model.config, "name_or_path", "") or type(self.model).__name__

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point dtype of the target's hidden states, even if its weights are quantized."""
        return self.model.dtype

    @property
    def num_embeddings(self) -> int:
        """Rows of the input embedding: every id below this can be embedded."""
        return getattr(self._embedding, "num_embeddings", self.text_config.vocab_size)

    def refuse_other_widths(self, *, embedding: bool, head: bool) -> None:
        """Reject an embedding or a head that a draft would use but whose width is not that of the hidden states.

        Some targets project between the two (OPT-350M, RemBERT). The projection is part of their forward, so a draft
        cannot use the embedding or the head alone.

        Args:
            embedding, head: whether the draft uses the target's.

        Raises:
            UnsupportedTargetError: naming both widths. A module that does not state its width is accepted.
        """
        hidden_size = self.text_config.hidden_size
        widths = {
            "input embedding": getattr(self._embedding, "embedding_dim", None) if embedding else None,
            "output head": getattr(self._output_head, "in_features", None) if head else None,
        }
        for part, width in widths.items():
            if width not in (None, hidden_size):
                raise UnsupportedTargetError(
                    f"The {part} of {self.name} ({type(self.model).__name__}) has width {width}, its hidden states "
                    f"have {hidden_size}: the target projects between them, so a DFlash draft, which works on hidden "
                    "states, cannot use it. Use a draft with its own embeddings and head, or generate without a draft."
                )

    def embed(self, ids: torch.LongTensor) -> torch.Tensor:
        """Embed a block the way it was embedded when the draft was trained.

        The embedding module is called, so scaled embeddings (Gemma multiplies by sqrt(hidden)) and quantized ones
        behave as in the target. A norm that the embedding module applies on top (Muse) is bypassed: the draft was
        trained on the embeddings before it.

        Args:
            ids: `(batch, n)`.

        Returns:
            `(batch, n, hidden)` in the target's dtype.
        """
        self._gather()
        ids = ids.to(_execution_device(self._embedding, ids.device))
        if getattr(self._embedding, "embed_norm", None) is not None:
            return nn.Embedding.forward(self._embedding, ids)
        return self._embedding(ids)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Call the target's head on the draft's output: `(batch, n, hidden)` to `(batch, n, vocabulary)`.

        The head is called and its weight is never read, so a quantized head works. Its input is cast to the target's
        dtype and moved to the head's device.
        """
        self._gather()
        return self._output_head(
            hidden.to(device=_execution_device(self._output_head, hidden.device), dtype=self.dtype)
        )

    def _gather(self) -> None:
        """Unshard the weights that FSDP's `fully_shard(model)` gathers only for the model's own forward.

        Embedding and head are usually among them. The next forward reshards them if FSDP is configured to.
        """
        if isinstance(getattr(self.model, "unshard", None), Callable):
            self.model.unshard()

    def taps(self, layer_ids: Sequence[int]) -> Taps:
        """Return taps on these decoder layers; see `Taps`."""
        return Taps(self.layers, layer_ids)

    def prefill(
        self, input_ids: torch.LongTensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> ModelOutput:
        """Run the prompt as plain generate does, in chunks if `generation_config.prefill_chunk_size` is set.

        Returns:
            the model's output. The last position of its logits predicts the first new token.
        """
        if "logits_to_keep" in model_kwargs and getattr(self.text_config, "num_kv_shared_layers", 0):
            # These targets (Gemma 4) run their last layers only on the kept tokens, so a tap there would miss the
            # prompt. They do so for a number of tokens to keep but not for a list of indices, such as [-1] (the last).
            model_kwargs = {**model_kwargs, "logits_to_keep": torch.tensor([-1], device=input_ids.device)}
        return self.model._prefill(input_ids, generation_config, model_kwargs)

    def verify(self, ids: torch.LongTensor, block_length: int, model_kwargs: dict[str, Any]) -> ModelOutput | None:
        """Verify a block (the anchor and its candidates) in one forward.

        Args:
            ids: `(batch, length + block_length - 1)`, the committed ids followed by the candidates. The last committed
                id is the anchor, the first input of the block. Example: committed [5, 6, 7], candidates [8, 9]: ids [5,
                6, 7, 8, 9], block_length 3, and the model's inputs are [7, 8, 9].
            block_length: number of inputs, anchor included.
            model_kwargs: what plain generate would have when the anchor is the next input.

        Returns:
            the model's output with logits `(batch, block_length, vocabulary)`. None, without a forward, if the model
            would read a block of several tokens into another cache than the one in `model_kwargs` (Phi-3, where its
            RoPE switches): then the anchor must be verified alone, as plain generate does.
        """
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=block_length, **model_kwargs)
        if block_length > 1 and inputs.get(CACHE_KEYWORD) is not model_kwargs.get(CACHE_KEYWORD):
            return None
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = block_length
        # An anchor alone needs no block attention, and may come with the whole text (another cache).
        with block_attention() if block_length > 1 else nullcontext():
            outputs = self.model(**inputs, return_dict=True)
        outputs.logits = outputs.logits[:, -block_length:]
        return outputs

    def advance(self, outputs: ModelOutput, model_kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        """Return the `model_kwargs` plain generate would have after `num_tokens` more tokens. The argument is not
        modified.

        Token types are extended one token at a time, so that the last entry is repeated. Extending by several at once
        would repeat that many entries of the prompt, image positions included. A model's own update is also called
        once per token, as in plain generate: some extend a mask by one row per call (Llama 3.2 Vision).
        """
        update = self.model._update_model_kwargs_for_generation
        is_own = getattr(update, "__func__", None) is not GenerationMixin._update_model_kwargs_for_generation
        step = 1 if is_own or model_kwargs.get("token_type_ids") is not None else num_tokens
        advanced = dict(model_kwargs)
        for _ in range(num_tokens // step if step else 0):
            advanced = update(
                outputs, advanced, is_encoder_decoder=self.model.config.is_encoder_decoder, num_new_tokens=step
            )
        return advanced


def _uncompiled(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without `model.forward = torch.compile(...)` or `model.compile()`, sharing its weights: a graph
    of the whole model skips the hooks that take the taps. The caller's object stays compiled.
    """
    original = getattr(vars(model).get("forward"), "_torchdynamo_orig_callable", None)
    if original is None and model._compiled_call_impl is None:
        return model
    logger.warning_once(
        "The target is compiled as a whole. With a DFlash draft it runs uncompiled, since a compiled graph does not "
        "expose its layers' outputs. Compile the layers instead (`layer.forward = torch.compile(layer.forward)`)."
    )
    model = copy.copy(model)
    model._compiled_call_impl = None
    if original is not None:
        model.forward = original
    return model


def _find_decoder_layers(model: PreTrainedModel, num_layers: int) -> nn.ModuleList:
    """Find the text tower's decoder layers by their number: the `nn.ModuleList` with as many entries as the config has
    layers.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for module in (decoder, model):
        lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
        if lists:
            # `modules()` goes from the outside in, so the first match is the stack itself, not a list inside a layer.
            return lists[0]
    raise UnsupportedTargetError(
        f"No list of {num_layers} decoder layers (`num_hidden_layers` of the text config) was found in "
        f"{type(model).__name__}, so there is nothing for the draft to tap. Pass a decoder-only causal language "
        "model."
    )


def _execution_device(module: nn.Module, default: torch.device) -> torch.device:
    """Return the device a module runs on: its accelerate hook's if it is offloaded, else its first tensor's."""
    hook_device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if hook_device is not None:
        return torch.device(hook_device)
    tensor = next(module.parameters(), None)
    return default if tensor is None else tensor.device
