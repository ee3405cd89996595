"""Owns how numbers are drawn without a generator's state: 64 well mixed bits of a counter, for whole arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint64]


def mix(counters: Bits) -> Bits:
    """64 independent looking bits for each counter: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). One to one."""
    bits = counters + np.uint64(0x9E3779B97F4A7C15)
    shifted = np.empty_like(bits)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(bits, np.uint64(shift), out=shifted)
        np.bitwise_xor(bits, shifted, out=bits)
        np.multiply(bits, np.uint64(factor), out=bits)
    np.right_shift(bits, np.uint64(31), out=shifted)
    return np.bitwise_xor(bits, shifted, out=bits)


def key(*parts: int) -> np.uint64:
    """A key of its own for every sequence of integers."""
    bits = np.zeros(1, np.uint64)
    for part in parts:
        bits = mix(bits ^ np.uint64(part % 2**64))
    return bits[0]


def uniforms(bits: Bits) -> npt.NDArray[np.float64]:
    """In [0, 1), from the upper 53 bits."""
    return (bits >> np.uint64(11)) * 2.0**-53


def quarters(bits: Bits) -> npt.NDArray[np.float32]:
    """Four numbers from each counter's bits, uniform with mean 0 and variance 1: [..., 4]."""
    sixteenths = bits.view(np.uint16).reshape(*bits.shape, 4).astype(np.float32)
    sixteenths -= np.float32(32767.5)
    sixteenths *= np.float32(12**0.5 / 65536)
    return sixteenths
