"""Run a network with onnxruntime and nothing in between, to compare a server with.

Run as a program with three paths: the network, an .npy file to read its input from,
and an .npy file to write its output to.
"""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime


def main(network: str, given: str, found: str) -> None:
    """One inference on one thread, as the server's model does it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        network, options, providers=["CPUExecutionProvider"]
    )
    (name,) = [item.name for item in session.get_inputs()]
    (output,) = session.run(None, {name: np.load(given)})
    np.save(found, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
