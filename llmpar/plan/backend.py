"""What platforms can do of the choices that a plan leaves to them (``auto``): attention's kernel, and how
tokens reach their experts. None of it changes where anything is sharded.
"""

SUITS = {
    "attention_kernel": {
        "cpu": ("portable", "xla", "flash"),
        "gpu": ("flash", "cudnn", "portable", "xla"),
        "tpu": ("flash", "portable", "xla"),
    },
    "dispatch": {"cpu": ("padded",), "gpu": ("ragged", "padded"), "tpu": ("ragged", "padded")},
}
"""What a platform can do in reasonable time; first what ``auto`` means."""
OF_JAX = "cudnn", "xla"  # JAX's own attention: no log of sums in float32 to merge by, as rings do
AMPERE, SINCE_AMPERE = 8.0, ("flash", "cudnn")
"""NVIDIA's compute capability since which XLA has Triton, and what needs it. (So does JAX's own attention:
older GPUs lack the products of 16 bits that it asks for.)"""
BLACKWELL = 10.0
HOPPER = 9.0  # since which cuDNN's attention has heads of up to 256, not 128
UNSUITED = {"cudnn": "it is for NVIDIA GPUs", "ragged": "XLA has no ragged all-to-all for CPUs"}


def able(name: str, devices: str) -> tuple[str, ...]:
    """What devices (`mesh.platform_of`) can do of what a field offers."""
    platform, _, card = devices.partition(" ")
    older = bool(card) and not since(AMPERE, card)
    lacks = SINCE_AMPERE + ("xla",) * card[0].isdigit() if older else ()
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
        why = f"it wants NVIDIA's compute capability {AMPERE} (Ampere) or newer, and here is {card}"
    raise ValueError(
        f"{name}='{value}' does not suit the {platform.upper()}s of this mesh:"
        f" {why}; use {name}='{suits[0]}', or 'auto'"
    )
