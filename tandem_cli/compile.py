"""`tandem compile`: compiles the machine code that a model needs on this machine, so that its first start need not."""

import argparse
from dataclasses import fields

from tandem_cli.parser import CommandParser

SETTINGS = (
    "dtype",
    "quantize",
    "kv_dtype",
    "device",
    "enforce_eager",
    "attention",
    "tensor_parallel",
    "pipeline_parallel",
    "adapter",
    "speculative",
    "draft_model",
    "load_format",
    "revision",
)
"""Settings of a worker that say which code it needs."""


def add_arguments(parser: CommandParser) -> None:
    from decode_worker.settings import DecodeSettings

    about = "any source of `tandem up` (tandem-small)"
    parser.add_argument("model", nargs="?", default="tandem-small", metavar="MODEL", help=about)
    about = "the usual types of weights and KV, whatever the model; others are compiled when a worker needs them"
    parser.add_argument("--all", action="store_true", help=about)
    group = parser.add_argument_group("as for tandem up")
    declared = {field.name: field for field in fields(DecodeSettings)}
    for name in SETTINGS:
        parser.add_setting(declared[name], group=group)
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def run(args: argparse.Namespace) -> int:
    from tandem_cli.model_files.compile_model import compile_model

    return compile_model(args)
