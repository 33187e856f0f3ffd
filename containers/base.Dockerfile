# Every task of the pipeline on CPUs. Build from the repository's root.
FROM python:3.11.14-slim-bookworm
# KubeRay's probes of a pod run wget.
RUN apt-get update && apt-get install --yes --no-install-recommends tesseract-ocr wget && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/ebbflow
COPY containers/uv.txt containers/
RUN pip install --no-cache-dir --requirement containers/uv.txt
# What the code needs comes before the code: changing a line of it leaves this layer alone.
COPY pyproject.toml constraints.txt ./
# Where only PyPI or a mirror can be reached: --build-arg TORCH_BACKEND=, which installs CUDA's torch.
ARG TORCH_BACKEND="--torch-backend cpu"
RUN uv pip install --system --no-cache $TORCH_BACKEND --constraints constraints.txt --requirements pyproject.toml --extra all
COPY README.md LICENSE NOTICE ./
COPY datasets datasets
COPY ebbflow ebbflow
COPY tasks tasks
COPY workflows workflows
RUN uv pip install --system --no-cache --no-deps --build-constraints constraints.txt --editable .
# It runs as any user, also one without a name, on a root filesystem that cannot be written: only /tmp can. Own modules lie next to ebbflow.
ENV HOME=/tmp USER=ebbflow PYTHONPATH=/opt/ebbflow EBBFLOW_LOCAL_CACHE=/tmp/flyte-cache PYTHONDONTWRITEBYTECODE=1 MLFLOW_DISABLE_TELEMETRY=true
USER 1000
