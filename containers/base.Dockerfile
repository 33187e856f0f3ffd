# Every task of the pipeline on CPUs. Build from the repository's root.
FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d
# KubeRay's probes of a pod run wget.
RUN apt-get update && apt-get install --yes --no-install-recommends tesseract-ocr wget && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/ebbflow
COPY containers/uv.txt containers/
RUN pip install --no-cache-dir --require-hashes --requirement containers/uv.txt
# What the code needs comes before the code: changing a line of it leaves this layer alone.
# No pod may write bytecode, so the image has it: without it each start compiles torch and diffusers, half of their import.
ENV UV_COMPILE_BYTECODE=1
COPY pyproject.toml constraints.txt ./
# Where only PyPI or a mirror can be reached: --build-arg TORCH_BACKEND=, which installs CUDA's torch.
ARG TORCH_BACKEND="--torch-backend cpu"
RUN uv pip install --system --no-cache $TORCH_BACKEND --constraints constraints.txt --requirements pyproject.toml --extra all
COPY README.md LICENSE NOTICE ./
COPY datasets datasets
COPY ebbflow ebbflow
COPY tasks tasks
COPY workflows workflows
RUN uv pip install --system --no-cache --no-deps --build-constraints constraints.txt \
    --config-settings editable_mode=compat --editable .
# The editable install compiles nothing of our own code.
RUN python3 -m compileall -q ebbflow tasks workflows
# The kernel keeps SIGTERM from a container's first process until that has a handler: from its start, and not from its first import of ours.
COPY containers/environment/first_process.pth /usr/local/lib/python3.11/site-packages/
# It runs as any user, also one without a name, on a root filesystem that cannot be written: only /tmp can. Own modules lie next to
# ebbflow. No PYTHONPATH: sources that Flyte uploads come before those of the image.
ENV HOME=/tmp USER=ebbflow EBBFLOW_LOCAL_CACHE=/tmp/flyte-cache PYTHONDONTWRITEBYTECODE=1 MLFLOW_DISABLE_TELEMETRY=true
# The commit that the image was built from, for the tags of runs and versions: pods have no repository. Last, as it changes with each build.
ARG GIT_COMMIT=""
ENV EBBFLOW_GIT_COMMIT=$GIT_COMMIT
USER 1000
