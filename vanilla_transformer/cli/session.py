"""Set-up of a verb that works with models: registration, huge pages, quiet libraries."""

from vanilla_transformer.training.cpu.memory import prefer_huge_pages


def start() -> None:
    """Register the package's classes, prefer huge pages, and silence the libraries' progress bars and messages."""
    prefer_huge_pages()
    from datasets.utils.logging import disable_progress_bar
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    from vanilla_transformer import register

    register()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    disable_progress_bar()
