"""The verb `evaluate` from a checkout: `python scripts/evaluate.py --model FOLDER --source FILE --references FILE`."""

import sys


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # This folder; its evaluate.py would hide the library of that name.
        del sys.path[0]
    from vanilla_transformer.cli import main

    sys.exit(main(["evaluate", *sys.argv[1:]]))
