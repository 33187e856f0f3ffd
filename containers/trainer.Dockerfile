# The training of offline stages on GPUs. Build from the repository's root.
# torch's wheel brings CUDA along; the node brings the driver.
FROM python:3.11.14-slim-bookworm
# Compilers for model.compile: torch's inductor compiles C++, and Triton compiles its launchers in C.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ gcc && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/ebbflow
COPY containers/uv.txt containers/
RUN pip install --no-cache-dir --requirement containers/uv.txt
COPY pyproject.toml constraints.txt ./
RUN uv pip install --system --no-cache --constraints constraints.txt --requirements pyproject.toml --extra all
COPY README.md LICENSE NOTICE ./
COPY datasets datasets
COPY ebbflow ebbflow
COPY tasks tasks
COPY workflows workflows
RUN uv pip install --system --no-cache --no-deps --build-constraints constraints.txt --editable .
# It runs as any user, also one without a name, on a root filesystem that cannot be written: only /tmp can. Own modules lie next to ebbflow.
ENV HOME=/tmp USER=ebbflow PYTHONPATH=/opt/ebbflow EBBFLOW_LOCAL_CACHE=/tmp/flyte-cache PYTHONDONTWRITEBYTECODE=1 MLFLOW_DISABLE_TELEMETRY=true NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
