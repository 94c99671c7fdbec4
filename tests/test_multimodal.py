"""Exactness on multimodal targets: text only, prompts with an image, a second turn.

The images go through transformers' own image processors (and Gemma 3's full processor, the only one that does not need
torchvision), so the inputs are what a user would pass to `generate`.
"""

import copy

import numpy
import pytest
import torch
import transformers
from families import BASE, BEGIN_IMAGE, END_IMAGE, IMAGE, MULTIMODAL_FAMILIES, VOCAB, Family
from lossless import MODES, PATTERNS, assert_same, assert_varied, both, prompt
from oracle import fixed, oracle_draft, randomly
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast

from hf_dflash import UnsupportedTargetError
from hf_dflash.target.target import Target

PIL = pytest.importorskip("PIL.Image")

NEW = 24


@torch.no_grad()
def open_gates(model: torch.nn.Module) -> None:
    """Open Llama 3.2 Vision's gates a little: closed, they hide the image, and wide open, the text repeats itself."""
    for name, parameter in model.named_parameters():
        if "gate" in name and "proj" not in name:
            parameter.fill_(0.3)


#: Cross-attention layers: only images are attended to, and without one they are skipped.
MLLAMA = Family(
    "MllamaForConditionalGeneration",
    "MllamaConfig",
    {
        "text_config": dict(
            {**BASE, "bos_token_id": 381},
            intermediate_size=96,
            cross_attention_layers=[3],
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_global_layers": 1,
            "attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "intermediate_size": 64,
            "vision_output_dim": 64,
            "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1]],
            "max_num_tiles": 1,
            "initializer_range": 0.4,
        },
        "image_token_index": IMAGE,
    },
    adjust=open_gates,
)
TARGETS = {**MULTIMODAL_FAMILIES, "mllama": MLLAMA}
_built: dict[str, torch.nn.Module] = {}


def target_of(name: str):
    """Return a family's target, built once for this module."""
    if name not in _built:
        _built[name] = TARGETS[name].build(0)
    return _built[name]


def noise_image(seed: int = 0):
    """Generate an image: colored noise of 32 x 32 pixels."""
    noise = numpy.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=numpy.uint8)
    return PIL.fromarray(noise)


def text_with_image(image_tokens: int, types_name: str) -> dict:
    """Return the ids of a text containing an image, their mask and their token types."""
    ids = torch.tensor([[20, BEGIN_IMAGE, *[IMAGE] * image_tokens, END_IMAGE, *range(21, 27)]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), types_name: (ids == IMAGE).long()}


