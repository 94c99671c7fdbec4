"""Position weights, chunked cross-entropy, distillation, the selector loss and acceptance, against references."""

import math

import pytest
import torch
from torch.nn import functional as F

from hf_dflash.draft.modeling_dflash import DFlashDraftModel
from hf_dflash.target.target import Target
from hf_dflash.training.evaluation import Acceptance, measure_acceptance, walk
from hf_dflash.training.losses import (
    ReducedVocabulary,
    accepted_counts,
    cross_entropy,
    d_pace_weights,
    decay_weights,
    default_gamma,
    selector_cross_entropy,
)
from hf_dflash.training.objective import Objective
from hf_dflash.training.packing import IGNORED
from hf_dflash.training.records import Record, RecordDataset, collate
from hf_dflash.training.setup_draft import make_config
from tests.tiny_drafts import tiny_draft
from tests.tiny_training import VOCABULARY, tiny_settings, tiny_target


def test_decay_weights_are_the_published_ones():
    assert [default_gamma(size) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]
    expected = [math.exp(-(k - 1) / 4.0) for k in range(1, 8)]
    assert decay_weights(8, 4.0).tolist() == pytest.approx(expected)


def test_d_pace_weights_match_the_definition():
    torch.manual_seed(0)
    entropy, alpha = torch.rand(3, 5) * 3, 0.3
    loss_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    weights = d_pace_weights(entropy, loss_mask, alpha)
    for row in range(3):
        q = [(1 - alpha) * math.exp(-value) + alpha for value in entropy[row].tolist()]
        last = int(loss_mask[row].sum())
        for j in range(5):
            wanted = sum(math.prod(q[: m + 1]) for m in range(j, last)) if j < last else 0.0
            assert weights[row, j].item() == pytest.approx(wanted, rel=1e-5)
    assert d_pace_weights(entropy[:1], loss_mask[:1], 1.0).tolist() == [[5.0, 4.0, 3.0, 2.0, 1.0]]


def test_d_pace_weights_pass_no_gradient():
    entropy = torch.rand(2, 3, requires_grad=True)
    assert not d_pace_weights(entropy, torch.ones(2, 3, dtype=torch.bool), 0.5).requires_grad


@pytest.mark.parametrize("with_teacher", [False, True])
def test_chunked_cross_entropy_equals_the_whole(with_teacher):
    torch.manual_seed(0)
    head, labels = torch.randn(11, 6), torch.randint(0, 11, (10,))
    teacher = torch.randn(10, 11)
    hidden = torch.randn(10, 6, requires_grad=True)
    options = {"teacher_logits_of": lambda rows: teacher[rows]} if with_teacher else {}
    results = []
    for chunk in (3, 100):
        hidden.grad = None
        entropy, divergence, best = cross_entropy(hidden, labels, lambda h: h @ head.T, chunk=chunk, **options)
        (entropy.sum() + 2 * divergence.sum()).backward()
        results.append((entropy, divergence, best, hidden.grad.clone()))
    for chunked, whole in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole)
    logits = (hidden @ head.T).detach()
    torch.testing.assert_close(results[0][0].detach(), F.cross_entropy(logits, labels, reduction="none"))
    assert torch.equal(results[0][2], logits.argmax(-1))
    p, q = teacher.softmax(-1), logits.softmax(-1)
    wanted = (p * (p / q).log()).sum(-1) if with_teacher else torch.zeros(10)
    torch.testing.assert_close(results[0][1].detach(), wanted)


def test_a_reduced_vocabulary_maps_both_ways():
    vocabulary = ReducedVocabulary.of(torch.tensor([7, 3, 7, 9]), 12)
    assert vocabulary.ids.tolist() == [3, 7, 9]
    assert vocabulary.index[torch.tensor([9, 3])].tolist() == [2, 0]
    assert vocabulary.index[4] == -1


def test_the_selector_is_trained_on_its_own_scores():
    """The candidate with the highest score is the one the selector picks; the loss matches a reference."""
    torch.manual_seed(0)
    draft = tiny_draft(version=2)
    selector, size = draft.candidate_selector, draft.config.vocab_size
    hidden, logits = torch.randn(6, draft.config.hidden_size), torch.randn(6, size)
    previous = torch.randint(0, size, (6,))
    everything = torch.arange(size)
    taken = selector(hidden[:, None], logits[:, None], previous)[:, 0]
    entropy, recalled = selector_cross_entropy(selector, hidden, logits, everything, previous, taken)
    assert recalled.all()
    for row in range(6):
        unary, candidates = logits[row].topk(selector.top_k)
        wanted = selector.predecessor_codebook[previous[row]] * selector.hidden_projection(hidden[row])
        scores = unary + selector.successor_codebook[candidates] @ wanted
        assert candidates[scores.argmax()] == taken[row]
        torch.testing.assert_close(entropy[row], scores.logsumexp(0) - scores.max())
    worst = logits.argmin(-1)
    entropy, recalled = selector_cross_entropy(selector, hidden, logits, everything, previous, worst)
    assert not recalled.any() and entropy.eq(0).all()


def test_accepted_counts():
    candidates = torch.tensor([[5, 6, 7], [5, 9, 7], [4, 6, 7], [5, 6, 7]])
    labels = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, IGNORED, 7]])
    assert accepted_counts(candidates, labels).tolist() == [3, 1, 0, 1]


def test_the_docstring_example_of_walk_and_sums():
    assert walk([2, 0, 0, 1, 0], 5) == (5, 2)
    total = Acceptance([3, 1], 4, 5, 2)
    total += Acceptance([1, 1, 1], 1, 4, 1)
    assert (total.reached, total.blocks, total.tau) == ([4, 2, 1], 5, 3.0)
    assert total.by_position == [0.8, 0.4, 0.2]


