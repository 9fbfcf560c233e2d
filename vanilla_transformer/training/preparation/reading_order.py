"""The order in which a run reads its text: in epochs, or from a stream."""

from accelerate import Accelerator

from vanilla_transformer.data.bpe_dropout import DropoutCorpus
from vanilla_transformer.data.encoding import EncodedCorpus
from vanilla_transformer.data.epochs import EpochPlan
from vanilla_transformer.data.streams import StreamCorpus, StreamPlan
from vanilla_transformer.training.options import TrainingOptions


def make_plan(
    corpus: EncodedCorpus | DropoutCorpus | StreamCorpus, options: TrainingOptions, accelerator: Accelerator
) -> EpochPlan | StreamPlan:
    """Plan the updates of the training text; the plan is the same on every process.

    Args:
        corpus: Training text.
        options: Training options.
        accelerator: The processes of the run, which begin each epoch together.

    Returns:
        The plan, before the first update.
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
