"""Training under a launcher: `accelerate launch --num_processes 2 scripts/train.py --config multi30k ...`."""

import sys

from vanilla_transformer.cli import main


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
