# Rollouts, online stages and evaluations on GPUs. Build from the repository's root.
# Two environments: the engine's pins differ from the trainer's, and tasks reach it across a process boundary.
FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d
# Triton compiles with gcc; the engine's OpenCV wants libgl1 and libglib; the rewards of an online stage want tesseract;
# KubeRay's probes of a pod run wget.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ gcc libgl1 libglib2.0-0 tesseract-ocr wget \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/ebbflow
COPY containers/uv.txt containers/vllm-omni.txt containers/
RUN pip install --no-cache-dir --require-hashes --requirement containers/uv.txt
# Compiled here: in a pod, importing the engine would otherwise take twice as long at every start.
ENV UV_COMPILE_BYTECODE=1
RUN uv venv --python /usr/local/bin/python /opt/vllm-omni \
    && uv pip install --python /opt/vllm-omni/bin/python --no-cache --require-hashes \
        --requirements containers/vllm-omni.txt --build-constraints containers/vllm-omni.txt
COPY pyproject.toml constraints.txt ./
RUN uv pip install --system --no-cache --constraints constraints.txt --requirements pyproject.toml --extra all
COPY README.md LICENSE NOTICE ./
COPY datasets datasets
COPY ebbflow ebbflow
COPY tasks tasks
COPY workflows workflows
COPY containers/vllm_omni containers/vllm_omni
RUN uv pip install --system --no-cache --no-deps --build-constraints constraints.txt \
        --config-settings editable_mode=compat --editable . \
    && uv pip install --python /opt/vllm-omni/bin/python --no-cache --no-deps --build-constraints constraints.txt --editable . \
    && uv pip install --python /opt/vllm-omni/bin/python --no-cache --no-deps --build-constraints constraints.txt \
        --editable containers/vllm_omni
# The editable install compiles nothing of our own code.
RUN python3 -m compileall -q ebbflow tasks workflows
# The kernel keeps SIGTERM from a container's first process until that has a handler: from its start, and not from its first import of ours.
COPY containers/environment/first_process.pth /usr/local/lib/python3.11/site-packages/
# It runs as any user, also one without a name, on a root filesystem that cannot be written: only /tmp can. Own modules lie next to
# ebbflow. No PYTHONPATH: sources that Flyte uploads come before those of the image.
ENV HOME=/tmp USER=ebbflow EBBFLOW_LOCAL_CACHE=/tmp/flyte-cache PYTHONDONTWRITEBYTECODE=1 MLFLOW_DISABLE_TELEMETRY=true NVIDIA_DRIVER_CAPABILITIES=compute,utility
# The commit that the image was built from, for the tags of runs and versions: pods have no repository. Last, as it changes with each build.
ARG GIT_COMMIT=""
ENV EBBFLOW_GIT_COMMIT=$GIT_COMMIT
USER 1000
