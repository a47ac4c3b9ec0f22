"""Tiny random models of the transformers families that people train, with every type of layer of each family,
for tests/test_families.py and tests/benchmarks/families.py."""

import torch
import transformers
from transformers.models.auto.tokenization_auto import MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS

from common.data import tiny

MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.clear()  # else Qwen2 reads the tiny world's tokenizer as its own
VOCABULARY = len(tiny.tokenizer())
COMMON = {  # of these, a family takes those that its config knows
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "ffn_dim": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "initializer_range": 0.15, "init_std": 0.15, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16, "intermediate_size_mlp": 48, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "state_size": 8, "mamba_d_state": 8,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 4, "chunk_size": 4,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "vocab_size_per_layer_input": VOCABULARY, "query_pre_attn_scalar": 8,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
FULL, LOCAL, LINEAR = "full_attention", "sliding_attention", "linear_attention"
WINDOW = {"sliding_window": 8}  # tokens: fewer than a prompt of the stages has
BY_LAYER = {"layer_types": [LOCAL, FULL] * 2, "num_hidden_layers": 4, **WINDOW}
HYBRID = {"layer_types": [LINEAR, FULL] * 2, "num_hidden_layers": 4}
CONV = {"layer_types": ["conv", FULL] * 2, "num_hidden_layers": 4}
CHUNKS = {"attention_chunk_size": 8, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}
MLA = {"num_key_value_heads": 4}  # keys of low rank, every head its own
GEMMA_3N = {**BY_LAYER, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
GEMMA_4 = {**GEMMA_3N, "global_head_dim": 16}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
TOWER = {  # of images or sound, which no text meets
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_blocks": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14,
    "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "depth": 1,
    "num_heads": 2, "out_hidden_size": 32, "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16,
    "nemo_conv_channels": 16,
}  # fmt: skip
FAMILIES = {  # name -> model type; or type and what its config has beyond COMMON
    # full attention
    "Llama 3": "llama", "Mistral": ("mistral", {"sliding_window": None}), "Ministral 3": "ministral3",
    "Mixtral": ("mixtral", {"sliding_window": None}), "Qwen2": "qwen2", "Qwen2 MoE": "qwen2_moe",
    "Qwen3": "qwen3", "Qwen3 MoE": "qwen3_moe", "Gemma": "gemma", "GPT-2": "gpt2",
    "GPT-J": ("gptj", {"rotary_dim": 4}), "GPT-NeoX": "gpt_neox", "GPT-BigCode": "gpt_bigcode",
    "OLMo": "olmo", "OLMo 2": "olmo2", "OLMoE": "olmoe", "Phi": "phi",
    "Phi-3": ("phi3", {"sliding_window": None}), "PhiMoE": "phimoe", "GLM-4 9B": "glm", "GLM-4": "glm4",
    "GLM-4 MoE": "glm4_moe", "ERNIE 4.5": "ernie4_5", "Apertus": "apertus", "Arcee": "arcee",
    "SmolLM3": "smollm3", "StableLM": "stablelm", "Starcoder2": ("starcoder2", {"sliding_window": None}),
    "Nemotron": "nemotron", "Helium": "helium", "Seed-OSS": "seed_oss", "Hunyuan": "hunyuan_v1_dense",
    "MiniMax M2": "minimax_m2", "Hunyuan MoE": ("hunyuan_v1_moe", {"moe_topk": 2}),
    "dots1": ("dots1", {"n_shared_experts": 1}), "DeepSeek V2": ("deepseek_v2", MLA),
    "DeepSeek V3": ("deepseek_v3", MLA), "OPT": "opt",
    "Falcon": ("falcon", {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "BitNet": "bitnet", "Persimmon": "persimmon", "JetMoE": "jetmoe", "Doge": "doge",
    "DiffLlama": "diffllama", "XGLM": "xglm", "OpenAI GPT": "openai-gpt",
    "BERT": ("bert", {"is_decoder": True}),
    "ERNIE 4.5 MoE": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}),
    "DBRX": ("dbrx", {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    }),
    "Phi-3 (long)": ("phi3", {
        "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64},
        "original_max_position_embeddings": 64, "partial_rotary_factor": 1.0,
    }),
    # ALiBi
    "BLOOM": "bloom", "MPT": ("mpt", {"max_seq_len": 128}), "Falcon (ALiBi)": ("falcon", {"alibi": True}),
    # windows, in all layers or some; sinks; chunks
    "Mistral (window)": ("mistral", WINDOW), "Mixtral (window)": ("mixtral", WINDOW),
    "OLMo 3": ("olmo3", BY_LAYER), "Phi-3 (window)": ("phi3", WINDOW),
    "Starcoder2 (window)": ("starcoder2", WINDOW), "gpt-oss": ("gpt_oss", BY_LAYER),
    "Qwen2 (window)": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    "Ministral": ("ministral", BY_LAYER), "EXAONE 4": ("exaone4", BY_LAYER),
    "Gemma 3": ("gemma3_text", BY_LAYER),
    "Gemma 3n": ("gemma3n_text", {
        **GEMMA_3N, "laurel_rank": 4, "altup_num_inputs": 2, "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    }),
    "Gemma 4": ("gemma4_text", GEMMA_4), "MiMo V2 Flash": ("mimo_v2_flash", BY_LAYER),
    "Llama 4": ("llama4_text", CHUNKS),
    "Gemma 4 MoE": ("gemma4_text", {
        **GEMMA_4, "num_kv_shared_layers": 0, "enable_moe_block": True, "top_k_experts": 2,
        "hidden_size_per_layer_input": 0,
    }),
    "GPT-Neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "ModernBERT decoder": ("modernbert-decoder", {**BY_LAYER, "local_attention": 8}),
    # scaled or capped logits
    "Gemma 2": ("gemma2", {**BY_LAYER, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    "VaultGemma": ("vaultgemma", BY_LAYER), "NanoChat": ("nanochat", {"final_logit_softcapping": 3.0}),
    "MiniCPM3": ("minicpm3", MLA), "Cohere": ("cohere", {"logit_scale": 0.3}),
    "Cohere 2": ("cohere2", {**BY_LAYER, "logit_scale": 0.3}),
    "Granite 3 MoE": ("granitemoe", {"logits_scaling": 3.0}),
    "Cohere 2 MoE": ("cohere2_moe", {**BY_LAYER, "logit_scale": 0.3, "prefix_dense_intermediate_size": 48}),
    "Granite 3": ("granite", {
        "logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
    }),
    # convolutions and recurrences, between attention or alone
    "Qwen3-Next": ("qwen3_next", HYBRID), "Qwen3.5": ("qwen3_5_text", HYBRID),
    "OLMo hybrid": ("olmo_hybrid", HYBRID), "Qwen3.5 MoE": ("qwen3_5_moe_text", HYBRID),
    "Granite 4": ("granitemoehybrid", {**HYBRID, "logits_scaling": 3.0}), "LFM2": ("lfm2", CONV),
    "LFM2 MoE": ("lfm2_moe", {**CONV, "num_dense_layers": 1}),
    "Jamba": ("jamba", {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False,
    }),
    "Bamba": ("bamba", {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "Falcon-H1": ("falcon_h1", {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
    "Zamba 2": ("zamba2", {
        "num_hidden_layers": 4, "layers_block_type": [LINEAR, "hybrid"] * 2, "n_mamba_heads": 4,
    }),
    "Nemotron-H": ("nemotron_h", {
        "layers_block_type": [LINEAR, "moe", FULL, "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 16,
        "n_groups": 1, "ssm_state_size": 8, "moe_shared_expert_intermediate_size": 16,
    }),
    "MiniMax": ("minimax", {"layer_types": [LINEAR, FULL], "block_size": 4}),
    "Kimi Linear": ("kimi_linear", {**HYBRID, **MLA, "linear_head_dim": 8, "linear_num_heads": 4}),
    "RecurrentGemma": ("recurrent_gemma", {
        "num_hidden_layers": 3, "attention_window_size": 8, "logits_soft_cap": 3.0,
    }),
    "Mamba": "mamba", "Mamba 2": ("mamba2", {"num_heads": 8, "n_groups": 1}), "Falcon Mamba": "falcon_mamba",
    "RWKV": ("rwkv", {"context_length": 128}),
    # with towers for images or sound
    "Mistral 3 (multimodal)": ("mistral3", {"text_config": "ministral3", "vision_config": "pixtral"}),
    "Gemma 3 (multimodal)": ("gemma3", {
        "text_config": ("gemma3_text", BY_LAYER), "mm_tokens_per_image": 4,
        "vision_config": "siglip_vision_model",
    }),
    "Gemma 4 (multimodal)": ("gemma4", {
        "text_config": ("gemma4_text", GEMMA_4), "vision_config": "gemma4_vision",
    }),
    "Qwen3.5 (multimodal)": ("qwen3_5", {
        "text_config": ("qwen3_5_text", HYBRID), "vision_config": "qwen3_5_vision",
    }),
    "Llama 4 (multimodal)": ("llama4", {
        "text_config": ("llama4_text", CHUNKS), "vision_config": "llama4_vision_model",
    }),
    "Phi-4 (multimodal)": ("phi4_multimodal", {
        "vision_config": TOWER, "audio_config": TOWER, "partial_rotary_factor": 1.0,
    }),
}  # fmt: skip


def config_of(family):
    """The config of a value of FAMILIES: COMMON as far as its type knows it, and what is its own."""
    kind, own = (family, {}) if isinstance(family, str) else family
    config_class = transformers.CONFIG_MAPPING[kind]
    if "text_config" in own:
        vision = {"model_type": own["vision_config"], **TOWER}
        parts = {"text_config": config_of(own["text_config"]).to_dict(), "vision_config": vision}
        return config_class(**{**own, **parts})
    default = config_class()
    known = {*default.to_dict(), *default.attribute_map}
    return config_class(**{key: value for key, value in COMMON.items() if key in known} | own)


def build(name, seed=0):
    """A causal LM of this family in evaluation mode, its weights a function of `seed`: also those that a new
    model has at 0 or 1, of norms, biases and the padding's embedding, are random."""
    config = config_of(FAMILIES[name])
    several = hasattr(config, "text_config")
    auto = transformers.AutoModelForImageTextToText if several else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight) * ((weight == 0) | (weight == 1))
    return model.eval()


def save(name, folder):
    """The model of build(name) with the tiny world's tokenizer, as save_pretrained writes them."""
    build(name).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)


def plain(folder):
    """The model of a folder, loaded by plain transformers."""
    kind = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs_of(model, prompt, response):
    """log pi of a response's tokens, by a forward of only this row."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
