import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from vanilla_transformer.data.batching import RandomBatches, TokenBatches, Update
from vanilla_transformer.errors import UserError


def realistic_lengths(number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sentences of some thirty tokens, translations in proportion to them, as in WMT 2014."""
    generator = np.random.default_rng(seed)
    source = np.clip(generator.lognormal(3.2, 0.6, number), 2, 256)
    target = np.clip(source * generator.lognormal(0.05, 0.2, number), 2, 256)
    return source.astype(np.int32), target.astype(np.int32)


def random_plan(seed: int, **options) -> TokenBatches:
    """A corpus of random size and shape, with a budget that its longest pair just fits or not so tightly."""
    generator = np.random.default_rng(seed)
    number = int(generator.integers(1, 400))
    source, target = (
        generator.integers(1, generator.integers(2, 120), number).astype(np.int32) for _ in ("source", "target")
    )
    longest = max(source.max(), target.max())
    options.setdefault("seed", seed)
    return TokenBatches(
        source,
        target,
        tokens_per_batch=int(longest * generator.choice([1, 2, 7, 40]) + generator.integers(0, 5)),
        batches_per_update=int(generator.integers(1, 9)),
        **options,
    )


def plain_fill_rate(plan: TokenBatches, batches: list[np.ndarray]) -> float:
    real = padded = 0
    for batch in batches:
        for lengths in (plan.source_lengths.tolist(), plan.target_lengths.tolist()):
            rows = [lengths[pair] for pair in batch]
            real += sum(rows)
            padded += sum(max(rows) for _ in rows)
    return real / padded


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_pair_occurs_once_an_epoch(shuffle):
    for seed in range(60):
        plan = random_plan(seed, shuffle=shuffle)
        for epoch in (0, 1, 5):
            pairs = np.concatenate(plan.batches(epoch))
            assert np.array_equal(np.sort(pairs), np.arange(len(plan.source_lengths)))


def test_no_batch_exceeds_the_budget_on_either_side():
    for seed in range(100):
        plan = random_plan(seed)
        for batch in plan.batches(seed):
            assert len(batch) * plan.source_lengths[batch].max() <= plan.tokens_per_batch
            assert len(batch) * plan.target_lengths[batch].max() <= plan.tokens_per_batch


def test_no_batch_could_take_the_next_pair():
    for seed in range(100):
        plan = random_plan(seed, shuffle=False)
        batches = plan.batches(0)
        widths = np.maximum(plan.source_lengths, plan.target_lengths)
        for batch, following in pairwise(batches):
            widest = max(widths[batch].max(), widths[following[0]])
            assert (len(batch) + 1) * widest > plan.tokens_per_batch


def test_shuffling_changes_neither_the_number_of_batches_nor_their_padding():
    for seed in range(20):
        shuffled, in_order = random_plan(seed), random_plan(seed, shuffle=False)
        for epoch in range(4):
            assert len(shuffled.batches(epoch)) == len(in_order.batches(0))
            assert len(shuffled.updates(epoch)) == len(in_order.updates(0))
            assert shuffled.fill_rate(shuffled.batches(epoch)) == in_order.fill_rate(in_order.batches(0))


def test_without_shuffling_batches_go_from_short_to_long():
    plan = TokenBatches(*realistic_lengths(2000), tokens_per_batch=1024, shuffle=False)
    longest = [int(plan.target_lengths[batch].max()) for batch in plan.batches(0)]
    assert longest == sorted(longest)
    assert all(np.array_equal(one, other) for one, other in zip(plan.batches(0), plan.batches(3), strict=True))


def as_lists(batches: list[np.ndarray]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_the_plan_is_a_function_of_seed_and_epoch():
    lengths = realistic_lengths(1000)

    def plan(seed, epoch):
        return as_lists(TokenBatches(*lengths, tokens_per_batch=1024, seed=seed).batches(epoch))

    plans = {(seed, epoch): plan(seed, epoch) for seed in (1, 2) for epoch in (0, 1, 2)}
    for key, batches in plans.items():
        assert plan(*key) == batches
        assert all(batches != other for name, other in plans.items() if name != key)
        # Neither the order of the batches nor their pairs are those of another epoch.
        assert all(sorted(batches) != sorted(other) for name, other in plans.items() if name != key)


def test_an_epoch_does_not_depend_on_the_epochs_planned_before():
    fresh, used = random_plan(4), random_plan(4)
    for epoch in range(3):
        used.batches(epoch)
    assert as_lists(used.batches(3)) == as_lists(fresh.batches(3))


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4, 7])
def test_processes_share_the_plan_among_them(num_processes):
    without_a_batch = 0
    for seed in range(20):
        for update in random_plan(seed).updates(0):
            shares = [update.share_of(process, num_processes) for process in range(num_processes)]
            together = sorted((pair for share in shares for pair in share), key=lambda pair: pair[0])
            assert [index for index, _ in together] == list(range(len(update.batches)))
            assert all(batch is update.batches[index] for index, batch in together)
            sizes = [len(share) for share in shares]
            assert max(sizes) - min(sizes) <= 1
            without_a_batch += sizes.count(0)
    assert (without_a_batch > 0) == (num_processes > 1)


def test_updates_hold_the_batches_in_order_and_count_their_target_tokens():
    short = 0
    for seed in range(40):
        plan = random_plan(seed)
        updates, batches = plan.updates(2), plan.batches(2)
        assert as_lists([batch for update in updates for batch in update.batches]) == as_lists(batches)
        assert all(len(update.batches) == plan.batches_per_update for update in updates[:-1])
        assert 1 <= len(updates[-1].batches) <= plan.batches_per_update
        short += len(updates[-1].batches) < plan.batches_per_update
        targets = plan.target_lengths.tolist()
        for update in updates:
            assert type(update.num_target_tokens) is int
            assert update.num_target_tokens == sum(targets[pair] for batch in update.batches for pair in batch)
        assert sum(update.num_target_tokens for update in updates) == sum(targets)
    assert short > 0


def test_batches_and_updates_are_sequences():
    plan = random_plan(7)
    batches, updates = plan.batches(1), plan.updates(1)
    listed = as_lists(batches)
    assert as_lists(batches[::-1]) == listed[::-1] and as_lists(batches[1::3]) == listed[1::3]
    assert batches[-1].tolist() == listed[-1]
    assert as_lists(updates[-1].batches) == as_lists(updates[len(updates) - 1].batches)
    for sequence in (batches, updates):
        with pytest.raises(IndexError):
            sequence[len(sequence)]


def test_pairs_are_sorted_as_two_keys_sort_them():
    for seed in range(30):
        plan = random_plan(seed)
        pairs = np.random.default_rng((seed, 2)).permutation(len(plan.source_lengths))
        expected = np.random.default_rng((seed, 2)).permutation(len(plan.source_lengths))
        source, target = plan.source_lengths[expected], plan.target_lengths[expected]
        expected = expected[np.lexsort((np.where(target % 2 == 0, source, -source), target))]
        plan._sort(pairs)
        assert pairs.tolist() == expected.tolist()


def test_lengths_and_two_epochs_take_at_most_32_bytes_a_pair():
    number = 400_000
    lengths = realistic_lengths(number)
    # The blocks of the sorting and the imports do not grow with the corpus.
    TokenBatches(*(side[:1000] for side in lengths), tokens_per_batch=4096).updates(0)
    tracemalloc.start()
    try:
        plan = TokenBatches(*(side.copy() for side in lengths), tokens_per_batch=4096, batches_per_update=6)
        epochs = [plan.updates(epoch) for epoch in range(2)]
        assert sum(sum(map(len, update.batches)) for update in epochs[1]) == number
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * number
    assert peak > 12 * number


def test_a_process_beyond_the_batches_gets_none():
    update = Update((np.array([3, 1]), np.array([2])), 9)
    assert [len(update.share_of(process, 4)) for process in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("side", [0, 1])
def test_a_pair_longer_than_a_batch_is_refused(side):
    lengths = [np.array([3, 4, 5], np.int32), np.array([3, 4, 5], np.int32)]
    lengths[side][1] = 65
    with pytest.raises(UserError, match=r"`tokens_per_batch` is 64, .* 65 tokens .*lower `max_length`"):
        TokenBatches(*lengths, tokens_per_batch=64)
    # A pair of exactly the budget is a batch of its own.
    batches = TokenBatches(*lengths, tokens_per_batch=65).batches(0)
    assert [1] in as_lists(batches)


def test_fill_rate_is_the_share_of_real_tokens():
    for seed in range(20):
        plan = random_plan(seed)
        batches = plan.batches(0)
        assert plan.fill_rate(batches) == pytest.approx(plain_fill_rate(plan, batches), rel=1e-12)
        assert plan.fill_rate([np.array([pair]) for pair in range(len(plan.source_lengths))]) == 1.0


def test_batches_of_alike_lengths_waste_little():
    plan = TokenBatches(*realistic_lengths(30_000), tokens_per_batch=4096)
    rate = plan.fill_rate(plan.batches(0))
    pairs = np.random.default_rng(0).permutation(30_000)
    unsorted = plan.fill_rate(np.array_split(pairs, 30_000 // 64))
    assert rate >= 0.9
    assert rate >= 1.5 * unsorted


def test_every_batch_but_the_last_nearly_fills_its_budget():
    plan = TokenBatches(*realistic_lengths(30_000), tokens_per_batch=4096)
    widths = np.maximum(plan.source_lengths, plan.target_lengths)
    sizes = np.array([len(batch) * widths[batch].max() for batch in plan.batches(0)])
    assert np.mean(sizes) > 0.9 * 4096


def random_batches(seed: int = 0, tokens_per_batch: int = 4096) -> RandomBatches:
    return RandomBatches(*realistic_lengths(8000), tokens_per_batch=tokens_per_batch, seed=seed)


def test_random_batches_have_every_pair_once_and_as_many_tokens_as_the_budget_allows():
    plan = random_batches()
    batches = list(plan.batches(3))
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(8000))
    longest = max(plan.source_lengths.max(), plan.target_lengths.max())
    fuller = [max(plan.source_lengths[batch].sum(), plan.target_lengths[batch].sum()) for batch in batches]
    assert max(fuller) <= plan.tokens_per_batch
    # The one that comes last when pairs are cut may be any.
    assert sorted(fuller)[1] > plan.tokens_per_batch - longest


def test_random_batches_have_the_lengths_of_the_text_and_others_do_not():
    plan = random_batches()
    alike = TokenBatches(plan.source_lengths, plan.target_lengths, tokens_per_batch=plan.tokens_per_batch)
    spreads = [
        np.mean([plan.target_lengths[batch].std() for batch in kind.batches(0)]) / plan.target_lengths.std()
        for kind in (plan, alike)
    ]
    assert spreads[0] > 0.9 and spreads[1] < 0.1


def test_random_batches_are_a_function_of_seed_and_epoch():
    def order(seed: int, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in random_batches(seed).batches(epoch)]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3) and order(1, 2) != order(2, 2)


def test_the_parts_of_a_random_batch_are_padded_little_and_hold_it_once():
    plan = random_batches()
    batches = list(plan.batches(0))
    whole, in_parts = 0, 0
    for batch in batches:
        parts = plan.parts(batch)
        assert np.array_equal(np.sort(np.concatenate(parts)), np.sort(batch))
        real, padded = plan.tokens(batch), plan.padded_tokens(batch)
        assert real == plan.source_lengths[batch].sum() + plan.target_lengths[batch].sum()
        in_parts += padded - real
        whole += len(batch) * int(plan.source_lengths[batch].max() + plan.target_lengths[batch].max()) - real
    assert in_parts < whole / 4
    assert plan.fill_rate(batches) == pytest.approx(plain_fill_rate(plan, [p for b in batches for p in plan.parts(b)]))
