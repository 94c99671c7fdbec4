"""Run the benchmark: timing, counting target forwards, and comparing each text with plain generate's.

All methods run in one process and take turns on each prompt, so a machine that slows down affects all of them. `plain`
always runs. A forward is counted when the target's top-level module is called, so the acceptance length is measured
the same way for every method.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from transformers import BatchEncoding

from hf_dflash.bench.machine import free_memory, synchronize
from hf_dflash.bench.methods import Method, MethodUnavailable, check_names, make_method
from hf_dflash.bench.terms import equal_terms
from hf_dflash.decoding.comparison import Comparison, compare_texts
from hf_dflash.decoding.statistics import DFlashStatistics
from hf_dflash.draft.errors import PairingError
from hf_dflash.pair import Pair, encode, sampling_arguments
from hf_dflash.prompts import Prompt

WARM_UP_TOKENS = 16


@dataclass
class Run:
    """One prompt decoded by one method.

    Attributes:
        target, draft, method, prompt_set, prompt, temperature, repeat: what was run.
        new_tokens: number of generated tokens.
        seconds: wall-clock time of the whole call, including the prefill.
        forwards: target forwards, including the prefill.
        peak_memory: peak GPU memory allocated during the call, in bytes; None on the CPU.
        same: whether the ids equal plain generate's; None for plain itself and for methods that draw different random
            numbers.
        comparison: details of a difference.
        statistics: statistics of our loop; None for other methods.
    """

    target: str
    draft: str
    method: str
    prompt_set: str
    prompt: str
    temperature: float
    repeat: int
    new_tokens: int
    seconds: float
    forwards: int
    peak_memory: int | None = None
    same: bool | None = None
    comparison: dict[str, Any] | None = None
    statistics: dict[str, Any] | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds

    @property
    def tau(self) -> float | None:
        """Tokens per forward after the prefill, which itself yields one token; None if there was only the prefill."""
        return (self.new_tokens - 1) / (self.forwards - 1) if self.forwards > 1 else None


@dataclass(frozen=True)
class Plan:
    """What to run with every pair.

    Attributes:
        methods: names, see `hf_dflash.bench.methods`; `plain` always comes first.
        prompts: the prompts of all sets.
        temperatures: 0 for greedy.
        max_new_tokens: per prompt.
        repeats: number of times everything is run.
        seed: set before every run, so that sampled texts can be compared.
        raw: use the prompts without the chat template.

    Raises:
        UnsupportedOptionError: an unknown method.
    """

    methods: list[str]
    prompts: list[Prompt]
    temperatures: list[float]
    max_new_tokens: int = 256
    repeats: int = 1
    seed: int = 0
    raw: bool = False

    def __post_init__(self) -> None:
        check_names(self.methods)

    def names(self) -> list[str]:
        return ["plain", *(name for name in self.methods if name != "plain")]

    def count(self) -> int:
        """Number of runs with one pair, if every method can run."""
        return len(self.names()) * len(self.prompts) * len(self.temperatures) * self.repeats


def methods_of(plan: Plan, pair: Pair) -> tuple[list[Method], dict[str, str]]:
    """Return the plan's methods for one pair, and the reason for each method that cannot run here."""
    methods, left_out = [], {}
    for name in plan.names():
        try:
            methods.append(make_method(name, pair))
        except MethodUnavailable as reason:
            left_out[name] = str(reason)
    return methods, left_out


def run_pair(
    pair: Pair,
    plan: Plan,
    methods: list[Method],
    advance: Callable[[str], None] = lambda text: None,
    left_out: dict[str, str] | None = None,
) -> Iterator[list[Run]]:
    """Run a plan with one pair.

    Args:
        pair: target, tokenizer, draft.
        plan: what to run.
        methods: the methods that can run here, `plain` first.
        advance: called with a description after each run.
        left_out: receives the reason for each method that fails; it is not run again, and its earlier runs are for the
            caller to remove. None: the first failure is raised. Without `plain` or with a pair that does not match
            there is nothing to measure, so those failures are always raised.

    Yields:
        the runs of one prompt, one per method, once all are done, so that an interrupted benchmark has whole prompts.
    """
    _warm_up(pair, plan, methods, left_out)
    for repeat in range(plan.repeats):
        for temperature in plan.temperatures:
            for number, prompt in enumerate(plan.prompts):
                methods = [method for method in methods if method.name not in (left_out or {})]
                # Rotate the order with each prompt, so that no method always runs after the same other one.
                first = (number + repeat) % len(methods)
                order = methods[first:] + methods[:first]
                yield _run_prompt(pair, plan, order, prompt, temperature, repeat, advance, left_out)


