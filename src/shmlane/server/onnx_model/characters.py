"""Write down the characters that a text recognition network can read.

Run as a program with the network and the file to write: UTF-8, one character a line, in
the order of the network's classes from 1 on. Class 0 is "no character" and not listed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnxruntime

_KEY = "character"


def main(network: str, target: str) -> None:
    """Take the characters from the network's metadata, and add the space to them."""
    session = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
    characters = session.get_modelmeta().custom_metadata_map[_KEY].splitlines()
    (classes,) = [output.shape[-1] for output in session.get_outputs()]
    # Some of them are invisible, such as the ideographic space: nothing is stripped.
    lines = [*characters, " "]
    if len(lines) != classes - 1:
        sys.exit(f"{len(lines)} characters do not fit {classes} classes")
    Path(target).write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
