# Plans the README's example: docker build -t partitioner . && docker run --rm partitioner
# It was never built: no Docker was at hand where it was written.
FROM python:3.11-slim

WORKDIR /src
COPY . .
# The CPU build of PyTorch is enough to plan, to run and to verify.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt '.[report]'

WORKDIR /work
CMD ["sh", "-c", "python -m partitioner.examples resnet50 resnet50.onnx && partition resnet50.onnx --devices 4 && partition verify resnet50.partition"]
