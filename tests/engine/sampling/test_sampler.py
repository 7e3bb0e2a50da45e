"""Tokens from logits: filters, penalties, bans, log-probabilities, and randomness that belongs to its request alone."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch

from server.engine.runtime.sampling.penalty_table import PenaltyTable
from server.engine.runtime.sampling.random_rows import RandomRows, uniforms
from server.engine.runtime.sampling.sampler import ModelOutput, Sampler
from server.engine.runtime.sampling.verification import SequenceAhead
from server.engine.scheduling.sequence import PLACEHOLDER, SamplingNeeds, Sequence
from tests.engine.factories import make_sequence, sample


def next_token(logits: list[float] | torch.Tensor, sequence: Sequence) -> int:
    return sample(torch.as_tensor(logits).float().unsqueeze(0).clone(), [sequence])[0].token


def frequencies(logits: list[float] | torch.Tensor, count: int = 4000, **sampling: Any) -> dict[int, float]:
    sequences = [make_sequence([1], seed=seed, **{"temperature": 1.0, **sampling}) for seed in range(count)]
    rows = torch.as_tensor(logits).float().expand(count, -1).clone()
    return {t: n / count for t, n in Counter(r.token for r in sample(rows, sequences)).items()}


def test_what_sequences_need_of_the_sampler() -> None:
    for options, needs in (
        ({"repetition_penalty": 1.1}, SamplingNeeds.PENALTIES),
        ({"presence_penalty": 0.1}, SamplingNeeds.PENALTIES),
        ({"frequency_penalty": 0.1, "logprobs": 0}, SamplingNeeds.PENALTIES | SamplingNeeds.LOGPROBS),
        ({"logit_bias": {3: 1.0}}, SamplingNeeds.BIAS),
        ({"embed": True}, SamplingNeeds.EMBEDDING),
        ({}, SamplingNeeds.NOTHING),
        ({"temperature": 1.0, "top_k": 5}, SamplingNeeds.NOTHING),
        ({"min_tokens": 2}, SamplingNeeds.NOTHING),
    ):
        assert make_sequence([1], **options).pending_needs == needs
        assert make_sequence([1], **options).is_raw == (needs == 0)
    sequence = make_sequence([1], min_tokens=2, stop_token_ids=[9])
    assert sequence.pending_needs == SamplingNeeds.MIN_TOKENS
    for token in (5, 6):
        sequence.append(token)
    assert sequence.is_raw


def test_tokens_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    found = frequencies(probabilities.log())
    assert all(abs(found[i] - float(p)) < 0.03 for i, p in enumerate(probabilities))


def test_temperature_sharpens_and_flattens() -> None:
    logits = torch.tensor([0.0, 1.0])
    assert abs(frequencies(logits, temperature=0.5)[1] - math.exp(2) / (1 + math.exp(2))) < 0.03
    assert frequencies(logits, temperature=1e-6) == {1: 1.0}


def test_top_k_top_p_and_min_p_cut() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert set(frequencies(logits, top_k=2)) == {2, 3}
    assert set(frequencies(logits, top_p=0.4)) == {3}
    assert set(frequencies(logits, top_p=0.41)) == {2, 3}
    assert set(frequencies(logits, top_p=0.71)) == {1, 2, 3}
    assert set(frequencies(logits, min_p=0.6)) == {2, 3}
    # top_p is a share of what top_k leaves: 0.4 of 0.7.
    assert set(frequencies(logits, top_k=2, top_p=0.56)) == {3}
    # Tokens as likely as the last one that is kept are kept.
    assert set(frequencies([1.0, 0.0, 1.0, 1.0], top_k=2)) == {0, 2, 3}
    assert set(frequencies([1.0, 0.0, 1.0, 1.0], top_p=0.5)) == {0, 2, 3}
    found = frequencies(logits, top_k=2)
    assert abs(found[3] - 4 / 7) < 0.03


def test_filters_wider_than_the_first_candidates() -> None:
    vocabulary = 5000
    flat = torch.zeros(vocabulary)
    assert len(frequencies(flat, 400, top_p=0.999)) > 350
    assert len(frequencies(flat, 400, top_k=4000)) > 350
    assert max(frequencies(torch.arange(vocabulary).flip(0) * 1e-4, 400, top_k=3000)) < 3000
    # Half of the mass, in the 2500 first tokens.
    stairs = torch.cat([torch.zeros(2500), torch.full((2500,), -20.0)])
    assert max(frequencies(stairs, 400, top_p=0.9)) < 2500


def test_filtered_rows_agree_with_a_plain_computation() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3000)
    weights, ids = logits.softmax(-1).sort(descending=True)
    kept = weights[:50] / weights[:50].sum()
    kept = kept[(kept.cumsum(-1) - kept) < 0.8]
    # Tokens stand in the order of their ids.
    ids, order = ids[: len(kept)].sort()
    running = kept[order].double().cumsum(-1)
    for seed in range(50):
        sequence = make_sequence([1, 2], seed=seed, temperature=1.0, top_k=50, top_p=0.8)
        place = int(torch.searchsorted(running, uniforms([seed], [2])[0] * running[-1], right=True))
        assert next_token(logits, sequence) == int(ids[place])


def test_a_sampled_token_depends_on_seed_and_position_only() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 3000)
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 40},
        {"temperature": 2.0, "top_p": 0.9999},
        {"temperature": 1.0, "min_p": 0.1, "presence_penalty": 0.5},
    ]
    sequences = [make_sequence([1, 2, 3], seed=i, **o) for i, o in enumerate(options)]
    together = [r.token for r in sample(logits.clone(), sequences)]
    assert together == [next_token(row, s) for row, s in zip(logits, sequences, strict=True)]
    assert len(set(uniforms([7] * 1000, list(range(1000))).tolist())) == 1000


def test_uniform_numbers_depend_on_seed_and_position_alone() -> None:
    rng = random.Random(0)
    seeds = [0, -1, 2**64 + 3, *(rng.getrandbits(63) for _ in range(200))]
    positions = [1 << 40, 0, 5, *(rng.randrange(1 << 41) for _ in range(200))]
    alone = [float(uniforms([seed], [position])[0]) for seed, position in zip(seeds, positions, strict=True)]
    assert uniforms(seeds, positions).tolist() == alone
    assert len(set(alone)) == len(alone)
    # Answers with a seed stay the same from release to release.
    assert uniforms([7, 2**64 + 7, -1], [3, 3, 1 << 40]).tolist() == [
        0.7821024049799986,
        0.7821024049799986,
        0.4624112709556969,
    ]


def test_uniform_numbers_are_uniform() -> None:
    numbers = uniforms([seed for seed in range(100) for _ in range(100)], list(range(100)) * 100).tolist()
    assert all(0 <= n < 1 for n in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.01
    tenths = Counter(int(n * 10) for n in numbers)
    assert all(900 < tenths[i] < 1100 for i in range(10))


def test_penalties_are_openais_and_transformers() -> None:
    sequence = make_sequence([0], presence_penalty=0.5, frequency_penalty=0.25, logprobs=4)
    for token in (1, 1, 2):
        sequence.append(token)
    (result,) = sample(torch.zeros(1, 4), [sequence])
    expected = torch.tensor([0.0, -1.0, -0.75, 0.0]).log_softmax(-1)
    assert result.logprob is not None
    assert dict(result.logprob.top) == pytest.approx({i: float(v) for i, v in enumerate(expected)})
    repeated = make_sequence([0], repetition_penalty=2.0, logprobs=4)
    repeated.append(1)
    (result,) = sample(torch.tensor([[2.0, -1.0, 2.0, 0.0]]), [repeated])
    expected = torch.tensor([1.0, -2.0, 2.0, 0.0]).log_softmax(-1)
    assert result.logprob is not None
    assert dict(result.logprob.top) == pytest.approx({i: float(v) for i, v in enumerate(expected)})
    assert result.token == 2


def test_penalties_of_many_sequences_are_those_of_each() -> None:
    choose = Sampler(50, torch.device("cpu")).sample
    vocabulary, generator = 50, torch.Generator().manual_seed(2)
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": -0.2},
        {},
        {"repetition_penalty": 0.8, "frequency_penalty": 0.4, "logit_bias": {3: 2.0}},
    ]
    alive: list[Sequence] = []
    for step in range(60):
        # Sequences come and go, so that rows are used again.
        if step % 2 == 0:
            prompt = torch.randint(vocabulary, (step % 7 + 1,), generator=generator).tolist()
            alive.append(make_sequence(prompt, logprobs=vocabulary, ignore_eos=True, **options[step % len(options)]))
        if len(alive) > 20:
            del alive[step % 5]
        logits = torch.randn(len(alive), vocabulary, generator=generator)
        for row, (sequence, result) in enumerate(zip(alive, choose(logits.clone(), alive), strict=True)):
            expected, asked = logits[row].clone(), sequence.sampling
            for token in set(sequence.tokens):
                by = asked.repetition_penalty
                expected[token] = expected[token] * by if expected[token] < 0 else expected[token] / by
            for token, count in Counter(sequence.tokens[sequence.num_prompt :]).items():
                expected[token] -= asked.presence_penalty + asked.frequency_penalty * count
            for token, bias in asked.logit_bias.items():
                expected[token] += bias
            assert result.logprob is not None
            found = dict(result.logprob.top)
            assert [found[i] for i in range(vocabulary)] == pytest.approx(expected.log_softmax(-1).tolist(), abs=1e-4)
            sequence.append(int(torch.randint(vocabulary, (1,), generator=generator)))


def test_penalties_behind_draft_tokens_are_those_of_the_tokens() -> None:
    sampler, chance = Sampler(50, torch.device("cpu")), random.Random(5)
    vocabulary, generator = 50, torch.Generator().manual_seed(2)
    options = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.3, "logprobs": vocabulary}
    alive = [make_sequence([1 + index, 2, 3], ignore_eos=True, **options) for index in range(6)]
    for _ in range(20):
        rows: list[Sequence] = []
        behind: list[Sequence] = []
        for sequence in alive:
            # Some draft tokens come twice, and some are among the sequence's tokens.
            drafts = tuple(chance.randrange(12) for _ in range(chance.randrange(5)))
            rows += [sequence, *(SequenceAhead(sequence, drafts[:n], None) for n in range(1, len(drafts) + 1))]
            for count in range(len(drafts) + 1):
                behind.append(copy := make_sequence(sequence.tokens[:3], ignore_eos=True, **options))
                for token in (*sequence.tokens[3:], *drafts[:count]):
                    copy.append(token)
        logits = torch.randn(len(rows), vocabulary, generator=generator)
        assert sampler.sample(logits, rows) == sample(logits, behind)
        for sequence in alive:
            sequence.append(chance.randrange(12))


def test_bias_and_min_tokens() -> None:
    assert next_token([0.0, 1.0, 2.0], make_sequence([0], logit_bias={0: 100.0})) == 0
    assert next_token([0.0, 1.0, 2.0], make_sequence([0], logit_bias={2: -100.0})) == 1
    early = make_sequence([0], eos=frozenset({2}), min_tokens=1, stop_token_ids=(1, 99))
    assert next_token([0.0, 1.0, 2.0], early) == 0
    early.append(0)
    assert next_token([0.0, 1.0, 2.0], early) == 2


def test_what_is_kept_between_steps_and_what_only_the_device_knows_change_nothing() -> None:
    vocabulary, generator, rng = 300, torch.Generator().manual_seed(3), random.Random(0)
    sampler = Sampler(vocabulary, torch.device("cpu"))
    ends = frozenset({2, 40, 41, 42})

    def one(index: int) -> Sequence:
        options: dict[str, Any] = {"ignore_eos": False, "min_tokens": rng.choice([0, 0, 3, 8]), "seed": index}
        options |= rng.choice(
            [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1, "top_k": 9}]
        )
        options |= rng.choice([{}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.7, "frequency_penalty": -0.2}])
        options |= rng.choice([{}, {}, {"logit_bias": {5: 2.0, 6: -100.0}}])
        options |= rng.choice([{}, {"logprobs": 0}, {"logprobs": 4}, {"logprobs": 20}])
        return make_sequence([rng.randrange(vocabulary) for _ in range(rng.randrange(1, 9))], ends, **options)

    alive = [one(index) for index in range(12)]
    for step in range(80):
        if step % 5 == 4:
            alive[rng.randrange(len(alive))] = one(step)
        if step % 11 == 10:
            rng.shuffle(alive)
        logits = torch.randn(len(alive), vocabulary, generator=generator) * 4
        expected = [sample(logits[row : row + 1], [sequence])[0] for row, sequence in enumerate(alive)]
        before = [sequence.tokens[-1] for sequence in alive]
        known = step % 3 == 0
        newest = None if known else torch.tensor(before)
        if not known:  # the host does not know them: they are PLACEHOLDERs, but for a prompt's last one
            for sequence in alive:
                sequence.tokens[-1] = PLACEHOLDER if sequence.num_generated else sequence.tokens[-1]
        launched = sampler.launch(ModelOutput(logits, logits.max(-1) if step % 2 else None, newest), alive)
        for sequence, token in zip(alive, before, strict=True):
            sequence.tokens[-1] = token
        assert launched.read() == expected
        assert launched.tokens.tolist() == [result.token for result in expected]
        for sequence, result in zip(alive, expected, strict=True):
            sequence.append(result.token)


def test_the_penalty_table_has_a_row_for_each_living_sequence() -> None:
    table = PenaltyTable(10, torch.device("cpu"))
    for _ in range(30):
        sequences = [make_sequence([1, 2], repetition_penalty=2.0) for _ in range(9)]
        rows = table.rows_of(sequences)
        assert len(set(rows.rows.tolist())) == 9
        logits = table.penalize(torch.ones(9, 10), torch.arange(9), rows, None)
        assert logits.tolist() == [[1.0, 0.5, 0.5, *[1.0] * 7]] * 9
        del rows, sequences
    assert table.counts.shape[0] == 16


def test_logprobs_are_taken_before_temperature_and_filters() -> None:
    logits = torch.tensor([0.1, 0.2, 0.7]).log()
    sequence = make_sequence([0], temperature=0.01, top_k=1, logprobs=2)
    (result,) = sample(logits.unsqueeze(0), [sequence])
    assert result.logprob is not None
    assert result.logprob.token_id == result.token == 2
    assert result.logprob.logprob == pytest.approx(math.log(0.7))
    assert [token for token, _ in result.logprob.top] == [2, 1]
    none = make_sequence([0], logprobs=0)
    (result,) = sample(logits.unsqueeze(0), [none])
    assert result.logprob is not None
    assert result.logprob.top == []


def test_rows_that_are_not_numbers_are_errors_of_their_own() -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [0.0, math.inf], [-math.inf, -math.inf]])
    for filters in ({}, {"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.5}):
        sequences = [make_sequence([0], temperature=t, **filters) for t in (0.0, 1.0, 0.0, 1.0)]
        results = sample(logits.clone(), sequences)
        assert results[0].token == 1
        assert [r.error is None for r in results] == [True, False, False, False]


@pytest.mark.parametrize("temperature", [1e-9, 1e-38, 1e-45, 1e-46, 5e-324])
def test_temperatures_near_zero_take_the_largest(temperature: float) -> None:
    """Some are numbers in float64 and zero in float32."""
    logits = torch.tensor([0.0, 3.0, -math.inf, 2.999, 1.0])
    for filters in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"logprobs": 2}):
        assert frequencies(logits, 50, temperature=temperature, **filters) == {1: 1.0}
        table = RandomRows([make_sequence([1], temperature=temperature, **filters)], 5).table()
        assert table is not None
        assert table[0, 1].astype("float32") >= 1e-38  # what the kernel on CUDA divides by


def test_a_banned_token_is_never_sampled() -> None:
    logits = torch.tensor([0.0, -math.inf, 0.0, -math.inf])
    assert set(frequencies(logits)) == {0, 2}
    assert set(frequencies(logits, top_p=0.99)) == {0, 2}
