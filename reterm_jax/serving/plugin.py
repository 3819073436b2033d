"""vLLM's side of the bridge: `--load-format orbax` reads a published directory.

Found by vLLM through the entry point `reterm_orbax`, in every process that it starts, once this package is installed
beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from reterm_jax.serving.published import PublishedError, read_tensors

LOAD_FORMAT = "orbax"


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; may be called more than once."""
    from vllm.model_executor import model_loader

    if LOAD_FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        model_loader.register_model_loader(LOAD_FORMAT)(_loader_class())


def torch_tensors(directory: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a published directory on the host, one after another. Raises PublishedError."""
    for name, value in read_tensors(directory):
        yield name, _torch(value)


def check_all_loaded(model: nn.Module, loaded: set[str] | None, directory: str) -> None:
    """Raises PublishedError where parameters of the model were given no value: vLLM itself only warns."""
    if loaded is None:
        raise PublishedError(
            f"{directory}: {type(model).__name__} does not tell which weights it loaded; not supported"
        )
    missing = sorted({name for name, _ in model.named_parameters()} - loaded)
    if missing:
        raise PublishedError(
            f"{directory}: nothing for {', '.join(missing[:8])} ({len(missing)} parameters); serve the model that the "
            "trainer publishes"
        )


def _torch(value: np.ndarray) -> torch.Tensor:
    # numpy knows bfloat16 only through ml_dtypes, which torch does not take.
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def _loader_class() -> type:
    from vllm.config import ModelConfig
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class OrbaxModelLoader(BaseModelLoader):
        """Loads published directories. A model's directory is a path; nothing is downloaded."""

        def download_model(self, model_config: ModelConfig) -> None:
            pass

        def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
            return torch_tensors(model_config.model)

        def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
            loaded = model.load_weights(self.get_all_weights(model_config, model))
            check_all_loaded(model, loaded, model_config.model)

    return OrbaxModelLoader
