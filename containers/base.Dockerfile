# Every task of the pipeline on CPUs. Build from the repository's root.
FROM python:3.11.14-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends tesseract-ocr && rm -rf /var/lib/apt/lists/*
WORKDIR /root
COPY containers/uv.txt containers/
RUN pip install --no-cache-dir --requirement containers/uv.txt
# What the code needs comes before the code: changing a line of it leaves this layer alone.
COPY pyproject.toml constraints.txt ./
RUN uv pip install --system --no-cache --torch-backend cpu --constraints constraints.txt --requirements pyproject.toml
COPY README.md LICENSE ./
COPY ebbflow ebbflow
COPY tasks tasks
COPY workflows workflows
RUN uv pip install --system --no-cache --no-deps --build-constraints constraints.txt --editable .
ENV MLFLOW_DISABLE_TELEMETRY=true
