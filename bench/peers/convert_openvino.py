"""Turns a checkpoint into OpenVINO's format: python -m bench.peers.convert_openvino CHECKPOINT TARGET FORMAT.

FORMAT is fp32, bf16 or int8. int8 is the default weight compression of the toolkit: asymmetric, with one scale per
output channel.
"""

import shutil
import sys
from pathlib import Path

import nncf
import openvino
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig


def convert(checkpoint: Path, target: Path, weights: str) -> None:
    """Export the checkpoint with optimum and write the model to `target`."""
    dtype = "bf16" if weights == "bf16" else "fp32"
    main_export(str(checkpoint), str(target), task="text-generation-with-past", ov_config=OVConfig(dtype=dtype))
    if weights == "int8":
        exported = target / "exported"
        exported.mkdir()
        for file in target.glob("openvino_model.*"):
            file.rename(exported / file.name)
        model = openvino.Core().read_model(exported / "openvino_model.xml")
        compressed = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        openvino.save_model(compressed, target / "openvino_model.xml", compress_to_fp16=False)
        shutil.rmtree(exported)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
