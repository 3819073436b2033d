"""What each vLLM worker can do beside vLLM's own calls: load other published weights in place.

vLLM mixes the class into its worker where the server runs with

    --worker-extension-cls reterm_jax.serving.worker.OrbaxWorker

and `/collective_rpc` then knows `load_published`.
"""

from __future__ import annotations

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from reterm_jax.serving.plugin import check_all_loaded, torch_tensors
from reterm_jax.serving.published import read_manifest


class OrbaxWorker:
    """Methods of a vLLM worker. The server should be paused, and its caches are to be reset afterwards."""

    def load_published(self, directory: str) -> dict[str, int]:
        """Overwrites the weights with those of a published directory, tensor by tensor.

        Returns the `version` and the `bytes` of what was loaded. Raises PublishedError: before anything is overwritten
        where the directory is damaged; later where it is of another model, and the server must then be restarted.
        """
        manifest = read_manifest(directory)
        runner = self.model_runner
        model, model_config = runner.get_model(), runner.vllm_config.model_config
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            loaded = model.load_weights(torch_tensors(directory))
            finalize_layerwise_reload(model, model_config)
        check_all_loaded(model, loaded, directory)
        _repack_tied_heads(model)
        # A later restart of a worker reads the same weights.
        model_config.model = directory
        return {"version": manifest.version, "bytes": manifest.nbytes}


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Has layers that share an embedding's weight make their private copies of it again.

    A reload prepares the layers that got tensors. A tied LM head gets none: its parameter is the embedding's, which is
    new, but where the platform multiplies with a packed copy (CPU) it would go on with the old one.
    """
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            layer.quant_method.process_weights_after_loading(layer)
