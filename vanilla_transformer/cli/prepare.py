"""`prepare`: train the vocabulary and encode the text of a training run, without training."""

from vanilla_transformer.training.options import TrainingOptions
from vanilla_transformer.training.preparation.output_folder import check_decodable, check_writable
from vanilla_transformer.training.preparation.texts import check_texts


OPTIONS = TrainingOptions


def run(options: TrainingOptions) -> int:
    """Write the vocabulary and the encoded text to the cache folder, where `train` finds them."""
    options.check()
    check_texts(options)
    cache_dir = options.cache_dir or options.output_dir / "cache"
    check_decodable(cache_dir)
    check_writable(cache_dir)
    from .session import start

    start()
    from vanilla_transformer.training.preparation.vocabulary_and_ids import prepare

    data = prepare(options, cache_dir, show_progress=True)
    for name, corpus in (("training", data.train), ("validation", data.valid)):
        # A stream is not stored.
        if corpus is not None and corpus.report["pairs_read"] is not None:
            dropped = corpus.report["summary"] or "dropped none"
            print(f"{name}: kept {len(corpus):,} of {corpus.report['pairs_read']:,} pairs; {dropped}")
    print(f"vocabulary: {len(data.tokenizer):,} entries")
    return 0
