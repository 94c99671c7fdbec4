"""Compiled targets and static caches: the same text, or an error that names the problem."""

import pytest
import torch
from families import FAMILIES
from lossless import both, prompt
from oracle import fixed, oracle_draft, randomly

from hf_dflash import UnsupportedOptionError, UnsupportedTargetError
from hf_dflash.target.target import Target

OPTIONS = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture
def target():
    return FAMILIES["qwen3"].build(0)


class CountingBackend:
    """Compiles nothing and counts the graphs that it receives."""

    graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize("method", ["forward", "module"])
def test_a_target_that_is_compiled_as_a_whole_runs_uncompiled(target, method):
    text = target.generate(prompt(), **OPTIONS)
    backend = CountingBackend()
    if method == "forward":
        target.forward = torch.compile(target.forward, backend=backend)
    else:
        target.compile(backend=backend)
    draft = oracle_draft(target, text, randomly(1, 7))
    output = target.generate(prompt(), assistant_model=draft, **OPTIONS)
    assert output.tolist() == text.tolist()
    assert backend.graphs == 0
    # The caller's model stays compiled, and its own weights were used.
    assert Target(target).model is not target
    assert (target._compiled_call_impl is not None) or hasattr(target.forward, "_torchdynamo_orig_callable")
    assert Target(target).model.lm_head is target.lm_head


def test_a_torch_compile_wrapper_decodes_like_the_target(target):
    wrapped = torch.compile(target, backend=CountingBackend())
    pair = both(wrapped, {"inputs": prompt()}, randomly(1, 5), **OPTIONS)
    assert pair.ours.tolist() == pair.plain.tolist()


def test_layers_whose_hooks_do_not_fire_are_refused_by_name(target, monkeypatch):
    # As in a graph of several layers: their forwards run, their hooks do not.
    for layer in target.model.layers:
        monkeypatch.setattr(type(layer), "__call__", lambda self, *args, **kwargs: self.forward(*args, **kwargs))
    draft = oracle_draft(target, prompt(), fixed(0))
    with pytest.raises(UnsupportedTargetError, match="compiled"):
        target.generate(prompt(), assistant_model=draft, **OPTIONS)


@pytest.mark.parametrize("source", ["call", "config"])
def test_a_static_cache_is_refused_by_name(target, source):
    draft = oracle_draft(target, prompt(), fixed(0))
    options = dict(OPTIONS)
    if source == "call":
        options["cache_implementation"] = "static"
    else:
        target.generation_config.cache_implementation = "static"
    with pytest.raises(UnsupportedOptionError, match="static"):
        target.generate(prompt(), assistant_model=draft, **options)


@pytest.mark.slow
def test_layers_compiled_one_by_one_give_the_same_text(target):
    text = target.generate(prompt(), **OPTIONS)
    backend = CountingBackend()
    for layer in target.model.layers:
        layer.forward = torch.compile(layer.forward, backend=backend)
    draft = oracle_draft(target, text, fixed(7))
    assert target.generate(prompt(), assistant_model=draft, **OPTIONS).tolist() == text.tolist()
    assert backend.graphs > 0
