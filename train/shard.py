"""A base that one GPU cannot hold: its layers in shares, one for each rank (FSDP2), the adapter whole at each.

Every rank keeps a part of each layer's weights; for the moment in which a layer is computed, all of them send their
parts to each other. That is right under three conditions, all held here and tested:

- LoRA's weights are added after the base was sharded: they are whole, and their gradients are summed as ever.
- The last layer keeps its weights from forward to backward. The shared prefix's keys and values leave it through a
  cache, where nothing would fetch its weights again.
- All ranks call the trunk equally often and in the same order, since the parts are exchanged by order alone: a rank
  that is one call ahead would silently get half of one layer and half of another. So micro-batches are planned for
  all ranks (`update.py`), equal prompts are not merged, and `Lockstep` compares before every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import distributed, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from msgrpo.errors import ModelError, RunError, UsageError


class Lockstep:
    """Compares, before each step that exchanges weights, that every rank is about to do the same."""

    def __init__(self) -> None:
        self._group = distributed.new_group(backend="gloo")  # of its own: it must not meet an exchange of weights
        self._steps = 0

    def at(self, what: str) -> None:
        """Raise RunError unless all ranks are at their n-th step, and it is this one."""
        self._steps += 1
        mine, all_of_them = f"{what} as step {self._steps}", [""] * distributed.get_world_size()
        distributed.all_gather_object(all_of_them, mine, group=self._group)
        if len(set(all_of_them)) > 1:
            listed = "; ".join(f"rank {rank}: {step}" for rank, step in enumerate(all_of_them))
            raise RunError(
                f"the ranks of a sharded base do not do the same ({listed}): the gradient would be wrong",
                fix="the last checkpoint is kept; this is a fault of the program, so please report it",
            )


def layers_of(trunk: Any) -> nn.ModuleList:
    """The decoder layers."""
    count = trunk.config.num_hidden_layers
    lists = [m for m in trunk.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise ModelError(f"{trunk.config.model_type} has no list of {count} layers: shard=true cannot share them out")
    return lists[0]


def shard(model: Any) -> None:
    """Share the base's layers and trunk out among the ranks; the head stays whole. LoRA comes afterwards."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        raise UsageError(
            "shard=true shares the base out among processes, and there is one",
            fix="--ray auto --set trainers=2, or torchrun --nproc-per-node 2 -m msgrpo.cli train …",
        )
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (distributed.get_world_size(),))
    model.requires_grad_(False)  # before: a parameter that is registered later stays as it is
    trunk = model.base_model
    for layer in layers_of(trunk):
        fully_shard(layer, mesh=mesh)
    fully_shard(trunk, mesh=mesh)
    last: Any = layers_of(trunk)[-1]
    last.set_reshard_after_backward(False)


def lockstep(model: Any) -> Lockstep:
    """Compare before every call of the trunk from now on, and before its weights are fetched."""
    steps = Lockstep()

    def before(module: nn.Module, given: Any) -> None:
        steps.at("a forward pass")

    model.base_model.register_forward_pre_hook(before, prepend=True)
    return steps


def load_sharded(make: Callable[[], Any], folder: str, device: torch.device) -> Any:
    """The model that `make` makes, its weights read from safetensors straight into each rank's shares.

    The base is never whole anywhere: its parameters begin without memory. Where the head is tied to the embeddings,
    which are shared out, it is a whole copy of them.
    """
    with init_empty_weights(include_buffers=False):
        model = make()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    head, tied = model.get_output_embeddings(), model.config.tie_word_embeddings
    if tied:
        head.weight = nn.Parameter(torch.empty_like(head.weight))
    shard(model)
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner)._buffers[own] = buffer.to(device)
    state = model.state_dict()
    if tied:
        del state[next(name for name, module in model.named_modules() if module is head) + ".weight"]
    load(state, storage_reader=HuggingFaceStorageReader(folder))
    if tied:
        embeddings: Any = model.get_input_embeddings().weight
        head.weight.copy_(embeddings.full_tensor())
    return model