def _attempt(method: Method, where: str, left_out: dict[str, str] | None, step: Callable[[], Any]) -> Any:
    """Return what a step of a method returns; None if it fails, with the reason in `left_out`, see `run_pair`."""
    try:
        return step()
    except PairingError:
        raise
    except Exception as error:  # a method may fail in any way, and the others are to run on
        if left_out is None or method.name == "plain":
            raise
        left_out[method.name] = f"failed {where}: {type(error).__name__}: {' '.join(str(error).split())}"
    # Only here is the exception gone, and with it the tensors in its frames.
    free_memory()
    return None


def _inputs(pair: Pair, plan: Plan, prompt: Prompt) -> BatchEncoding:
    return encode(pair, prompt.text if plan.raw else prompt.messages)


def _warm_up(pair: Pair, plan: Plan, methods: list[Method], left_out: dict[str, str] | None) -> None:
    """Run each method once, briefly, because the first call is slower than later ones."""
    inputs = _inputs(pair, plan, plan.prompts[0])
    for method in methods:
        for temperature in plan.temperatures:
            arguments = {"max_new_tokens": WARM_UP_TOKENS, **sampling_arguments(temperature)}
            if _attempt(method, "in its warm-up", left_out, partial(method.decode, inputs, arguments)) is None:
                break


def _run_prompt(
    pair: Pair,
    plan: Plan,
    methods: list[Method],
    prompt: Prompt,
    temperature: float,
    repeat: int,
    advance: Callable[[str], None],
    left_out: dict[str, str] | None,
) -> list[Run]:
    """Run each method once on one prompt, then compare the texts with plain generate's."""
    inputs = _inputs(pair, plan, prompt)
    arguments = {"max_new_tokens": plan.max_new_tokens, **sampling_arguments(temperature)}
    where = f"on the prompt {prompt.name} at T = {temperature:g}"
    texts: dict[str, torch.Tensor] = {}
    runs: dict[str, Run] = {}
    for method in methods:
        measured = _attempt(method, where, left_out, partial(_measure, pair, method, inputs, arguments, plan.seed))
        advance(f"{prompt.name} {method.name}")
        if measured is None:
            continue
        texts[method.name], values = measured
        runs[method.name] = Run(
            target=pair.target_name,
            draft=pair.draft_name,
            method=method.name,
            prompt_set=prompt.set_name,
            prompt=prompt.name,
            temperature=temperature,
            repeat=repeat,
            **values,
        )
    for method in methods:
        if method.name in runs and method.name != "plain" and (method.same_seed or temperature == 0):
            compared = partial(_compare, pair, inputs, texts["plain"], texts[method.name], plan.seed, arguments)
            result = _attempt(method, f"{where}, in the comparison with plain", left_out, compared)
            if result is None:
                del runs[method.name]
                continue
            runs[method.name].same, runs[method.name].comparison = result.same, _difference(result)
    return list(runs.values())


def _compare(
    pair: Pair, inputs: BatchEncoding, plain: torch.Tensor, other: torch.Tensor, seed: int, arguments: dict[str, Any]
) -> Comparison:
    with equal_terms(pair.target):
        return compare_texts(pair.target, inputs, plain, other, seed=seed, **arguments)


def _difference(comparison: Comparison) -> dict[str, Any] | None:
    return None if comparison.same else asdict(comparison)


def _measure(
    pair: Pair, method: Method, inputs: BatchEncoding, arguments: dict[str, Any], seed: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Decode once and return the `(length,)` ids on the CPU and the measured fields of a `Run`."""
    device = pair.target.device
    accelerator = None if device.type == "cpu" else torch.get_device_module(device)
    counts_memory = hasattr(accelerator, "reset_peak_memory_stats")
    if counts_memory:
        accelerator.reset_peak_memory_stats()
    torch.manual_seed(seed)
    with _counting(pair.target) as count:
        synchronize(device)
        start = time.perf_counter()
        ids, statistics = method.decode(inputs, dict(arguments))
        synchronize(device)
        seconds = time.perf_counter() - start
    return ids[0].cpu(), {
        "new_tokens": ids.shape[1] - inputs["input_ids"].shape[1],
        "seconds": seconds,
        "forwards": count["forwards"],
        "peak_memory": accelerator.max_memory_allocated() if counts_memory else None,
        "statistics": _summary(statistics) if statistics else None,
    }


def _summary(statistics: DFlashStatistics) -> dict[str, Any]:
    """Return the statistics to store: all but the per-round list, which `histogram` summarizes."""
    return {name: value for name, value in statistics.as_dict().items() if name != "committed"}


@contextmanager
def _counting(target: torch.nn.Module) -> Iterator[dict[str, int]]:
    """Count the forward calls of a module inside the context."""
    count = {"forwards": 0}

    def add(*_: Any) -> None:
        count["forwards"] += 1

    hook = target.register_forward_hook(add)
    try:
        yield count
    finally:
        hook.remove()
