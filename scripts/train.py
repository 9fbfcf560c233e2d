"""Training under a launcher: `accelerate launch --num_processes 2 scripts/train.py --config multi30k ...`."""

import sys


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # This folder; its evaluate.py would hide the library of that name.
        del sys.path[0]
    from vanilla_transformer.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