def objective_of(tmp_path, frequent=None, **changes):
    target = Target(tiny_target())
    settings = tiny_settings(tmp_path, **changes)
    torch.manual_seed(1)
    draft = DFlashDraftModel(make_config(target, settings, mask_token_id=95))
    return Objective(draft, target, settings, frequent), draft, target


def batch_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: tuple(torch.randint(2, 90, (n,), generator=generator).tolist())  # noqa: E731
    records = [Record("a", draw(4), draw(9)), Record("b", draw(6), draw(5))]
    data = RecordDataset(records)
    return records, collate([data[0], data[1]])


@pytest.mark.parametrize(
    "changes",
    [{}, {"distillation": 0.4}, {"weighting": "d-pace"}, {"loss_chunk": 5}, {"version": 2, "selector_weight": 0.0}],
    ids=str,
)
def test_the_objective_matches_a_loop_over_blocks(tmp_path, changes):
    """With more anchors than positions all are used, so the loss can be recomputed block by block without packing."""
    objective, draft, target = objective_of(tmp_path, anchors=100, **changes)
    records, batch = batch_of()
    got = objective(draft, batch, step=3).loss
    settings = tiny_settings(tmp_path, anchors=100, **changes)
    numerator = denominator = 0.0
    blocks = 0
    for record in records:
        ids = torch.tensor([record.prompt_ids + record.response_ids])
        out = target.model.model(ids, output_hidden_states=True)
        taps = torch.cat([out.hidden_states[i + 1] for i in draft.config.target_layer_ids], -1)
        teacher = target.head(out.last_hidden_state)[0].log_softmax(-1)
        for anchor in range(len(record.prompt_ids), len(record) - 1):
            blocks += 1
            block = torch.tensor([[ids[0, anchor], 95, 95, 95]])
            hidden = draft(target.embed(block), taps[:, :anchor]).last_hidden_state
            scores = target.head(hidden)[0].log_softmax(-1)
            last = min(4, len(record) - anchor)
            entropy = [-scores[k, ids[0, anchor + k]] for k in range(1, last)]
            weights = [math.exp(-(k - 1) / default_gamma(4)) for k in range(1, last)]
            if settings.weighting == "d-pace":
                q = [0.5 * math.exp(-value.item()) + 0.5 for value in entropy]
                weights = [sum(math.prod(q[: m + 1]) for m in range(j, len(q))) for j in range(len(q))]
            for k in range(1, last):
                p = teacher[anchor + k - 1]
                divergence = (p.exp() * (p - scores[k])).sum()
                share = settings.distillation
                numerator = numerator + weights[k - 1] * ((1 - share) * entropy[k - 1] + share * divergence)
                denominator += weights[k - 1]
    wanted = numerator / (blocks if settings.weighting == "d-pace" else denominator)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", [1, 2])
def test_a_full_loss_vocabulary_changes_nothing(tmp_path, version):
    _, batch = batch_of()
    losses = []
    for frequent in (None, torch.arange(VOCABULARY)):
        objective, draft, _ = objective_of(tmp_path, frequent, version=version, distillation=0.5)
        loss = objective(draft, batch, step=0).loss
        loss.backward()
        losses.append((loss.detach(), {name: p.grad for name, p in draft.named_parameters()}))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)


def test_a_small_loss_vocabulary_still_holds_every_label(tmp_path):
    objective, draft, _ = objective_of(tmp_path, torch.tensor([2, 3, 4, 5]))
    loss = objective(draft, batch_of()[1], step=0).loss
    assert torch.isfinite(loss) and loss > 0.1


def test_every_parameter_of_dflash_2_gets_a_gradient(tmp_path):
    objective, draft, _ = objective_of(tmp_path, version=2, selector_top_k=VOCABULARY)
    objective(draft, batch_of()[1], step=0).loss.backward()
    without_gradient = [name for name, p in draft.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without_gradient == []


def test_anchors_depend_on_seed_step_and_record_only(tmp_path):
    objective, draft, _ = objective_of(tmp_path, anchors=2)
    _, batch = batch_of()
    again, _, _ = objective_of(tmp_path, anchors=2)
    first = objective._pack(batch, step=5).anchors
    assert torch.equal(first, again._pack(batch, step=5).anchors)
    assert any(not torch.equal(first, again._pack(batch, step=step).anchors) for step in range(6, 12))


def test_acceptance_matches_generate(tmp_path):
    """The walk over a stored greedy response counts the same as decoding with the draft."""
    from hf_dflash.decoding.generate import DFlashGenerate

    _, draft, target = objective_of(tmp_path, block_size=4)
    prompt, stats = torch.tensor([[5, 9, 33, 17]]), []
    options = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    text = target.model.generate(prompt, **options)
    target.model.generate(prompt, custom_generate=DFlashGenerate(draft, stats=stats.append), **options)
    measured = measure_acceptance(draft, target, [(prompt[0].tolist(), text[0, 4:].tolist())], blocks_per_forward=7)
    assert (measured.tokens, measured.rounds) == (sum(stats[0].committed), stats[0].rounds)
    assert measured.blocks == text.shape[1] - 4 - 1


def test_the_head_gets_contiguous_rows(tmp_path, monkeypatch):
    """Dropping the anchors of packed blocks leaves a strided view, which is tens of times slower on the CPU."""
    _, draft, target = objective_of(tmp_path, block_size=4)
    heads = []
    head = target.head
    monkeypatch.setattr(target, "head", lambda hidden: heads.append(hidden) or head(hidden))
    measure_acceptance(draft, target, [([5, 9, 33], [17, 4, 8, 30, 6, 21])])
    assert heads[0].shape[0] == 5
    assert all(hidden.is_contiguous() for hidden in heads)
