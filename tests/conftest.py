import codecs
import os
import signal
from contextlib import contextmanager

import pytest


# All before anything imports torch or transformers, which read them once.
os.environ["HF_HUB_OFFLINE"] = "1"
# The models of these tests are so small that waiting for a second thread takes longer than the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background jobs with SIGINT ignored; tests of Ctrl-C need it, as does whatever they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter):
    """Say aloud what skipped tests leave untested."""
    skipped = {report.nodeid.split("::")[0] for report in terminalreporter.stats.get("skipped", ())}
    if any(path.endswith("visualization/test_in_browser.py") for path in skipped):
        line = "THE PAGES WERE NOT TESTED: there is no Chromium here (Debian and Ubuntu: apt install chromium)."
        terminalreporter.write_line(line, yellow=True, bold=True)


@pytest.fixture
def ordinary_user():
    """A context without root's rights, whom permissions do not bind."""

    @contextmanager
    def ordinary_user():
        if not hasattr(os, "geteuid") or os.geteuid() != 0:
            yield
            return
        # Python may lie where only root can read, so that nothing can be imported in the context.
        codecs.lookup("utf-8-sig")
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return ordinary_user


@pytest.fixture
def call(capsys):
    """Call the command line in this process; returns exit status, standard output and standard error."""

    # After what is set above.
    from vanilla_transformer.cli import main

    def call(*arguments):
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return call
