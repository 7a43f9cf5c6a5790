"""The Llama, its attention and its experts, in regions and dims: no mesh axis is named here."""
