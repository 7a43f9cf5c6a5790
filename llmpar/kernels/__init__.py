"""Own kernels of attention, for accelerators, and the products of experts (`tests/device.md`: on an H100)."""
