"""The ONNX backend: writing rank files, and running them with ONNX Runtime.

ONNX Runtime's official Linux builds from 1.29 on report sessions (file and graph names, hashes of
weights) over the network unless told otherwise before the first import. What a user compiles is
nobody else's business, so that is off here; `ORT_DISABLE_TELEMETRY=0` is respected.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
