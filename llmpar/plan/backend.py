"""What platforms can do of the choices that a plan leaves to them (``auto``): attention's kernel, how tokens
reach their experts, how a ring hops; and which formats they multiply. None of it changes where anything is
sharded.
"""

SUITS: dict[str, dict[str, tuple[str, ...]]] = {
    "attention_kernel": {
        "cpu": ("portable", "xla", "flash"),
        "gpu": ("flash", "cudnn", "portable", "xla"),
        "tpu": ("flash", "portable", "xla"),
    },
    "dispatch": {"cpu": ("padded",), "gpu": ("ragged", "padded"), "tpu": ("ragged", "padded")},
    "matmul_dtype": {"cpu": ("same", "float8"), "gpu": ("same", "float8"), "tpu": ("same",)},
    "hop": dict.fromkeys(("cpu", "gpu", "tpu"), ("permute", "exchange")),
}
"""What a platform can do in reasonable time; first what ``auto`` means. (Simulated devices round to float8,
and multiply in the wider dtype.)"""
KERNELS_OF_JAX = (
    "cudnn",
    "xla",
)  # JAX's own attention: no log of sums in float32 to merge by, as rings do
AMPERE = 8.0
"""NVIDIA's compute capability since which XLA has Triton. (JAX's own attention needs it, too: older GPUs lack
the products of 16 bits that it asks for.)"""
LEAST = {"flash": (AMPERE, "Ampere"), "cudnn": (AMPERE, "Ampere"), "float8": (8.9, "Ada")}
"""What needs a compute capability of NVIDIA's, and which. Tensor cores multiply e4m3 and e5m2 since 8.9
(CUDA C++ programming guide, tables of compute capabilities)."""
BLACKWELL = 10.0
HOPPER = 9.0  # since which cuDNN's attention has heads of up to 256, not 128
UNSUITED = {
    "cudnn": "it is for NVIDIA GPUs",
    "ragged": "XLA has no ragged all-to-all for CPUs",
    "float8": "their matmuls are not tried here, and XLA may do them in 16 bits",
}


def able(name: str, devices: str) -> tuple[str, ...]:
    """What devices (`mesh.platform_of`) can do of what a field offers."""
    platform, _, card = devices.partition(" ")
    lacks = [one for one, (least, _) in LEAST.items() if card and not since(least, card)]
    if "flash" in lacks and card[0].isdigit():
        lacks.append("xla")
    return tuple(one for one in SUITS[name][platform] if one not in lacks)


def since(capability: float, card: str) -> bool:
    """Whether a card, as JAX describes it, has this compute capability of NVIDIA's or a later one."""
    return card[:1].isdigit() and float(card) >= capability


def fits_cudnn(head_width: int, devices: str) -> bool:
    """Whether JAX has cuDNN's attention for heads of this width on devices (`mesh.platform_of`)."""
    widest = 256 if since(HOPPER, devices.partition(" ")[2]) else 128
    return (
        head_width % 8 == 0
        and head_width <= widest
        and "cudnn" in able("attention_kernel", devices)
    )


def suited(name: str, value: str, devices: str) -> str:
    """Return what the value of a field means on devices: of ``auto`` the first that suits them, else the
    value. Refuses what they cannot do."""
    suits, (platform, _, card) = able(name, devices), devices.partition(" ")
    if value == "auto":
        return suits[0]
    if value in suits:
        return value
    why = UNSUITED.get(value, "")
    if value in SUITS[name][platform]:
        least, generation = LEAST.get(value, LEAST["flash"])
        why = f"it wants NVIDIA's compute capability {least} ({generation}) or newer, and here is {card}"
    auto = "" if name == "matmul_dtype" else ", or 'auto'"
    raise ValueError(
        f"{name}='{value}' does not suit the {platform.upper()}s of this mesh:"
        f" {why}; use {name}='{suits[0]}'{auto}"
    )
