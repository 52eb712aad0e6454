"""Turn the weightless ResNet-50 graph of the onnx package into one that computes.

Run as a program with the path to write, by a Python that has `onnx`. The graph that
the package ships has constant weights (every output is the same number) and a batch
fixed at one. This keeps its nodes and tensor names, draws seeded random weights and
leaves the batch open, so that outputs depend on the picture and rows of a batch do
not depend on each other. The weights are not trained: classes have no meaning.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_SEED = 50
_SOURCE = "backend/test/data/light/light_resnet50.onnx"


def rewritten(source: Any) -> Any:
    """A new model with the nodes of `source`, random weights and an open batch."""
    graph = source.graph
    nodes = [node for node in graph.node if node.op_type != "ConstantOfShape"]
    shapes = _parameter_shapes(graph)
    random = np.random.default_rng(_SEED)
    weights: dict[str, Any] = {}
    for node in nodes:
        weights.update(_weights(node, shapes, random))
    result = helper.make_graph(
        nodes,
        "resnet50",
        [_open_batch(graph.input[0])],
        [_open_batch(graph.output[0])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = helper.make_opsetid("", source.opset_import[0].version)
    # From version 4 of the format on, weights need not be declared as inputs.
    return helper.make_model(result, opset_imports=[opset], ir_version=4)


def _parameter_shapes(graph: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights, of those stored and those made by ConstantOfShape."""
    stored = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    shapes = {name: array.shape for name, array in stored.items()}
    for node in graph.node:
        if node.op_type == "ConstantOfShape":
            shapes[node.output[0]] = tuple(int(n) for n in stored[node.input[0]])
    return shapes


def _weights(
    node: Any, shapes: dict[str, tuple[int, ...]], random: np.random.Generator
) -> dict[str, Any]:
    """The weights that one node reads, by name."""
    names = list(node.input[1:])
    if node.op_type == "Conv":
        return {names[0]: _filters(shapes[names[0]], random, gain=2.0)}
    if node.op_type == "Gemm":
        bias = np.zeros(shapes[names[1]], np.float32)
        return {names[0]: _filters(shapes[names[0]], random, gain=8.0), names[1]: bias}
    if node.op_type == "BatchNormalization":
        size = shapes[names[0]]
        scale, mean, variance = np.ones(size), np.zeros(size), np.ones(size)
        offset = 0.1 * random.standard_normal(size)
        values = (scale, offset, mean, variance)
        return {n: v.astype(np.float32) for n, v in zip(names, values, strict=True)}
    if node.op_type == "Reshape":
        # Zero keeps the size of the batch, where the original says one.
        return {names[0]: np.array([0, -1], np.int64)}
    return {}


def _filters(
    shape: tuple[int, ...], random: np.random.Generator, *, gain: float
) -> Any:
    """Random filters that keep the spread of what they read, each of sum zero.

    Activations after a ReLU share a large positive mean. Filters of sum zero cancel
    it; with plain random ones it drowns the picture and every output is the same.
    """
    fan_in = int(np.prod(shape[1:]))
    filters = random.standard_normal((shape[0], fan_in)) * np.sqrt(gain / fan_in)
    filters -= filters.mean(axis=1, keepdims=True)
    return filters.reshape(shape).astype(np.float32)


def _open_batch(tensor: Any) -> Any:
    """The description of an input or output with a batch of any size."""
    sizes = [dim.dim_value for dim in tensor.type.tensor_type.shape.dim]
    return helper.make_tensor_value_info(
        tensor.name, TensorProto.FLOAT, ["batch", *sizes[1:]]
    )


def main(target: Path) -> None:
    """Write the rewritten network to `target`."""
    source = onnx.load(Path(onnx.__file__).parent / _SOURCE)
    network = rewritten(source)
    onnx.checker.check_model(network)
    onnx.save(network, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
