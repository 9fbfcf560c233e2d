import os


# All before anything imports torch or transformers, which read them once.
os.environ["HF_HUB_OFFLINE"] = "1"
# The models of these tests are so small that waiting for a second thread takes longer than the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
