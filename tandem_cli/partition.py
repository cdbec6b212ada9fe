"""`tandem partition`: writes a model's weights ahead of time as the ranks of a worker map them."""

import argparse
from pathlib import Path

from engine.settings import DTYPES, QUANTIZATIONS
from tandem_cli.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    about = "model folder, name of a bundled model, or any other source of `tandem up`"
    parser.add_argument("model", metavar="MODEL", help=about)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write, which must not exist")
    about = "ranks of each stage (1); max: as a worker's --tensor-parallel max"
    parser.add_argument("--tensor-parallel", default="1", metavar="N", help=about)
    parser.add_argument("--pipeline-parallel", type=int, default=1, metavar="M", help="stages of a worker (1)")
    about = "only cpu: GPUs load checkpoints as they are (cpu)"
    parser.add_argument("--device", default="cpu", metavar="NAME", help=about)
    about = "leave the folder as it is if it holds this partition of this model"
    parser.add_argument("--reuse", action="store_true", help=about)
    parser.add_argument(
        "--quantize", choices=QUANTIZATIONS, default="none", help="quantization of the linear layers (none)"
    )
    about = "type of the weights; auto: as a worker's on CPU (auto)"
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help=about)


def run(args: argparse.Namespace) -> int:
    from tandem_cli.model_files.partition_model import partition_model

    return partition_model(args)
