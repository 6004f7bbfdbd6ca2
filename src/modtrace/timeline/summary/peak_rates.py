"""The highest rates of devices: dense products of matrices, as their makers state them."""

from __future__ import annotations

_HALF = ("bfloat16", "float16")
_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
# From data sheets of NVIDIA (for the RTX 4090 its paper on the Ada architecture) and AMD, without sparsity: half of
# what NVIDIA states with it. The RTX 4090 sums up in 32 bits. Numbers of 32 bits are left out: whether they are
# computed as TF32 is not known.
_PEAKS: tuple[tuple[str, float, float | None], ...] = (
    ("B200", 2250.0, 4500.0),
    ("H200", 989.4, 1978.9),
    ("H100 PCIe", 756.0, 1513.0),
    ("H100 NVL", 835.5, 1671.0),
    ("H100", 989.4, 1978.9),
    ("A100", 312.0, None),
    ("L40S", 362.05, 733.0),
    ("L4", 121.0, 242.5),
    ("RTX 4090", 165.2, 330.3),
    ("V100", 125.0, None),
    ("MI300X", 1307.4, 2614.9),
    ("MI250X", 383.0, None),
)
"""Part of the device's name, TFLOP/s of numbers of 16 bits, and of 8 bits."""


def peak_tflops(device: str, dtype: str) -> float | None:
    """Return the highest dense rate of a device in 10¹² FLOP/s; None if it is not known.

    Args:
        device: its name (`NVIDIA H100 80GB HBM3`).
        dtype: the type of the numbers (`bfloat16`).
    """
    words = f"{device.replace('-', ' ')} "
    for name, half, eight_bits in _PEAKS:
        if f" {name} " in words:
            return half if dtype in _HALF else eight_bits if dtype in _EIGHT_BITS else None
    return None
