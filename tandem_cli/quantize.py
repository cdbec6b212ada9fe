"""`tandem quantize`: makes a quantised checkpoint, and says how far it is from the original."""

import argparse
from pathlib import Path

from engine.quantizer import IN_GROUPS, SCHEMES
from tandem_cli.parser import CommandParser

DEFAULT_GROUP_SIZE = 128
DEFAULT_ALPHA = 0.5


def add_arguments(parser: CommandParser) -> None:
    about = "model folder, name of a bundled model, or any other source of `tandem up`"
    parser.add_argument("model", metavar="MODEL", help=about)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write, which must not exist")
    about = "; ".join(f"{name}: {meaning}" for name, meaning in SCHEMES.items())
    parser.add_argument("--scheme", choices=SCHEMES, required=True, help=about)
    about = (
        "prompts to calibrate with and to judge by: JSON lines with prompt, messages or token_ids, as of tandem bench"
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help=about)
    about = f"inputs that share a scale, for {', '.join(IN_GROUPS)} ({DEFAULT_GROUP_SIZE})"
    parser.add_argument("--group-size", type=int, metavar="N", help=about)
    about = f"for smoothquant: 1 makes the channels of activations equally large, 0 those of weights ({DEFAULT_ALPHA})"
    parser.add_argument("--alpha", type=float, metavar="A", help=about)
    parser.add_argument("--max-prompts", type=int, default=256, metavar="N", help="prompts of the file to use (256)")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longer prompts are cut (512)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    from tandem_cli.model_files.quantize_model import quantize_model

    return quantize_model(args)
