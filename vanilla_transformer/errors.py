"""The one exception that stands for a mistake in what the user gave us."""


class UserError(ValueError):
    """Input that the user can correct: a path, an option, a line of a corpus, a damaged checkpoint.

    Its message is one sentence that says what was received, which rule it breaks and what to do about it. It names
    arguments in backticks, as in `num_beams`, where the command line puts the flag `--num_beams`. The command line
    prints it without a traceback; any other exception is a defect and keeps its traceback.
    """
