"""The C++ engine for CPUs: building and loading it, its kernels and decoder, and their Python bindings."""
