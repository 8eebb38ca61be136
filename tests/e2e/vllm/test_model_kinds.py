"""Kinds of models that are served, with the answers of vLLM alone. Other kinds are refused when the
engine starts, unless the user allows them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.vllm.in_process import PlugIn
from kvtier.testing.vllm.tiny_model import HIDDEN, VOCABULARY, random_prompts
from tests.e2e.vllm.processes import VLLM
from tests.e2e.vllm.reference import Reference
from tests.e2e.vllm.remote_engine import RemoteEngine
from tests.e2e.vllm.scenarios.refusals import refusal

pytestmark = pytest.mark.vllm

TOKENS = 256
PROMPTS = random_prompts(3, TOKENS, "kinds of models")
HOST_MEMORY = {"cpu_bytes_to_use": "64MiB"}
ENGINE: dict[str, Any] = {"device_blocks": 64, "max_model_len": 512}
PLUG_INS = pytest.mark.parametrize("plug_in", ["connector", "spec"])
OF_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
STATES_ONLY = OF_TEXT | {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "time_step_rank": 8,
    "use_bias": False,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": True,
}
STATES_AND_ATTENTION = OF_TEXT | {
    "architectures": ["JambaForCausalLM"],
    "model_type": "jamba",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 8,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "use_mamba_kernels": False,
}
LATENT_ATTENTION = OF_TEXT | {
    # On a processor with AMX, vLLM packs the weights for it, and cannot pack float32.
    "torch_dtype": "bfloat16",
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    # None of its layers has experts.
    "first_k_dense_replace": 2,
    "n_routed_experts": 2,
    "moe_intermediate_size": HIDDEN,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize(
    ("config", "plug_in", "kind"),
    [
        pytest.param(STATES_ONLY, "connector", "state-space layers", id="states"),
        pytest.param(STATES_ONLY, "spec", "state-space layers", id="states, as a spec"),
        pytest.param(STATES_AND_ATTENTION, "connector", "state-space layers", id="hybrid"),
        pytest.param(LATENT_ATTENTION, "connector", "(MLA)", id="latent attention"),
        pytest.param(LATENT_ATTENTION, "spec", "(MLA)", id="latent attention, as a spec"),
    ],
)
def test_a_kind_that_no_test_has_served_is_refused(
    vllm: VLLM, tmp_path: Path, config: dict[str, Any], plug_in: PlugIn, kind: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    outcome = vllm.run(
        refusal,
        str(tmp_path),
        HOST_MEMORY,
        plug_in=plug_in,
        load_format="dummy",
        dtype=config["torch_dtype"],
        **ENGINE,
    )
    assert outcome["when"] == "at start"
    assert kind in outcome["why"]
    assert "set allow_unproven_models to true" in outcome["why"]
    assert outcome["left"] == []


@PLUG_INS
def test_a_draft_model_is_refused_unless_the_user_allows_it(
    vllm: VLLM, llama: Path, plug_in: PlugIn
) -> None:
    draft = {"method": "draft_model", "model": str(llama), "num_speculative_tokens": 2}
    engine: dict[str, Any] = {"speculative_config": draft, "plug_in": plug_in, **ENGINE}
    outcome = vllm.run(refusal, str(llama), HOST_MEMORY, **engine)
    assert outcome["when"] == "at start"
    assert 'speculative decoding with the method "draft_model"' in outcome["why"]
    assert outcome["left"] == []
    allowed = HOST_MEMORY | {"allow_unproven_models": True}
    with RemoteEngine(vllm, llama, allowed, **engine) as tried:
        warnings = [text for level, text in tried.told() if level == "WARNING"]
    [warning] = [text for text in warnings if "which no test has served" in text]
    assert 'the method "draft_model"' in warning


def test_tokens_proposed_by_ngrams_change_no_answer(vllm: VLLM, llama: Path) -> None:
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    # ngram speculation proposes repetitions, so the prompt repeats itself.
    prompts = [prompt[: TOKENS // 2] * 2 + prompt[-8:] for prompt in PROMPTS]
    engine: dict[str, Any] = {"speculative_config": ngrams, **ENGINE}
    with closing(Reference(vllm, llama, **engine)) as alone:
        with RemoteEngine(vllm, llama, HOST_MEMORY, **engine) as offloading:
            cold = offloading.generate(*prompts, max_tokens=16)
            offloading.reset_device_cache()
            warm = offloading.generate(*prompts, max_tokens=16)
        assert [answer.cached_tokens for answer in warm] == [TOKENS] * len(prompts)
        alone.check(prompts, cold, max_tokens=16)
        alone.check(prompts, warm, max_tokens=16)
