"""The verb `evaluate` from a checkout: `python scripts/evaluate.py --model FOLDER --source FILE --references FILE`."""

import sys

from vanilla_transformer.cli import main


if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
