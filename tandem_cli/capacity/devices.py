"""Well-known devices: memory, bandwidth and dense arithmetic as stated by their vendors. Rates with sparsity, which are
twice as high on paper, are not used."""

from collections.abc import Mapping
from dataclasses import dataclass

from mesh.domain.errors import ConfigurationError
from tandem_cli.capacity.capacity import DeviceRates, Precision

_SAME_RATE = {"float16": "bfloat16"}
_T = 1e12


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `flops_per_s` has the rate per type of the operands; `source` names the origin of the figures."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    source: str

    def rates(self, precision: Precision) -> DeviceRates:
        """The rates for `precision`. Weights of a type without arithmetic on this device (such as int4) are multiplied
        at the type of the other numbers. Raises ConfigurationError if the rate of that type is unknown.
        """
        other_rate = self._rate(precision.other)
        if other_rate is None:
            types = ", ".join(self.flops_per_s)
            raise ConfigurationError(f"no rate for {precision.other} on {self.name}: choose --dtype of {types}")
        weights = self._rate(precision.weights) or other_rate
        return DeviceRates(self.memory_bytes, self.bandwidth_bytes_per_s, weights, other_rate)

    def _rate(self, dtype: str) -> float | None:
        return self.flops_per_s.get(dtype) or self.flops_per_s.get(_SAME_RATE.get(dtype, ""))


_HOPPER = {"float32": 66.9 * _T, "bfloat16": 989.4 * _T, "fp8": 1978.9 * _T, "int8": 1978.9 * _T}
_A100 = {"float32": 19.5 * _T, "bfloat16": 312 * _T, "int8": 624 * _T}
_MI300 = {"float32": 163.4 * _T, "bfloat16": 1307.4 * _T, "fp8": 2614.9 * _T, "int8": 2614.9 * _T}
_A100_SHEET = "NVIDIA A100 datasheet"
_H100_SHEET = "NVIDIA H100 datasheet"
_HALF_OF_SPARSE = "half of its figures with sparsity"


def _rates(float32: float, bfloat16: float, int8: float, fp8: float | None = None) -> Mapping[str, float]:
    """Rates by type; the arguments are in TFLOP/s."""
    rates = {"float32": float32 * _T, "bfloat16": bfloat16 * _T, "int8": int8 * _T}
    return rates if fp8 is None else rates | {"fp8": fp8 * _T}


DEVICES: Mapping[str, Device] = {
    "h100-sxm": Device("H100 SXM", 80e9, 3.35e12, _HOPPER, _H100_SHEET),
    "h100-pcie": Device("H100 PCIe", 80e9, 2.0e12, _rates(51, 756, 1513, 1513), _H100_SHEET),
    "h100-nvl": Device("H100 NVL", 94e9, 3.9e12, _rates(60, 835, 1671, 1671), f"{_H100_SHEET} ({_HALF_OF_SPARSE})"),
    "h200": Device("H200", 141e9, 4.8e12, _HOPPER, "NVIDIA H200 datasheet"),
    "b200": Device(
        "B200", 180e9, 8e12, _rates(75, 2250, 4500, 4500), f"NVIDIA HGX B200 datasheet, an eighth ({_HALF_OF_SPARSE})"
    ),
    "a100-80gb": Device("A100 80GB SXM", 80e9, 2.039e12, _A100, _A100_SHEET),
    "a100-80gb-pcie": Device("A100 80GB PCIe", 80e9, 1.935e12, _A100, _A100_SHEET),
    "a100-40gb": Device("A100 40GB", 40e9, 1.555e12, _A100, _A100_SHEET),
    "a10": Device("A10", 24e9, 0.6e12, _rates(31.2, 125, 250), "NVIDIA A10 datasheet"),
    "a10g": Device("A10G", 24e9, 0.6e12, _rates(35, 70, 140), "NVIDIA A10G datasheet"),
    "l4": Device("L4", 24e9, 0.3e12, _rates(30.3, 121, 242.5, 242.5), f"NVIDIA L4 datasheet ({_HALF_OF_SPARSE})"),
    "l40s": Device("L40S", 48e9, 0.864e12, _rates(91.6, 362.05, 733, 733), "NVIDIA L40S datasheet"),
    "t4": Device(
        "T4", 16e9, 0.32e12, {"float32": 8.1 * _T, "float16": 65 * _T, "int8": 130 * _T}, "NVIDIA T4 datasheet"
    ),
    "v100": Device(
        "V100 SXM2 32GB", 32e9, 0.9e12, {"float32": 15.7 * _T, "float16": 125 * _T}, "NVIDIA V100 datasheet"
    ),
    "rtx-4090": Device(
        "RTX 4090", 24e9, 1.008e12, _rates(82.6, 165.2, 660.6, 330.3), "NVIDIA Ada architecture whitepaper"
    ),
    "mi300x": Device("MI300X", 192e9, 5.3e12, _MI300, "AMD Instinct MI300X data sheet"),
    "mi325x": Device("MI325X", 256e9, 6e12, _MI300, "AMD Instinct MI325X data sheet"),
}


def find_device(name: str) -> Device:
    """Look up a device by name. Raises ConfigurationError with a list of the known devices."""
    key = name.lower().replace(" ", "-").replace("_", "-")
    if key not in DEVICES:
        close = [device for device in DEVICES if device.startswith(key)]
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigurationError(f"unknown device {name!r}{hint}; known devices: here, {', '.join(DEVICES)}")
    return DEVICES[key]
