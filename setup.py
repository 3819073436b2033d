"""Package definition. Lower bounds are the versions that the test suite passed with."""

import pathlib

import setuptools

_VERSION = "0.1.0"

setuptools.setup(
    name="reterm_jax",
    version=_VERSION,
    description="Train terminal agents in JAX to recover from their own failures (ReTerm).",
    long_description=(pathlib.Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=setuptools.find_packages(include=["reterm_jax", "reterm_jax.*"]),
    package_data={"reterm_jax.evaluation": ["templates/*"]},
    python_requires=">=3.11",
    install_requires=[
        "absl-py>=2.5",
        "flax>=0.12.8",
        "httpx2>=2.16",
        "jax>=0.10.2",
        "jinja2>=3.1",
        "matplotlib>=3.11",
        "ml-collections>=1.1",
        "ml-dtypes>=0.5",
        "numpy>=2.4",
        "optax>=0.2.8",
        "orjson>=3.11",
        "orbax-checkpoint>=0.12.8",
        "prometheus-client>=0.26",
        "safetensors>=0.8",
        "scipy>=1.17",
        "tensorboardX>=2.6.5",
        "tensorstore>=0.1.86",
        "tokenizers>=0.23",
        "transformers>=5.24",
    ],
    extras_require={
        "docker": ["docker>=7.1", "pyyaml>=6.0"],
        "gpu": ["jax[cuda13]>=0.10.2"],
        "tpu": ["jax[tpu]>=0.10.2"],
        # Data sets in that form, see recovery/dataset.py.
        "parquet": ["pyarrow>=26"],
        # torch is the oracle of the parity tests only; nothing in the package imports it.
        "dev": [
            *("docker>=7.1", "pyarrow>=26", "pyyaml>=6.0"),
            *("pytest>=9.0", "pytest-xdist>=3.8", "ruff>=0.17", "torch==2.13.0"),
        ],
    },
    entry_points={
        "console_scripts": [
            "reterm-rollout = reterm_jax.cli.rollout:run",
            "reterm-train = reterm_jax.cli.train:run",
            "reterm-evaluate = reterm_jax.cli.evaluate:run",
            "reterm-compare = reterm_jax.cli.compare:run",
            "reterm-reap = reterm_jax.cli.reap:run",
            "reterm-export = reterm_jax.cli.export:run",
            "reterm-view = reterm_jax.cli.view:run",
        ],
        # What vLLM finds where this package is installed beside it (third_party/vllm).
        "vllm.general_plugins": ["reterm_orbax = reterm_jax.serving.plugin:register"],
    },
)
