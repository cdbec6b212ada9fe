"""`tandem convert`: writes a checkpoint in PyTorch's own format, or a model in GGUF, as safetensors."""

import argparse
from pathlib import Path

from checkpoint.gguf.file import is_gguf
from mesh.domain.errors import ConfigurationError
from tandem_cli.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    about = (
        "folder of a model with pytorch_model.bin, or of a LoRA adapter with adapter_model.bin; "
        "or a file of llama.cpp, MODEL.gguf"
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help=about)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write, which must not exist")
    about = "for a file in GGUF: take the tokenizer of this checkpoint folder, not the file's"
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help=about)
    about = "for a file in GGUF: write all matrices as bf16, in place of the file's own 2 to 8 bits"
    parser.add_argument("--dequantize", action="store_true", help=about)


def run(args: argparse.Namespace) -> int:
    if is_gguf(args.source):
        from tandem_cli.model_files.convert_gguf import convert_gguf

        return convert_gguf(args.source, args.out, args.tokenizer, dequantizes=args.dequantize)
    if args.tokenizer is not None:
        raise ConfigurationError("--tokenizer is for files in GGUF: a folder has its own")
    if args.dequantize:
        raise ConfigurationError("--dequantize is for files in GGUF")
    from tandem_cli.model_files.convert_folder import convert_folder

    return convert_folder(args.source, args.out)
