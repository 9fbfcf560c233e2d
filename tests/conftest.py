import os
import signal


# All before anything imports torch or transformers, which read them once.
os.environ["HF_HUB_OFFLINE"] = "1"
# The models of these tests are so small that waiting for a second thread takes longer than the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background jobs with SIGINT ignored; tests of Ctrl-C need it, as does whatever they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
