"""Quantised formats that are not read: the reason, and what to serve instead. Needs no torch."""

from collections.abc import Collection, Mapping

_ROUND = "serve the original checkpoint with --quantize int4 or int8"
_OTHERWISE = "serve the original checkpoint with --quantize int4, or one in awq, gptq or compressed-tensors"

METHODS: Mapping[str, str] = {
    "quanto": f"optimum-quanto rounds in a way that --quantize replaces: {_ROUND}",
    "eetq": "its matrices are in the order in which one kind of GPU reads them, and were rounded to int8 from the "
    "original as it was loaded: serve the original checkpoint with --quantize int8",
    "aqlm": f"its matrices are sums of vectors from codebooks: {_OTHERWISE}",
    "vptq": f"its matrices are vectors from codebooks: {_OTHERWISE}",
    "spqr": f"its matrices have sparse outliers beside groups of 3 bits: {_OTHERWISE}",
    "higgs": f"its matrices are rotated vectors from a grid, in the order of one kind of GPU: {_OTHERWISE}",
    "fp_quant": f"its matrices are rotated by Hadamard transforms: {_OTHERWISE}",
    "sinq": f"its matrices have scales for outputs and for inputs: {_OTHERWISE}",
}
"""By quant_method, why it is not read and what to do."""

_TENSORS: Mapping[str, tuple[str, ...]] = {
    "quanto": ("weight._data", "weight._scale"),
    "eetq": ("weight_scales",),
    "aqlm": ("codebooks", "codes"),
    "vptq": ("centroids.weight", "res_centroids.weight", "centroids"),
    "spqr": ("dense_weights", "row_offsets"),
    "higgs": ("tables2",),
    "fp_quant": ("forward_hadamard_matrix", "dqweight"),
}
"""Tensors of a module that no other method has."""
_EARLY_TORCHAO = "weight:qdata"


def why_unread(module: str, stored: Collection[str]) -> str | None:
    """The reason why a module's tensors cannot be read, whatever config.json says; None if none of them tells so."""
    if f"{module}.{_EARLY_TORCHAO}" in stored:
        return (
            f"tensor {module}.{_EARLY_TORCHAO} is named as by torchao 0.14, whose files are not supported: save the "
            "model again with torchao 0.15 or later"
        )
    for method, names in _TENSORS.items():
        if found := next((name for name in names if f"{module}.{name}" in stored), None):
            return f"tensor {module}.{found} is of quant_method {method}, which is not supported: {METHODS[method]}"
    return None
