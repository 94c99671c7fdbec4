"""The draft networks: a small Qwen3-style decoder that reads a target's hidden states and fills in a block of tokens.

The target's embeddings, hidden states and head come in as arguments; of a cache only `update` and `get_seq_length` are
used. Weight names are those of the published checkpoints. This file is uploaded to the Hub, so it imports only torch,
transformers and its siblings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig
from transformers import initialization as init
from transformers.cache_utils import DFlashCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import ModelOutput
from transformers.utils.output_capturing import capture_outputs

from .configuration_dflash import DFlashConfig
from .errors import CheckpointError, DraftDtypeError, PairingError
from .masking_dflash import BlockMasks

FP16_REASON = (
    "A DFlash draft does not work in float16: its activations have outliers beyond float16's range, and every "
    "candidate would silently be rejected. Use torch.bfloat16 (or torch.float32) for the draft; the target may stay in "
    "float16."
)


@dataclass
class DFlashDraftOutput(ModelOutput):
    """The output of a draft's forward.

    last_hidden_state: (batch, n, hidden_size) in the dtype of `noise_embeds`; index i is block position i.
    cache: the context cache that was used, now ending in the block's n keys and values; None if none was used.
    hidden_states, attentions: as in any transformers model, if requested.
    """

    last_hidden_state: torch.Tensor | None = None
    cache: Any = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class DFlashRotaryEmbedding(Qwen3RotaryEmbedding):
    """RoPE of any type that transformers supports; its frequencies stay in float32 when the draft is cast."""

    def _apply(self, fn: Callable, recurse: bool = True) -> "DFlashRotaryEmbedding":
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, frequencies in before.items():
            moved = getattr(self, name)
            if moved.dtype != frequencies.dtype:
                # Rounded to bfloat16, a frequency would be off by up to 0.4 %: 40 positions at position 10,000.
                setattr(self, name, frequencies.to(moved.device))
        return self


class DFlashAttention(nn.Module):
    """Queries from the block, keys and values from the context and the block."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.layer_type = config.layer_types[layer_idx]
        self.is_causal = config.layer_causal[layer_idx]
        self.sliding_window = config.sliding_window if self.layer_type == "sliding_attention" else None

        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        masks: BlockMasks,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(batch, n, hidden_size), (batch, c, hidden_size) -> (batch, n, hidden_size), attention weights or None."""
        # One matmul for context and block: in decoding both are short, and reading the weights dominates the cost.
        source = block if context is None else torch.cat([context, block], dim=1)
        query = self.q_norm(self._heads(self.q_proj(block))).transpose(1, 2)
        key = self.k_norm(self._heads(self.k_proj(source))).transpose(1, 2)
        value = self._heads(self.v_proj(source)).transpose(1, 2)

        # Positions run over context and block; the queries are the last n of them.
        cos, sin = (embedding.unsqueeze(1) for embedding in position_embeddings)
        n = block.shape[1]
        query = query * cos[..., -n:, :] + rotate_half(query) * sin[..., -n:, :]
        key = key * cos + rotate_half(key) * sin
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)

        visible = masks.visible_keys(self, key.shape[-2])
        key, value = key[..., -visible:, :], value[..., -visible:, :]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, weights = attend(
            self,
            query,
            key,
            value,
            masks.get(self, query, visible),
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            # Only flash attention builds its own causal mask; for all others ours is complete.
            is_causal=self.is_causal and masks.is_flash,
            **kwargs,
        )
        return self.o_proj(attended.reshape(*block.shape[:-1], -1)), weights

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim)


class GroupedDynamicCausalConv(nn.Module):
    """DFlash 2: a short causal convolution over the block, before and after a sublayer, with an input-dependent kernel.

    Kernel = `base_kernel` (per channel) + `kernel_projection(input)` (per token and group of channels). The kernels
    before and after the sublayer are both computed from the sublayer's input.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.kernel_size = config.conv_kernel_size
        self.group_size = config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.kernel_size, config.hidden_size))
        groups = config.hidden_size // self.group_size
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.kernel_size * groups, bias=False)

    def around(
        self, sublayer: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, block_length: int | None = None
    ) -> torch.Tensor:
        """(batch, n, hidden_size) -> (batch, n, hidden_size): convolve, run the sublayer, convolve.

        If a row holds several blocks of `block_length` tokens, the convolutions do not cross block boundaries.
        """
        shape = hidden.shape
        length = block_length or shape[1]
        dynamic = self.kernel_projection(hidden).view(-1, length, 2, self.kernel_size, shape[-1] // self.group_size)
        before = self._convolve(hidden.reshape(-1, length, shape[-1]), dynamic[..., 0, :, :], self.base_kernel[0])
        after = sublayer(before.view(shape)).reshape(-1, length, shape[-1])
        return self._convolve(after, dynamic[..., 1, :, :], self.base_kernel[1]).view(shape)

    def _convolve(self, hidden: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        grouped = hidden.unflatten(-1, (-1, self.group_size))
        kernel = base.unflatten(-1, (-1, self.group_size)) + dynamic.unsqueeze(-1)
        # Kernel entry j applies to the token j back. Size 2: token 5 gets kernel[0] * x[5] + kernel[1] * x[4], and
        # token 0 gets only kernel[0] * x[0].
        convolved = kernel[..., 0, :, :] * grouped
        for back in range(1, min(self.kernel_size, hidden.shape[1])):
            convolved[:, back:] = convolved[:, back:] + kernel[:, back:, back] * grouped[:, :-back]
        return convolved.flatten(-2)


class CandidateSelector(nn.Module):
    """DFlash 2: picks one candidate per position, left to right, by its logit and its fit to the previous one."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, hidden: torch.Tensor, logits: torch.Tensor, anchor_ids: torch.Tensor) -> torch.Tensor:
        """(batch, n, hidden_size), (batch, n, vocabulary), (batch,) -> token ids (batch, n).

        Picks the highest-scoring of the `top_k` candidates of each position, in float32:
        logit + <predecessor_codebook[previous] * hidden_projection(hidden), successor_codebook[candidate]>.
        """
        unary, candidates = torch.topk(logits, self.top_k, dim=-1)
        projected = self.hidden_projection(hidden)
        successors = F.embedding(candidates, self.successor_codebook)
        # A padded target may generate a token that has no row in the codebooks; the last row stands in for it.
        previous, path = anchor_ids.clamp(max=self.predecessor_codebook.shape[0] - 1), []
        for position in range(hidden.shape[1]):
            predecessor = F.embedding(previous, self.predecessor_codebook) * projected[:, position]
            transition = (successors[:, position].float() @ predecessor.float().unsqueeze(-1)).squeeze(-1)
            best = (unary[:, position].float() + transition).argmax(-1, keepdim=True)
            previous = candidates[:, position].gather(-1, best).squeeze(-1)
            path.append(previous)
        return torch.stack(path, dim=1)


class DFlashDecoderLayer(GradientCheckpointingLayer):
    """Attention over context and block, then an MLP; in DFlash 2 each is wrapped in two convolutions."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_conv = GroupedDynamicCausalConv(config) if config.dflash_version == 2 else None
        self.mlp_conv = GroupedDynamicCausalConv(config) if config.dflash_version == 2 else None

    def forward(
        self, block: torch.Tensor, context: torch.Tensor | None, block_length: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """(batch, n, hidden_size), (batch, c, hidden_size) -> (batch, n, hidden_size)."""

        def attend(hidden: torch.Tensor) -> torch.Tensor:
            return self.self_attn(hidden, context, **kwargs)[0]

        def around(conv: GroupedDynamicCausalConv | None, sublayer: Callable, hidden: torch.Tensor) -> torch.Tensor:
            return sublayer(hidden) if conv is None else conv.around(sublayer, hidden, block_length)

        block = block + around(self.attention_conv, attend, self.input_layernorm(block))
        return block + around(self.mlp_conv, self.mlp, self.post_attention_layernorm(block))


class DFlashPreTrainedModel(PreTrainedModel):
    """Loading, saving, initialization and dtype checks of a draft.

    Raises:
        DraftDtypeError: whenever a draft would be built in, loaded in or cast to float16.
    """

    config_class = DFlashConfig
    config: DFlashConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    # Set by `hf_dflash.draft.loading`, which reads the published layouts; exported drafts are always canonical.
    load_published: ClassVar[Callable | None] = None
    # Save and push the code along, so that plain transformers loads the draft with trust_remote_code.
    _auto_class = "AutoModel"
    input_modalities = ("text",)
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["DFlashDecoderLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["cache", "past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs: ClassVar[dict[str, type]] = {
        "hidden_states": DFlashDecoderLayer,
        "attentions": DFlashAttention,
    }

    def __init__(self, config: DFlashConfig, *args: Any, **kwargs: Any) -> None:
        # transformers sets the default dtype while it builds a model, however the dtype was spelled.
        if torch.get_default_dtype() == torch.float16:
            raise DraftDtypeError(FP16_REASON)
        super().__init__(config, *args, **kwargs)
        # As on any assistant: `draft.generation_config.num_assistant_tokens` sets the candidates per block.
        self.generation_config = GenerationConfig()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any
    ) -> "DFlashPreTrainedModel":
        """Load as any transformers model; with hf_dflash installed, from every published layout, like `load_draft`."""
        if cls.load_published is None or pretrained_model_name_or_path is None or config is not None:
            return super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)
        return cls.load_published(pretrained_model_name_or_path, *args, **kwargs)

    def _apply(self, fn: Callable, recurse: bool = True) -> "DFlashPreTrainedModel":
        """Check the dtype: every cast or move of a module, also as a submodule, goes through here."""
        weight = next(self.parameters())
        if fn(torch.empty(0, dtype=weight.dtype, device=weight.device)).dtype == torch.float16:
            raise DraftDtypeError(FP16_REASON)
        return super()._apply(fn, recurse)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GroupedDynamicCausalConv):
            # Starts out as the identity.
            identity = torch.zeros_like(module.base_kernel)
            identity[:, 0] = 1.0
            init.copy_(module.base_kernel, identity)
        elif isinstance(module, CandidateSelector):
            init.normal_(module.predecessor_codebook, std=self.config.initializer_range)
            init.normal_(module.successor_codebook, std=self.config.initializer_range)
        elif isinstance(module, DFlashDraftModel) and module.d2t is not None:
            init.zeros_(module.d2t)


class DFlashDraftModel(DFlashPreTrainedModel):
    """The draft network. `DFlashDraftModel(config)` builds a `DFlash2DraftModel` if the configuration is version 2."""

    def __new__(cls, config: DFlashConfig | None = None, *args: Any, **kwargs: Any) -> "DFlashDraftModel":
        # Copying and unpickling pass no configuration, but already have the right class.
        return super().__new__(DFlash2DraftModel if config is not None and config.dflash_version == 2 else cls)

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.context_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DFlashRotaryEmbedding(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embeddings else None
        reduced = config.draft_vocab_size
        self.lm_head = nn.Linear(config.hidden_size, reduced, bias=False) if reduced else None
        self.register_buffer("d2t", torch.zeros(reduced, dtype=torch.long) if reduced else None)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding | None:
        """Return the draft's own embeddings, or None if it uses the target's. Quantizers call this."""
        return self.embed_tokens

    def fuse(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """Taps (batch, c, n_taps * target hidden size), any float dtype -> fused context (batch, c, hidden_size)."""
        if context_hidden_states.shape[-1] != self.fc.in_features:
            raise PairingError(
                f"The target's taps are {context_hidden_states.shape[-1]} wide, but this draft was trained on "
                f"{self.fc.in_features} ({len(self.config.target_layer_ids)} taps). Use the target it was trained for"
                f"{f': {self.config.target_name_or_path}' if self.config.target_name_or_path else ''}."
            )
        return self.hidden_norm(self.fc(context_hidden_states.to(self.norm.weight.dtype)))

    @capture_outputs
    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> DFlashDraftOutput:
        """Run one parallel pass over a block.

        Args:
            noise_embeds: (batch, n, hidden_size), n >= 1, the embeddings of [anchor, mask, mask, ...]; any float dtype.
            context_hidden_states: (batch, c, n_taps * target hidden size), the taps not yet in the cache; any float
                dtype. None if there are none.
            attention_mask: None if there is no padding; (batch, cached + c + n) with 0 at padding; or a ready-made
                mask, see `BlockMasks`.
            position_ids: (batch or 1, c + n); default: consecutive, continuing after the cache.
            cache: keys and values of the context from earlier rounds; this call adds c + n, of which the caller crops
                the block's n.
            use_cache: True creates a cache if none is given.
            past_key_values: the name of `cache` in transformers before 5.24.
            kwargs: `block_length` if the n tokens are several packed blocks (in training), each convolved separately;
                and further arguments of the attention implementation.
        """
        cache = cache if cache is not None else past_key_values
        if use_cache and cache is None:
            cache = DFlashCache(config=self.config)
            cache.activate_past_recording()

        block = (noise_embeds * self.config.input_embedding_scale).to(self.norm.weight.dtype)
        context = None if context_hidden_states is None else self.fuse(context_hidden_states)
        length = block.shape[1] + (0 if context is None else context.shape[1])
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(seen, seen + length, device=block.device)[None]
        masks = BlockMasks(self.config._attn_implementation, block.shape[1], attention_mask)
        position_embeddings = self.rotary_emb(block, position_ids)
        for layer in self.layers:
            block = layer(block, context, position_embeddings=position_embeddings, masks=masks, cache=cache, **kwargs)
        return DFlashDraftOutput(last_hidden_state=self.norm(block).to(noise_embeds.dtype), cache=cache)

    def embed(self, input_ids: torch.Tensor, target_embed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """(batch, n) ids -> (batch, n, hidden_size), from the draft's own embeddings if any, else the target's.

        Of its own, a token beyond the draft's vocabulary, which a padded target may generate, is the mask token.
        """
        if self.embed_tokens is None:
            return target_embed(input_ids)
        ids = input_ids.to(self.embed_tokens.weight.device)
        return self.embed_tokens(ids.where(ids < self.config.vocab_size, self.config.mask_token_id))

    def compute_logits(self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """(batch, n, hidden_size) -> (batch, n, vocabulary); the draft's own reduced vocabulary if it has one.

        logits = head(hidden) * output_multiplier, then cap * tanh(logits / cap).
        """
        logits = head(hidden) if self.lm_head is None else self.lm_head(hidden.to(self.lm_head.weight.dtype))
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def propose(
        self, hidden: torch.Tensor, anchor_ids: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the candidates for the block positions after the anchor.

        Args:
            hidden: (batch, n, hidden_size), the last hidden state of those positions: `last_hidden_state[:, 1:]`.
            anchor_ids: (batch,) token ids.
            head: the target's head, (batch, n, hidden_size) -> (batch, n, vocabulary).

        Returns:
            (batch, n) ids in the target's vocabulary, all below the draft's `vocab_size`, even if the target's head has
            more rows (it was padded after the draft was trained).
        """
        # In float32, where argmax on the CPU is several times faster than in bfloat16; the order is the same.
        candidates = self.compute_logits(hidden, head)[..., : self.config.vocab_size].float().argmax(-1)
        # d2t holds offsets: draft id 7 with d2t[7] = 100 is target id 107.
        return candidates if self.d2t is None else candidates + self.d2t[candidates]


class DFlash2DraftModel(DFlashDraftModel):
    """DFlash 2: convolutions around the sublayers, and candidates chosen so that each follows the previous one."""

    def __init__(self, config: DFlashConfig) -> None:
        if config.dflash_version != 2:
            raise CheckpointError(
                f"A DFlash2DraftModel needs a configuration with dflash_version 2, found {config.dflash_version}. "
                "Use DFlashDraftModel instead."
            )
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)
        self.post_init()

    def propose(
        self, hidden: torch.Tensor, anchor_ids: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Like DFlash 1, but along the selector's path instead of position by position."""
        logits = self.compute_logits(hidden, head)[..., : self.config.vocab_size]
        return self.candidate_selector(hidden.to(self.norm.weight.dtype), logits, anchor_ids)


__all__ = ["DFlash2DraftModel", "DFlashDraftModel", "DFlashPreTrainedModel"]
