# sader on a CPU: docker build -t sader . ; docker run --rm -v "$PWD":/data sader remove /data/a.tif /data/b.tif -o /data/clear.tif
FROM python:3.12-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/sader
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# PyTorch for the CPU comes from its own index: 0.2 GB instead of 4 GB with CUDA.
RUN pip install --index-url https://download.pytorch.org/whl/cpu "torch>=2.6,<2.14"
RUN pip install ".[geo,stac,serve,cluster]"
RUN sader --version

RUN useradd --create-home sader
USER sader
WORKDIR /data
ENTRYPOINT ["sader"]
CMD ["--help"]
