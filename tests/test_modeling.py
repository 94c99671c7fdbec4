"""The draft networks in isolation: masks, rounds with a cache, dtypes, heads, DFlash 2, saving and loading.

Agreement with the authors' package and with transformers' own draft is in test_parity.py.
"""

import copy
import pickle

import pytest
import torch
from tiny_drafts import LAYER_KINDS, tiny_config, tiny_draft, tiny_draft_of_kind
from torch import nn
from transformers.cache_utils import DFlashCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_dflash.draft.errors import CheckpointError, DraftDtypeError, PairingError, UnsupportedOptionError
from hf_dflash.draft.masking_dflash import BlockMasks
from hf_dflash.draft.modeling_dflash import DFlash2DraftModel, DFlashDraftModel

HIDDEN, TAPS_WIDTH, BLOCK = 64, 128, 8
TOLERANCE = 1e-5
KINDS_AND_VERSIONS = [(kind, version) for kind in LAYER_KINDS for version in (1, 2)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def random_inputs(batch: int = 1, context: int = 11, block: int = BLOCK) -> dict[str, torch.Tensor]:
    return {
        "noise_embeds": torch.randn(batch, block, HIDDEN),
        "context_hidden_states": torch.randn(batch, context, TAPS_WIDTH),
    }


@torch.no_grad()
def last_hidden(draft: DFlashDraftModel, **inputs) -> torch.Tensor:
    return draft(**inputs).last_hidden_state


# ---- rounds with a cache ----


@pytest.mark.parametrize(("kind", "version"), KINDS_AND_VERSIONS)
def test_rounds_with_a_cache_equal_one_pass_over_the_whole_context(kind: str, version: int):
    draft = tiny_draft_of_kind(kind, version)
    cache = DFlashCache(config=draft.config)
    cache.activate_past_recording()
    context = torch.randn(1, 24, TAPS_WIDTH)
    seen = 0
    for new in (9, 1, 5, 8, 1):
        # The last rounds use smaller blocks than the checkpoint's.
        block = torch.randn(1, BLOCK if seen < 10 else 5, HIDDEN)
        new_context = context[:, seen : seen + new]
        in_rounds = last_hidden(draft, noise_embeds=block, context_hidden_states=new_context, cache=cache)
        cache.crop(-block.shape[1])
        seen += new
        at_once = last_hidden(draft, noise_embeds=block, context_hidden_states=context[:, :seen])
        assert (in_rounds - at_once).abs().max() <= TOLERANCE
        assert cache.get_seq_length() == seen


def test_a_block_needs_no_new_context():
    draft = tiny_draft()
    inputs = random_inputs()
    cache = draft(**inputs, use_cache=True).cache
    cache.crop(-BLOCK)
    again = last_hidden(draft, noise_embeds=inputs["noise_embeds"], cache=cache)
    assert (again - last_hidden(draft, **inputs)).abs().max() <= TOLERANCE


def test_the_older_name_of_the_cache_is_accepted():
    draft = tiny_draft()
    cache = DFlashCache(config=draft.config)
    assert draft(**random_inputs(context=5), past_key_values=cache).cache is cache
    assert cache.get_seq_length() == 5 + BLOCK


# ---- masks ----


class Layer:
    """The attributes of an attention layer that a mask depends on."""

    def __init__(self, sliding_window: int | None, is_causal: bool):
        self.layer_type = "full_attention" if sliding_window is None else "sliding_attention"
        self.sliding_window = sliding_window
        self.is_causal = is_causal


@pytest.mark.parametrize("window", [None, 2, 3, 6, 11, 12])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padding", [None, [1] * 12, [0] * 4 + [1] * 8, [1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1]])
def test_every_query_sees_exactly_the_allowed_keys(window, is_causal, padding):
    block, num_keys = 4, 12
    row = padding or [1] * num_keys
    # The rules, pair by pair; distances count real tokens.
    expected = torch.tensor(
        [
            [
                bool(row[key])
                and not (is_causal and key > query)
                and (window is None or abs(sum(row[: query + 1]) - sum(row[: key + 1])) < window)
                for key in range(num_keys)
            ]
            for query in range(num_keys - block, num_keys)
        ]
    )
    layer = Layer(window, is_causal)
    masks = BlockMasks("sdpa", block, None if padding is None else torch.tensor([padding]))
    visible = masks.visible_keys(layer, num_keys)
    mask = masks.get(layer, torch.empty(1, 1, block, 16), visible)
    actual = torch.ones(block, visible, dtype=torch.bool) if mask is None else mask[0, 0]
    assert not expected[:, : num_keys - visible].any(), "visible keys were cut off"
    assert torch.equal(actual.expand(block, -1), expected[:, num_keys - visible :])


def test_no_mask_is_built_if_every_key_is_visible():
    query = torch.empty(2, 1, 4, 16)
    for layer in (Layer(None, False), Layer(12, False)):
        assert BlockMasks("sdpa", 4, None).get(layer, query, 12) is None
        assert BlockMasks("sdpa", 4, torch.ones(2, 12, dtype=torch.long)).get(layer, query, 12) is None


def test_layers_of_a_kind_share_one_mask():
    masks, query = BlockMasks("sdpa", 4, None), torch.empty(1, 1, 4, 16)
    assert masks.get(Layer(3, True), query, 6) is masks.get(Layer(3, True), query, 6)
    assert not torch.equal(masks.get(Layer(3, True), query, 6), masks.get(Layer(3, False), query, 6))


def test_a_mask_that_is_too_short_is_rejected():
    with pytest.raises(UnsupportedOptionError, match="covers 15 positions.*add up to 19"):
        last_hidden(tiny_draft(), **random_inputs(), attention_mask=torch.tensor([[0] + [1] * 14]))


@pytest.mark.parametrize(("kind", "version"), KINDS_AND_VERSIONS)
def test_padded_rows_equal_single_rows(kind: str, version: int):
    draft = tiny_draft_of_kind(kind, version)
    inputs = random_inputs(batch=3)
    # One row without padding, one padded on the left, one with gaps, as after a ragged round.
    real = torch.tensor([[1] * 11, [0] * 5 + [1] * 6, [0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 0]])
    mask = torch.cat([real, torch.ones(3, BLOCK, dtype=torch.long)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    together = last_hidden(draft, **inputs, attention_mask=mask, position_ids=positions)
    for row in range(3):
        alone = last_hidden(
            draft,
            noise_embeds=inputs["noise_embeds"][row : row + 1],
            context_hidden_states=inputs["context_hidden_states"][row : row + 1, real[row].bool()],
        )
        assert (together[row] - alone[0]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_eager_and_sdpa_agree(kind: str):
    inputs = random_inputs(batch=2)
    mask = torch.ones(2, 11 + BLOCK, dtype=torch.long)
    mask[1, :4] = 0
    for attention_mask in (None, mask):
        outputs = []
        for implementation in ("eager", "sdpa"):
            draft = tiny_draft_of_kind(kind)
            draft.set_attn_implementation(implementation)
            outputs.append(last_hidden(draft, **inputs, attention_mask=attention_mask))
        assert (outputs[0] - outputs[1]).abs().max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_flex_attention_agrees(kind: str):
    inputs = random_inputs(batch=2)
    mask = torch.ones(2, 11 + BLOCK, dtype=torch.long)
    mask[1, :4] = 0
    draft = tiny_draft_of_kind(kind)
    for attention_mask in (None, mask):
        draft.set_attn_implementation("sdpa")
        expected = last_hidden(draft, **inputs, attention_mask=attention_mask)
        draft.set_attn_implementation("flex_attention")
        assert (last_hidden(draft, **inputs, attention_mask=attention_mask) - expected).abs().max() <= TOLERANCE


def naive_flash(module, query, key, value, attention_mask, scaling, sliding_window, is_causal, dropout=0.0, **kwargs):
    """Compute what flash attention does: 2-D padding, causal masks and windows aligned to the last key."""
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    ahead = torch.arange(num_keys)[None] - torch.arange(num_keys - num_queries, num_keys)[:, None]
    allowed = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if is_causal:
        allowed &= ahead <= 0
    if sliding_window is not None:
        allowed &= ahead.abs() < sliding_window
    if attention_mask is not None:
        assert attention_mask.shape == (query.shape[0], num_keys)
        allowed = allowed & attention_mask[:, None, None, :].bool()
    repeats = module.num_key_value_groups
    attended = nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(repeats, 1),
        value.repeat_interleave(repeats, 1),
        attn_mask=allowed.expand(query.shape[0], 1, -1, -1),
        scale=scaling,
    )
    return attended.transpose(1, 2), None


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_flash_attention_gets_equivalent_arguments(kind: str, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "naive_flash", naive_flash)
    inputs = random_inputs(batch=2)
    mask = torch.ones(2, 11 + BLOCK, dtype=torch.long)
    mask[1, :4] = 0
    draft = tiny_draft_of_kind(kind)
    for attention_mask in (None, mask):
        draft.config._attn_implementation = "sdpa"
        expected = last_hidden(draft, **inputs, attention_mask=attention_mask)
        draft.config._attn_implementation = "naive_flash"
        assert (last_hidden(draft, **inputs, attention_mask=attention_mask) - expected).abs().max() <= TOLERANCE
    with pytest.raises(UnsupportedOptionError, match="not accept a ready-made mask"):
        last_hidden(draft, **inputs, attention_mask=torch.ones(2, 1, BLOCK, 19, dtype=torch.bool))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("form", ["bool", "additive", "dict"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_two_blocks_packed_under_a_ready_mask_equal_two_calls(form: str, implementation: str, version: int):
    draft = tiny_draft_of_kind("mixed", version, sliding_window=50)
    draft.set_attn_implementation(implementation)
    context, first, second = torch.randn(1, 10, TAPS_WIDTH), torch.randn(1, 4, HIDDEN), torch.randn(1, 4, HIDDEN)
    # The first block's anchor is at position 6, the second's at 10. Keys: 10 of context, then 4 of each block.
    full = torch.zeros(8, 18, dtype=torch.bool)
    full[:4, :6] = full[:4, 10:14] = full[4:, :10] = full[4:, 14:] = True
    causal = full.clone()
    causal[:4, 10:14] = causal[4:, 14:] = torch.ones(4, 4).tril().bool()
    masks = {"full_attention": full[None, None], "sliding_attention": causal[None, None]}
    if form == "additive":
        masks = {name: torch.zeros(mask.shape).masked_fill(~mask, -1e9) for name, mask in masks.items()}
    if form != "dict":
        draft = tiny_draft(version)
        masks = masks["full_attention"]
    packed = last_hidden(
        draft,
        noise_embeds=torch.cat([first, second], dim=1),
        context_hidden_states=context,
        attention_mask=masks,
        position_ids=torch.tensor([[*range(10), *range(6, 10), *range(10, 14)]]),
        block_length=4,
    )
    alone_first = last_hidden(draft, noise_embeds=first, context_hidden_states=context[:, :6])
    alone_second = last_hidden(draft, noise_embeds=second, context_hidden_states=context)
    assert (packed - torch.cat([alone_first, alone_second], dim=1)).abs().max() <= TOLERANCE


# ---- positions ----


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "longrope",
            "short_factor": [1.5] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_every_rope_type_runs_and_differs_from_the_default(rope: dict):
    inputs = random_inputs()
    plain = last_hidden(tiny_draft(), **inputs)
    # The dynamic type has no effect up to its original maximum position: here 16, with 19 in use.
    options = {"rope_parameters": {"rope_theta": 10000.0, **rope}, "max_position_embeddings": 16}
    scaled = last_hidden(tiny_draft(**options), **inputs)
    assert scaled.isfinite().all()
    assert (plain - scaled).abs().max() > 1e-3


def test_only_relative_positions_matter():
    draft, inputs = tiny_draft_of_kind("mixed"), random_inputs()
    shifted = last_hidden(draft, **inputs, position_ids=torch.arange(100, 119)[None])
    assert (last_hidden(draft, **inputs) - shifted).abs().max() <= 5 * TOLERANCE


def test_casting_leaves_the_rope_frequencies_exact():
    draft = tiny_draft()
    frequencies = draft.rotary_emb.inv_freq.clone()
    draft.to(torch.bfloat16)
    assert draft.fc.weight.dtype == torch.bfloat16
    assert torch.equal(draft.rotary_emb.inv_freq, frequencies)


# ---- dtypes ----


@pytest.mark.parametrize("incoming", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32])
def test_the_output_has_the_dtype_of_the_input(incoming: torch.dtype, own: torch.dtype):
    draft = tiny_draft().to(own)
    inputs = {name: tensor.to(incoming) for name, tensor in random_inputs().items()}
    output = last_hidden(draft, **inputs)
    assert output.dtype == incoming
    head = nn.Linear(HIDDEN, 128, bias=False).to(incoming)
    assert draft.propose(output[:, 1:], torch.tensor([3]), head).shape == (1, BLOCK - 1)


@pytest.mark.parametrize(
    "cast",
    [
        lambda draft: draft.half(),
        lambda draft: draft.to(torch.float16),
        lambda draft: draft.to("cpu", torch.float16),
        lambda draft: draft.to(device="cpu", dtype=torch.float16),
        lambda draft: draft.to(torch.zeros(1, dtype=torch.float16)),
        lambda draft: draft.type(torch.float16),
        lambda draft: nn.ModuleDict({"draft": draft}).half(),
        lambda draft: DFlashDraftModel._from_config(draft.config, dtype=torch.float16),
    ],
)
def test_every_way_into_float16_is_rejected_with_the_reason(cast):
    draft = tiny_draft()
    with pytest.raises(DraftDtypeError, match="float16.*outliers.*bfloat16"):
        cast(draft)
    assert {weight.dtype for weight in draft.parameters()} == {torch.float32}


@pytest.mark.parametrize("how", [{"dtype": torch.float16}, {"torch_dtype": torch.float16}, {"dtype": "float16"}])
def test_loading_in_float16_is_rejected(tmp_path, how: dict):
    tiny_draft().save_pretrained(tmp_path)
    with pytest.raises(DraftDtypeError, match="bfloat16"):
        DFlashDraftModel.from_pretrained(tmp_path, **how)


def test_a_checkpoint_in_float16_needs_an_explicit_dtype(tmp_path):
    draft = tiny_draft()
    draft.config.dtype = torch.float16
    draft.save_pretrained(tmp_path, state_dict={name: w.half() for name, w in draft.state_dict().items()})
    draft.config.dtype = torch.float16
    draft.config.save_pretrained(tmp_path)
    with pytest.raises(DraftDtypeError):
        DFlashDraftModel.from_pretrained(tmp_path)
    assert DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


# ---- embeddings and heads ----


def test_the_embedding_scale_applies_only_to_the_block():
    inputs = random_inputs()
    scaled = tiny_draft(input_embedding_scale=3.0)
    expected = last_hidden(tiny_draft(), **{**inputs, "noise_embeds": 3.0 * inputs["noise_embeds"]})
    assert (last_hidden(scaled, **inputs) - expected).abs().max() <= TOLERANCE


def test_logits_are_multiplied_and_then_capped():
    head, hidden = nn.Linear(HIDDEN, 128), torch.randn(1, 3, HIDDEN)
    draft = tiny_draft(output_multiplier=0.5, final_logit_softcapping=2.0)
    assert torch.allclose(draft.compute_logits(hidden, head), 2.0 * torch.tanh(0.5 * head(hidden) / 2.0))
    assert torch.equal(tiny_draft().compute_logits(hidden, head), head(hidden))


def test_own_embeddings_are_used_instead_of_the_targets():
    ids, target = torch.tensor([[5, 127, 127]]), nn.Embedding(128, HIDDEN)
    own = tiny_draft(own_embeddings=True)
    assert torch.equal(own.embed(ids, target), own.embed_tokens.weight[ids])
    assert torch.equal(tiny_draft().embed(ids, target), target(ids))


def test_a_reduced_head_of_its_own_proposes_target_ids():
    draft = tiny_draft(draft_vocab_size=32)

    def target_head(hidden):
        raise AssertionError("the target's head was called")

    hidden = torch.randn(2, 7, HIDDEN)
    candidates = draft.propose(hidden, torch.tensor([1, 2]), target_head)
    chosen = draft.lm_head(hidden).argmax(-1)
    target_ids = [draft_id + int(draft.d2t[draft_id]) for draft_id in range(32)]
    assert candidates.tolist() == [[target_ids[i] for i in row] for row in chosen.tolist()]
    assert candidates.max() > 32, "this draft cannot show whether ids were mapped"


def test_taps_of_another_width_are_rejected_with_both_widths():
    draft = tiny_draft(target_name_or_path="some/target")
    with pytest.raises(PairingError, match="96 wide.*trained on 128 .2 taps.*some/target"):
        draft.fuse(torch.randn(1, 3, 96))


# ---- DFlash 2 ----


def test_the_configuration_decides_the_version():
    assert type(DFlashDraftModel(tiny_config(version=2))) is DFlash2DraftModel
    assert type(DFlashDraftModel(tiny_config(version=1))) is DFlashDraftModel
    with pytest.raises(CheckpointError, match="dflash_version 2, found 1"):
        DFlash2DraftModel(tiny_config(version=1))


@pytest.mark.parametrize("kernel_size", [1, 2, 3])
def test_the_convolution_equals_its_definition(kernel_size: int):
    conv = tiny_draft(version=2, conv_kernel_size=kernel_size).layers[0].attention_conv
    hidden = torch.randn(1, 5, HIDDEN)
    dynamic = conv.kernel_projection(hidden).view(5, 2, kernel_size, HIDDEN // 16)

    def convolve(x, stage):
        rows = []
        for i in range(5):
            row = torch.zeros(HIDDEN)
            for back in range(min(kernel_size, i + 1)):
                per_channel = dynamic[i, stage, back].repeat_interleave(16)
                row = row + (conv.base_kernel[stage, back] + per_channel) * x[i - back]
            rows.append(row)
        return torch.stack(rows)

    expected = convolve(torch.sin(convolve(hidden[0], 0)), 1)
    assert (conv.around(torch.sin, hidden)[0] - expected).abs().max() <= TOLERANCE


def test_the_selector_takes_the_best_path_left_to_right():
    draft = tiny_draft(version=2, initializer_range=0.5)
    selector, head = draft.candidate_selector, nn.Linear(HIDDEN, 128, bias=False)
    hidden, previous = torch.randn(1, 7, HIDDEN), 3
    candidates = draft.propose(hidden, torch.tensor([previous]), head)[0]
    logits, projected = head(hidden)[0].detach(), selector.hidden_projection(hidden)[0]
    greedy = []
    for position in range(7):
        follows = selector.successor_codebook @ (selector.predecessor_codebook[previous] * projected[position])
        scores = (logits[position] + follows).tolist()
        previous = max(logits[position].topk(4).indices.tolist(), key=scores.__getitem__)
        greedy.append(previous)
    assert candidates.tolist() == greedy
    assert greedy != logits.argmax(-1).tolist(), "this draft cannot show whether the selector was used"


def test_a_new_convolution_passes_its_input_through():
    config = tiny_config(version=2)
    conv = DFlashDraftModel(config).layers[0].mlp_conv
    nn.init.zeros_(conv.kernel_projection.weight)
    hidden = torch.randn(1, 5, HIDDEN)
    assert torch.equal(conv.around(lambda x: x, hidden), hidden)


# ---- training, saving, outputs ----


@pytest.mark.parametrize("version", [1, 2])
def test_gradient_checkpointing_changes_no_gradient(version: int):
    inputs, gradients = random_inputs(), []
    for checkpointing in (False, True):
        draft = tiny_draft_of_kind("mixed", version).train()
        if checkpointing:
            draft.gradient_checkpointing_enable()
        draft(**inputs).last_hidden_state.square().mean().backward()
        gradients.append({name: w.grad for name, w in draft.named_parameters() if w.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert {"fc.weight", "layers.0.self_attn.k_proj.weight"} < gradients[0].keys()
    for name, gradient in gradients[0].items():
        assert (gradient - gradients[1][name]).abs().max() <= TOLERANCE, name


@pytest.mark.parametrize(
    "options",
    [{}, {"version": 2}, {"own_embeddings": True}, {"draft_vocab_size": 32}],
    ids=["version 1", "version 2", "own embeddings", "own head"],
)
@pytest.mark.parametrize("max_shard_size", ["5GB", "50KB"])
def test_saving_and_loading_gives_the_same_draft(tmp_path, options: dict, max_shard_size: str):
    draft = tiny_draft(**options)
    draft.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "50KB")
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert type(loaded) is type(draft)
    assert loaded.state_dict().keys() == draft.state_dict().keys()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    inputs = random_inputs()
    assert torch.equal(last_hidden(loaded, **inputs), last_hidden(draft, **inputs))


@pytest.mark.parametrize("version", [1, 2])
def test_a_draft_can_be_copied_and_pickled(version: int):
    draft, inputs = tiny_draft(version), random_inputs()
    for twin in (copy.deepcopy(draft), pickle.loads(pickle.dumps(draft))):
        assert type(twin) is type(draft)
        assert torch.equal(last_hidden(twin, **inputs), last_hidden(draft, **inputs))
    assert draft.share_memory().fc.weight.is_shared()


def test_hidden_states_and_attentions_are_returned_on_request():
    draft = tiny_draft_of_kind("mixed")
    draft.set_attn_implementation("eager")
    output = draft(**random_inputs(), output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 6
    assert [weights.shape[-1] for weights in output.attentions] == [13, 13, 13, 13, 19]
    assert draft(**random_inputs(), return_dict=False)[0].shape == (1, BLOCK, HIDDEN)
