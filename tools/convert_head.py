"""Makes the safetensors of a head from the files that older heads come in: pytorch_model.bin, medusa_lm_head.pt.

    python tools/convert_head.py FOLDER OUTPUT

FOLDER has config.json and one or more *.bin, *.pt or *.pth, each a dictionary of tensors. They are read with torch's
``weights_only``, which makes tensors and nothing else: a file with other objects is refused, never run. OUTPUT is a new
folder with the same config.json and model.safetensors, which ``specdec.load_head`` reads. Names and dtypes stay as they
are.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

SUFFIXES = (".bin", ".pt", ".pth")


def convert(folder: Path, output: Path) -> int:
    """Converts the head in ``folder``. Returns the number of tensors.

    Raises:
        OSError: a file is missing, or there is an ``output`` already.
        ValueError: names the file that holds other things than tensors, or a tensor that two files have.
    """
    files = sorted(f for f in folder.iterdir() if f.suffix in SUFFIXES)
    if not files or not (folder / "config.json").is_file():
        raise OSError(f"{str(folder)!r} lacks config.json, or a file that ends in {', '.join(SUFFIXES)}")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch has no class of its own for files with more than tensors
            raise ValueError(f"{str(file)!r} is no file of tensors: {str(error).splitlines()[0]}") from error
        if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
            raise ValueError(f"{str(file)!r} is no dictionary of tensors")
        if twice := found.keys() & tensors.keys():
            raise ValueError(f"{str(file)!r} has the tensor {min(twice)!r}, as a file before it does")
        # Each with its own memory, because safetensors refuses tensors that share some.
        tensors |= {name: t.contiguous().clone() for name, t in found.items()}
    output.mkdir(parents=True)
    shutil.copyfile(folder / "config.json", output / "config.json")
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    return len(tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    try:
        count = convert(arguments.folder, arguments.output)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{count} tensors in {arguments.output / 'model.safetensors'}")


if __name__ == "__main__":
    main()
