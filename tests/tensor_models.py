"""Models for every tensor that a server can have, as repositories for `TritonServer`.

Owns the identity models, one for each datatype, made from the demo model that moves
bytes and knows no types, and the Python models of `tensor_model.py`. Refuses to start
servers.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from shmlane.server import demo_models

# The names of KServe v2, each with what a model's configuration calls it.
DATATYPES = {
    "BOOL": "TYPE_BOOL",
    "UINT8": "TYPE_UINT8",
    "UINT16": "TYPE_UINT16",
    "UINT32": "TYPE_UINT32",
    "UINT64": "TYPE_UINT64",
    "INT8": "TYPE_INT8",
    "INT16": "TYPE_INT16",
    "INT32": "TYPE_INT32",
    "INT64": "TYPE_INT64",
    "FP16": "TYPE_FP16",
    "FP32": "TYPE_FP32",
    "FP64": "TYPE_FP64",
    "BF16": "TYPE_BF16",
    "BYTES": "TYPE_STRING",
}
LABELS = ("cat", "dog", "größer", "two words")

# Any, of three dimensions.
_ANY = "-1, -1, -1"
_PROGRAM = Path(__file__).with_name("tensor_model.py")
_PYTHON = """\
name: "{name}"
backend: "python"
instance_group [{{ kind: KIND_CPU count: 1 }}]
{rest}"""
_MIXED = """\
max_batch_size: 8
input [
  { name: "NUMBERS" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "WORDS" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "FLAGS" data_type: TYPE_BOOL dims: [ 2 ] optional: true }
]
output [
  { name: "TOTALS" data_type: TYPE_FP64 dims: [ 1 ] },
  { name: "BACKWARDS" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "FLIPPED" data_type: TYPE_BOOL dims: [ 2 ] }
]
"""
_REPEATED = """\
input [
  { name: "VALUES" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "COUNTS" data_type: TYPE_INT32 dims: [ -1 ] }
]
output [{ name: "REPEATED" data_type: TYPE_FP32 dims: [ -1 ] }]
"""
_SPELLED = """\
input [{ name: "LENGTHS" data_type: TYPE_INT32 dims: [ -1 ] }]
output [{ name: "TEXTS" data_type: TYPE_STRING dims: [ -1 ] }]
"""
_DOUBLED = """\
input [{ name: "VALUES" data_type: TYPE_FP32 dims: [ -1 ] }]
output [{ name: "DOUBLED" data_type: TYPE_FP32 dims: [ -1 ] }]
"""
_CLASSIFIED = """\
max_batch_size: 8
input [{ name: "FEATURES" data_type: TYPE_FP32 dims: [ 4 ] }]
output [
  { name: "SCORES" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" },
  { name: "SIZES" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }
]
"""
_RUNNING = """\
max_batch_size: 4
input [{ name: "VALUE" data_type: TYPE_INT32 dims: [ 1 ] }]
output [{ name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] }]
sequence_batching {
  oldest { max_candidate_sequences: 8 }
  control_input [
    {
      name: "START"
      control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }]
    },
    {
      name: "END"
      control [{ kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] }]
    },
    {
      name: "ID"
      control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }]
    }
  ]
}
"""
_REPORTED = """\
input [{ name: "DELAY_MS" data_type: TYPE_INT32 dims: [ 1 ] }]
output [{ name: "REPORT" data_type: TYPE_STRING dims: [ 1 ] }]
version_policy { all { } }
"""
# Apart from `reported`: such a queue now and then lets a request rest for 0.5 s.
_QUEUED = f"""\
{_REPORTED}dynamic_batching {{
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy {{
    timeout_action: REJECT
    default_timeout_microseconds: 30000000
    allow_timeout_override: true
  }}
}}
"""
_ENSEMBLE = """\
name: "ensemble"
platform: "ensemble"
input [
  { name: "VALUES" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "COUNTS" data_type: TYPE_INT32 dims: [ -1 ] }
]
output [{ name: "RESULT" data_type: TYPE_FP32 dims: [ -1 ] }]
ensemble_scheduling {
  step [
    {
      model_name: "doubled" model_version: -1
      input_map { key: "VALUES" value: "VALUES" }
      output_map { key: "DOUBLED" value: "between" }
    },
    {
      model_name: "repeated" model_version: -1
      input_map { key: "VALUES" value: "between" }
      input_map { key: "COUNTS" value: "COUNTS" }
      output_map { key: "REPEATED" value: "RESULT" }
    }
  ]
}
"""
_CONFIGS = {
    "mixed": _MIXED,
    "repeated": _REPEATED,
    "spelled": _SPELLED,
    "doubled": _DOUBLED,
    "classified": _CLASSIFIED,
    "running": _RUNNING,
    "reported": _REPORTED,
    "queued": _QUEUED,
}
# A version that is not the first, and a gap before it.
_VERSIONS = {"reported": ("1", "3")}


def write_echoes(folder: Path) -> Path:
    """A repository with `echo_<datatype>` for each, and `sink_uint8`.

    Input INPUT__0, output OUTPUT__0; three dimensions of any size. `sink_uint8` answers
    with the last element of its input, which has one dimension.
    """
    for datatype, type_ in DATATYPES.items():
        _copy_demo("identity", folder / f"echo_{datatype.lower()}", type_, _ANY, _ANY)
    _copy_demo("sink", folder / "sink_uint8", "TYPE_UINT8", "-1", "1")
    return folder


def _copy_demo(demo: str, model: Path, type_: str, dims: str, output: str) -> None:
    """A demo model for tensors of another kind: its backend takes any."""
    shutil.copytree(demo_models(demo)[0] / demo, model)
    kinds = iter((dims, output))
    config = (model / "config.pbtxt").read_text().replace("TYPE_FP32", type_)
    config = re.sub(r"dims: \[[^]]*\]", lambda _: f"dims: [ {next(kinds)} ]", config)
    config = re.sub(r'name: "[a-z]+"', f'name: "{model.name}"', config, count=1)
    (model / "config.pbtxt").write_text(re.sub(r"count: \d+", "count: 2", config))


def write_tensor_models(folder: Path) -> Path:
    """A repository with the Python models and `ensemble`, made of two of them."""
    for name, rest in _CONFIGS.items():
        for version in _VERSIONS.get(name, ("1",)):
            (folder / name / version).mkdir(parents=True)
            shutil.copy(_PROGRAM, folder / name / version / "model.py")
        config = _PYTHON.format(name=name, rest=rest)
        (folder / name / "config.pbtxt").write_text(config)
    (folder / "classified" / "labels.txt").write_text("\n".join(LABELS))
    (folder / "ensemble" / "1").mkdir(parents=True)
    (folder / "ensemble" / "config.pbtxt").write_text(_ENSEMBLE)
    return folder