def qwen_inputs() -> dict:
    processor = transformers.Qwen2VLImageProcessor(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=16 * 16, max_pixels=32 * 32
    )
    image = processor(images=[noise_image()], return_tensors="pt")
    # A merged patch of 2 x 2 is one token.
    return {**text_with_image(int(image["image_grid_thw"].prod()) // 4, "mm_token_type_ids"), **image}


def gemma3_inputs() -> dict:
    special = {"<image>": IMAGE, "<begin>": BEGIN_IMAGE, "<end>": END_IMAGE}
    vocabulary = {f"w{index}": index for index in range(VOCAB) if index not in special.values()} | special
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(list(special))
    names = {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", unk_token="w1", extra_special_tokens=names
    )
    images = transformers.Gemma3ImageProcessor(size={"height": 32, "width": 32})
    processor = transformers.Gemma3Processor(image_processor=images, tokenizer=tokenizer, image_seq_length=4)
    return dict(processor(text=["w20 <begin> w21 w22 w23 w24"], images=[noise_image()], return_tensors="pt"))


def gemma4_inputs() -> dict:
    processor = transformers.Gemma4ImageProcessor(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    image = processor(images=[noise_image()], return_tensors="pt")
    tokens = int(image.pop("num_soft_tokens_per_image"))
    return {**text_with_image(tokens, "mm_token_type_ids"), **image}


def mllama_inputs() -> dict:
    processor = transformers.MllamaImageProcessor(size={"height": 32, "width": 32}, max_image_tiles=1)
    image = processor(images=[noise_image()], return_tensors="pt")
    image.pop("num_tiles")
    ids = torch.tensor([[20, 21, IMAGE, *range(22, 31)]])
    # The tokens before the image do not see it.
    mask = (torch.arange(ids.shape[1]) >= 2).long()[None, :, None, None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "cross_attention_mask": mask, **image}


INPUTS = {
    "qwen3_5_vl": qwen_inputs,
    "qwen3_vl": qwen_inputs,
    "gemma3_vl": gemma3_inputs,
    "gemma4_vl": gemma4_inputs,
    "mllama": mllama_inputs,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pattern", ["none", "fixed2", "all", "random"])
@pytest.mark.parametrize("name", INPUTS)
class TestExactness:
    def test_text_only(self, name, pattern, mode):
        pair = both(target_of(name), {"inputs": prompt()}, PATTERNS[pattern], max_new_tokens=NEW, **MODES[mode])
        assert_varied(pair.plain, NEW)
        assert_same(pair)

    def test_a_prompt_with_an_image(self, name, pattern, mode):
        pair = both(target_of(name), INPUTS[name](), PATTERNS[pattern], max_new_tokens=NEW, **MODES[mode])
        assert_varied(pair.plain, NEW)
        assert_same(pair)


@pytest.mark.parametrize("name", INPUTS)
class TestTheTextTower:
    def test_the_image_matters(self, name):
        """Otherwise these tests would prove nothing about it."""
        target, inputs = target_of(name), INPUTS[name]()
        other = dict(inputs, pixel_values=inputs["pixel_values"].flip(-1) * 0.3)
        texts = [target.generate(**each, max_new_tokens=NEW, do_sample=False).tolist() for each in (inputs, other)]
        assert texts[0] != texts[1]

    def test_taps_come_from_the_text_tower(self, name):
        target = Target(target_of(name))
        assert len(target.layers) == target.text_config.num_hidden_layers
        assert all(layer is own for layer, own in zip(target.layers, target.model.get_decoder().layers, strict=True))

    def test_draft_positions_are_the_linear_token_index(self, name):
        """Even if the target numbers image tokens in its own way (three axes in Qwen)."""
        target, inputs = target_of(name), INPUTS[name]()
        reference = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        draft = oracle_draft(target, reference, fixed(2))
        seen: list[list[int]] = []
        handle = draft.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["position_ids"][0].tolist()), with_kwargs=True
        )
        target.generate(**inputs, assistant_model=draft, max_new_tokens=NEW, do_sample=False)
        handle.remove()
        length = inputs["input_ids"].shape[1]
        # Prompt and anchor, then the rest of the block.
        assert seen[0] == list(range(length + draft.config.block_size))
        assert all(positions == list(range(positions[0], positions[-1] + 1)) for positions in seen)

    def test_a_second_turn_on_the_returned_cache(self, name):
        target, inputs = target_of(name), INPUTS[name]()
        assert self.two_turns(target, inputs, drafted=True) == self.two_turns(target, inputs, drafted=False)

    @staticmethod
    def two_turns(target, inputs: dict, drafted: bool) -> list[list[int]]:
        """Run a turn with the image, then a text question that continues on its cache."""
        options = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
        cache, keyword, texts = None, None, []
        for turn in range(2):
            more = {} if cache is None else {keyword: cache}
            plain = target.generate(**inputs, **options, **with_copied_cache(more))
            outputs = plain
            if drafted:
                draft = oracle_draft(target, plain.sequences, randomly(turn, 7))
                outputs = target.generate(**inputs, **options, **more, assistant_model=draft)
            texts.append(outputs.sequences[0].tolist())
            keyword, cache = next((key, value) for key, value in outputs.items() if isinstance(value, DynamicCache))
            ids = torch.cat([outputs.sequences, prompt(4, seed=turn)], dim=1)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | types_of(inputs, ids)
        return texts


def types_of(inputs: dict, ids: torch.Tensor) -> dict:
    """Return the token types of a longer text, under the name that the model uses."""
    names = [name for name in ("mm_token_type_ids", "token_type_ids") if name in inputs]
    return {name: (ids == IMAGE).long() for name in names}


def with_copied_cache(more: dict) -> dict:
    """Copy the cache, so that two runs can start from the same turn."""
    return {name: copy.deepcopy(cache) for name, cache in more.items()}


class TestCrossAttention:
    def test_a_tap_on_a_cross_attention_layer(self):
        target, inputs = target_of("mllama"), mllama_inputs()
        plain = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        draft = oracle_draft(target, plain, fixed(2), taps=(0, 3))
        assert torch.equal(target.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=draft), plain)
        with pytest.raises(UnsupportedTargetError, match="layer 3 .*MllamaCrossAttentionDecoderLayer.*no image"):
            target.generate(prompt(), max_new_tokens=4, assistant_model=draft)

    def test_attentions_to_the_image_are_recorded_as_in_plain_generate(self):
        target = MLLAMA.build(0)
        target.set_attn_implementation("eager")
        outputs = {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True}
        assert_same(both(target, mllama_inputs(), PATTERNS["random"], max_new_tokens=NEW, do_sample=False, **outputs))
