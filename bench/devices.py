"""Well-known devices: memory, bandwidth and dense arithmetic as their vendors state them. Rates with sparsity, twice as
high on paper, are not used here."""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.capacity import DeviceRates, Precision
from mesh.domain.errors import ConfigurationError

_SAME_RATE = {"float16": "bfloat16"}
_T = 1e12


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `flops_per_s` by precision of the operands; `source` says where the figures are from."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    source: str

    def rates(self, precision: Precision) -> DeviceRates:
        """For this precision. Weights of a format without arithmetic of its own (int4, or int8 where there is none) are
        multiplied as the other numbers are. Raises ConfigurationError if nothing is known of those either."""
        other = self._rate(precision.other)
        if other is None:
            known = ", ".join(self.flops_per_s)
            raise ConfigurationError(f"no rate for {precision.other} on {self.name}; known: {known}")
        weights = self._rate(precision.weights) or other
        return DeviceRates(self.memory_bytes, self.bandwidth_bytes_per_s, weights, other)

    def _rate(self, dtype: str) -> float | None:
        return self.flops_per_s.get(dtype) or self.flops_per_s.get(_SAME_RATE.get(dtype, ""))


_HOPPER = {"float32": 66.9 * _T, "bfloat16": 989.4 * _T, "fp8": 1978.9 * _T, "int8": 1978.9 * _T}

DEVICES: Mapping[str, Device] = {
    "h100-sxm": Device("H100 SXM", 80e9, 3.35e12, _HOPPER, "NVIDIA H100 datasheet"),
    "h200": Device("H200", 141e9, 4.8e12, _HOPPER, "NVIDIA H200 datasheet"),
    "a100-80gb": Device(
        "A100 80GB SXM",
        80e9,
        2.039e12,
        {"float32": 19.5 * _T, "bfloat16": 312 * _T, "int8": 624 * _T},
        "NVIDIA A100 datasheet",
    ),
    "l4": Device(
        "L4",
        24e9,
        0.3e12,
        {"float32": 30.3 * _T, "bfloat16": 121 * _T, "fp8": 242.5 * _T, "int8": 242.5 * _T},
        "NVIDIA L4 datasheet (half of its figures with sparsity)",
    ),
    "l40s": Device(
        "L40S",
        48e9,
        0.864e12,
        {"float32": 91.6 * _T, "bfloat16": 362.05 * _T, "fp8": 733 * _T, "int8": 733 * _T},
        "NVIDIA L40S datasheet",
    ),
    "mi300x": Device(
        "MI300X",
        192e9,
        5.3e12,
        {"float32": 163.4 * _T, "bfloat16": 1307.4 * _T, "fp8": 2614.9 * _T, "int8": 2614.9 * _T},
        "AMD Instinct MI300X data sheet",
    ),
}


def find_device(name: str) -> Device:
    """A device of the table. Raises ConfigurationError that lists them."""
    key = name.lower().replace(" ", "-").replace("_", "-")
    if key not in DEVICES:
        raise ConfigurationError(f"no device {name!r} is known; known are: here, {', '.join(DEVICES)}")
    return DEVICES[key]
