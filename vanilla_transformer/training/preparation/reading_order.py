"""In which order a run reads its text: in epochs, or as it comes from a stream."""

from accelerate import Accelerator

from vanilla_transformer.data.bpe_dropout import DropoutCorpus
from vanilla_transformer.data.encoding import EncodedCorpus
from vanilla_transformer.data.epochs import EpochPlan
from vanilla_transformer.data.streams import StreamCorpus, StreamPlan
from vanilla_transformer.training.options import TrainingOptions


def make_plan(
    corpus: EncodedCorpus | DropoutCorpus | StreamCorpus, options: TrainingOptions, accelerator: Accelerator
) -> EpochPlan | StreamPlan:
    """The plan of the training text's updates, the same on every process.

    Args:
        corpus: Training text.
        options: Training options.
        accelerator: Processes, which begin each epoch together.

    Returns:
        The plan, at its beginning.
    """
    budget = {
        "tokens_per_batch": options.tokens_per_batch,
        "batches_per_update": options.batches_per_update,
        "seed": options.seed,
        "batching": options.batching,
    }
    if isinstance(corpus, StreamCorpus):
        return StreamPlan(corpus, **budget)
    if isinstance(corpus, DropoutCorpus):
        return EpochPlan(corpus, **budget, guard=accelerator.main_process_first)
    return EpochPlan(corpus, **budget)
