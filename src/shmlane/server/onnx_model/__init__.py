"""Programs that other interpreters run: nothing here is imported by the package.

`model.py` runs inside a Triton server, `rewrite_resnet50.py` where `onnx` is
installed, `reference.py` and `characters.py` where `onnxruntime` is.
"""
