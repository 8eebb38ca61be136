"""Weights for a model that vLLM has made up weights for."""

from __future__ import annotations

from typing import Any

_SHARPNESS = 2.0


def let_weights_matter(model: Any) -> None:
    """Make them as large as trained ones, the same in every engine of this shape.

    vLLM's own are so small that attention hardly changes the outcome, and an fp8 cache would round
    its contents to nothing: wrong blocks would go unnoticed.
    """
    import torch

    for number, (name, weight) in enumerate(model.named_parameters()):
        if weight.dim() == 0 or not weight.is_floating_point():
            continue
        with torch.no_grad():
            if weight.dim() == 1:
                weight.fill_(1.0 if "norm" in name else 0.0)
                continue
            generator = torch.Generator(device=weight.device)
            generator.manual_seed(number)
            # Keeps the size of what passes through; queries and keys larger, to attend sharply.
            std = 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5
            if "qkv_proj" in name:
                std *= _SHARPNESS
            weight.normal_(0.0, std, generator=generator)
