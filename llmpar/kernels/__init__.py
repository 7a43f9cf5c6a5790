"""Own kernels of attention, for accelerators, and the products of experts. No accelerator has run these yet:
compilers and an interpreter have."""
