"""NVFP4: numbers of 4 bits (e2m1), 16 of which share a scale in e4m3, and one scale in fp32 for the matrix.

compressed-tensors calls the numbers weight_packed, and divides by the matrix's scale, modelopt calls them weight, and
multiplies by it. Both round the product of the two scales to fp32 before they multiply with it.
"""

from engine.quantized_formats.e2m1 import doubled
from engine.quantized_formats.matrix import Part, Parts, QuantizedMatrix, Shape, Tensors, count_groups
from engine.quantized_formats.storage import MatrixStorage


def parts(storage: MatrixStorage, shape: Shape) -> Parts:
    num_outputs, num_inputs = shape
    num_groups = count_groups(storage, num_inputs)
    matrix, scale = _names(storage)
    return {
        matrix: Part(("U8",), ((num_outputs, num_inputs // 2),)),
        "weight_scale": Part(("F8_E4M3",), ((num_outputs, num_groups),)),
        scale: Part(("F32",), ((), (1,))),
    }


def read(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    matrix, name = _names(storage)
    scales, of_matrix = tensors["weight_scale"].float(), tensors[name]
    scales = scales / of_matrix if storage.format == "nvfp4-packed" else scales * of_matrix
    return QuantizedMatrix(doubled(tensors[matrix]), scales * 0.5)


def _names(storage: MatrixStorage) -> tuple[str, str]:
    if storage.format == "nvfp4-packed":
        return "weight_packed", "weight_global_scale"
    return "weight", "weight_scale_2"
