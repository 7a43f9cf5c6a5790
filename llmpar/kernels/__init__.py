"""Own kernels of attention and of experts, for accelerators. No device has run these yet: compilers and an
interpreter have."""
