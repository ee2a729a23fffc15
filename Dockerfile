# Plans the README's example: docker build -t partitioner . && docker run --rm partitioner
# It was never built: no Docker was at hand where it was written.
FROM python:3.11-slim

WORKDIR /src
COPY . .
# The CPU build of PyTorch is enough to plan, to run and to verify.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt '.[report]'

WORKDIR /work
CMD ["sh", "-c", "python -m partitioner.examples llama llama.onnx --hidden 512 --seq 2048 && partition llama.onnx --devices 4 --objective latency && partition verify llama.partition"]
