import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vanilla_transformer.translation.translator import Translator
from vanilla_transformer.translation.workers import map_side_by_side


@pytest.mark.parametrize("workers", [1, 3])
def test_results_have_the_order_of_the_items(workers):
    begun = threading.Barrier(workers)

    def work(item: int) -> tuple[int, int]:
        # Passes only if so many are at work at once.
        begun.wait(timeout=30)
        return item, torch.get_num_threads()

    results = list(map_side_by_side(work, range(9), workers=workers))
    assert [item for item, _ in results] == list(range(9))
    if workers > 1:
        assert {threads for _, threads in results} == {1}


def test_a_failure_ends_the_work():
    done = []

    def work(item: int) -> int:
        if item == 2:
            raise ValueError("broken")
        done.append(item)
        return item

    with pytest.raises(ValueError, match="broken"):
        list(map_side_by_side(work, range(10_000), workers=2))
    assert len(done) < 10_000


@pytest.mark.parametrize("stop", [False, True])
def test_torch_has_as_many_threads_afterwards_as_before(stop):
    def threads_of_a_new_thread() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        results = map_side_by_side(lambda item: item, range(20), workers=2)
        if stop:
            next(results)
            results.close()
        else:
            assert list(results) == list(range(20))
        assert torch.get_num_threads() == 3
        assert threads_of_a_new_thread() == 3
    finally:
        torch.set_num_threads(before)


def test_one_item_needs_no_thread():
    assert list(map_side_by_side(lambda _: threading.current_thread(), [0], workers=4)) == [threading.main_thread()]


@pytest.mark.parametrize("num_beams", [1, 4])
def test_translations_do_not_depend_on_the_number_of_workers(learned, tokenizer, sentences, num_beams):
    texts = sentences * 3
    one, several = (
        Translator(learned, tokenizer, num_beams=num_beams, tokens_per_batch=64, workers=workers) for workers in (1, 3)
    )
    assert several.translate(texts) == one.translate(texts)
    assert Translator(learned, tokenizer).workers == torch.get_num_threads()
