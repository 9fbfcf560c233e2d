"""The command line, `vanilla-transformer VERB`: one module a verb, imported when its verb is called."""

import errno
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from vanilla_transformer import __version__
from vanilla_transformer.errors import UserError

from .standard_error import StandardError


PROGRAM = "vanilla-transformer"

VERBS = {
    "quickstart": "train, evaluate and try a small English-German model on the shipped sample",
    "tokenizer": "train a vocabulary on text files",
    "prepare": "train the vocabulary and encode the text of a training run, without training",
    "train": "train a translation model on parallel text",
    "average": "average the last checkpoints of a run",
    "translate": "translate arguments, a file or standard input",
    "evaluate": "translate a test set and score it with BLEU and chrF",
    "score": "score a file of translations with BLEU and chrF",
    "visualize": "show attention, positions, the learning rate, runs or a vocabulary, as a page or a figure",
    "publish": "publish a model on the Hugging Face Hub, with its card and its code",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments; `None` takes the process's.

    Returns:
        Exit status: 0 done, 1 a mistake in the input, 2 a mistake in the command, 128 + n stopped by signal n.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = PROGRAM
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    given, sys.stderr = sys.stderr, StandardError(sys.stderr)
    try:
        _prepare_output()
        if not arguments or arguments[0] in ("-h", "--help"):
            print(_overview(), flush=True)
            return 0 if arguments else 2
        if arguments[0] == "--version":
            print(f"{PROGRAM} {__version__}", flush=True)
            return 0
        verb = arguments[0]
        if verb not in VERBS:
            raise _usage_error(verb)
        name = f"{PROGRAM} {verb}"
        _check_encoding(arguments)
        _check_launcher(verb)
        status = _run(verb, arguments[1:])
        sys.stdout.flush()
        return status
    except _UsageError as error:
        _complain(name, str(error))
        return 2
    except UserError as error:
        _complain(name, str(error))
        return 1
    except KeyboardInterrupt:
        _complain(name, "stopped by Ctrl-C.")
        return 130
    except BrokenPipeError:
        # The reader of our output has left; closing standard output now would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if isinstance(error, UnicodeEncodeError) and error.encoding == sys.getfilesystemencoding() != "utf-8":
            # The name of a file, which a recipe tells.
            _complain(name, f"{error.object} {_NOT_OF_THE_LOCALE.format(error.encoding)}")
            return 1
        if _is_out_of_memory(error):
            _complain(name, "Out of memory; lower the sizes of batches, beams or the model, or the number of workers.")
            return 1
        reason = _reason_of_disk(error)
        if reason is None:
            raise
        # Where a file is copied, the second name is that of the copy.
        place = getattr(error, "filename2", None) or getattr(error, "filename", None) or "the output"
        _complain(name, f"{reason}: {place}; make room or choose another folder.")
        return 1
    finally:
        sys.stderr = given


def _is_out_of_memory(error: Exception) -> bool:
    # The class of torch, which is not imported here, and what it says of memory that is not a GPU's.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate" in str(error))
    )


def _reason_of_disk(error: Exception) -> str | None:
    """What keeps a file from being written, or `None` if the error is of another kind."""
    number = getattr(error, "errno", None)
    # tokenizers and safetensors tell the system's errors in words.
    if number is None and (told := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(told[1])
    refusals = (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EPERM, errno.ENAMETOOLONG,
        errno.ELOOP,
    )  # fmt: skip
    return os.strerror(number) if number in refusals else None


_NOT_OF_THE_LOCALE = "has letters that the locale's encoding, {}, does not; set PYTHONUTF8=1, or a UTF-8 locale."


class _UsageError(UserError):
    """A mistake in the command itself."""


def _prepare_output() -> None:
    if sys.stdout is None:
        raise UserError("Standard output is closed; leave it open, or send it to a file.")
    # Text is UTF-8 on its way in and out, whatever the locale; names of files may be bytes that are not.
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    sys.stderr.reconfigure(encoding="utf-8", errors="surrogateescape")


def _check_encoding(arguments: Sequence[str]) -> None:
    """Refuse arguments that the locale could not decode: not every library opens files by such names."""
    encoding = sys.getfilesystemencoding()
    for argument in arguments:
        if encoding != "utf-8" and any("\udc80" <= letter <= "\udcff" for letter in argument):
            raise UserError(f"{argument} {_NOT_OF_THE_LOCALE.format(encoding)}")


def _check_launcher(verb: str) -> None:
    """Refuse to do several times side by side what is done once; processes of a launcher share training alone."""
    number = os.environ.get("WORLD_SIZE", "1")
    if verb != "train" and "LOCAL_RANK" in os.environ and number != "1":
        raise UserError(
            f"A launcher has started {number} processes, and each would do the same; start {verb} without a launcher."
        )


def _run(verb: str, arguments: Sequence[str]) -> int:
    from .options import parse

    module = import_module(f".{verb}", __name__)
    try:
        options = parse(module.OPTIONS, arguments, prog=f"{PROGRAM} {verb}", summary=_sentence(VERBS[verb]))
    except UserError as error:
        raise _UsageError(str(error)) from error
    except SystemExit:
        # argparse has printed the help.
        return 0
    return module.run(options)


def _sentence(summary: str) -> str:
    """A verb's summary with a capital first letter and a full stop; names keep their capitals."""
    return f"{summary[:1].upper()}{summary[1:]}."


def _usage_error(verb: str) -> UserError:
    import difflib

    nearest = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"the verbs are {', '.join(VERBS)}."
    return _UsageError(f"{verb} is not a verb; {hint}")


def _overview() -> str:
    lines = [f"  {verb:<12}{summary}" for verb, summary in VERBS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} VERB [OPTIONS]",
            "",
            "The original Transformer (Vaswani et al., 2017) for training translation models.",
            "",
            *lines,
            "",
            f"`{PROGRAM} VERB --help` lists a verb's options; `{PROGRAM} --version` prints the version.",
        ]
    )


def _complain(name: str, message: str) -> None:
    # One of several processes on a machine speaks for all.
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        # The name of a file may hold line ends.
        message = message.replace("\n", "\\n").replace("\r", "\\r")
        print(f"{name}: {message}", file=sys.stderr)
