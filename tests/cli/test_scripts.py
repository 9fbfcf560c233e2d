"""What a launcher starts is a verb of the command line."""

import subprocess
import sys
from pathlib import Path


SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_evaluating_by_script(run_folder, corpus, tmp_path):
    output = tmp_path / "scores.json"
    files = ["--source", corpus[0], "--references", corpus[1], "--output", output]
    result = subprocess.run(
        [sys.executable, SCRIPTS / "evaluate.py", "--model", run_folder, *files, "--num_beams", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert output.read_text(encoding="utf-8") == result.stdout
