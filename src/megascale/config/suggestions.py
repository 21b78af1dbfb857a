"""Suggestions for unknown keys: names in other trainers, keys of other sections, and spelling mistakes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from megascale.config.tree import Config

# Names in other programs by key: torchtitan, Megatron-LM, Hugging Face, Lightning, DeepSpeed, nanoGPT and papers.
_ALIASES: dict[str, str] = {
    "model.layers": "n_layer n_layers num_layers num_hidden_layers depth",
    "model.hidden": "hidden_size hidden_dim d_model dim embed_dim n_embd n_embed embedding_size width",
    "model.heads": "n_head n_heads num_heads num_attention_heads attention_heads",
    "model.kv_heads": "n_kv_heads num_kv_heads num_key_value_heads num_query_groups gqa",
    "model.head_dim": "head_size kv_channels",
    "model.ffn_hidden": "intermediate_size ffn_hidden_size ffn_dim ffn hidden_ff d_ff mlp_dim mlp_hidden",
    "model.vocab_size": "vocab vocabulary vocabulary_size n_vocab padded_vocab_size",
    "model.sequence_length": "seq_len seq_length seqlen seq sequence_len max_seq_len max_seq_length max_length "
    "context context_length context_len context_size block_size n_ctx max_position_embeddings",
    "model.rotary_base": "rope_theta rope_base rotary_theta theta",
    "model.positions": "position_embedding_type positional_embedding rope",
    "model.norm": "normalization norm_type",
    "model.norm_eps": "layer_norm_eps layernorm_epsilon rms_norm_eps",
    "model.activation": "activation_function hidden_act act_fn",
    "model.tied_embeddings": "tie_embeddings tie_word_embeddings weight_tying untie_embeddings_and_output_weights",
    "model.layer_pattern": "window_pattern layer_types",
    "model.window": "sliding_window attention_window",
    "model.dropout": "dropout_rate hidden_dropout attention_dropout resid_pdrop attn_pdrop",
    "model.init_std": "initializer_range init_method_std",
    "checkpoint.imported": "from from_pretrained pretrained_model_name_or_path initial_load_path",
    "model.preset": "model model_name config_name flavor size arch architecture",
    "data.train": "dataset datasets train_data training_data train_file train_files data_path dataset_path data_prefix "
    "train_data_path",
    "data.valid": "val validation valid_data val_data validation_data valid_file validation_file eval_file held_out "
    "heldout valid_data_path",
    "data.tokenizer": "tokenizer_path tokenizer_model tokenizer_name tokenizer_file",
    "data.weights": "blend mixture proportions sampling_weights",
    "data.loader_threads": "num_workers dataloader_workers dataloader_num_workers",
    "data.text_key": "text_column text_field json_keys",
    "optimizer.name": "optim optimizer optimizer_type",
    "optimizer.beta1": "betas adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "epsilon adam_eps adam_epsilon",
    "optimizer.weight_decay": "wd l2",
    "optimizer.clip": "grad_clip clip_grad clip_grad_norm gradient_clip_val gradient_clipping max_grad_norm max_norm",
    "lr.peak": "lr learning_rate learningrate max_lr peak_lr base_lr",
    "lr.min": "min_lr lr_min end_lr final_lr",
    "lr.warmup_steps": "warmup warmup_iters warmup_ratio warmup_samples lr_warmup "
    "num_warmup_steps lr_warmup_steps lr_warmup_iters",
    "lr.schedule": "scheduler lr_scheduler lr_scheduler_type lr_decay lr_decay_style lr_schedule",
    "lr.decay_steps": "lr_decay_iters lr_decay_steps",
    "lr.decay_fraction": "decay_ratio warmdown_ratio lr_wsd_decay_iters cooldown_fraction",
    "lr.decay_shape": "decay_type lr_wsd_decay_style",
    "parallel.tensor": "tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree "
    "tensor_model_parallel_size",
    "parallel.pipeline": "pp pp_size pp_degree pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
    "pipeline_model_parallel_size stages num_stages",
    "parallel.virtual_stages": "vpp vp interleave virtual_pipeline virtual_pipeline_model_parallel_size",
    "parallel.context": "cp cp_size cp_degree context_parallel context_parallel_size context_parallel_degree",
    "parallel.expert": "ep ep_size ep_degree expert_parallel expert_parallel_size expert_parallel_degree "
    "expert_model_parallel_size",
    "parallel.replicate": "hsdp dp_replicate data_parallel_replicate_degree",
    "parallel.data": "dp ddp dp_size dp_degree data_parallel data_parallel_size data_parallel_degree replicas",
    "parallel.zero": "zero_stage zero1 zero2 zero3 fsdp fsdp2 fully_shard dp_shard "
    "data_parallel_shard_degree sharding_strategy use_distributed_optimizer distributed_optimizer",
    "parallel.schedule": "pipeline_schedule pipeline_parallel_schedule",
    "parallel.recompute": "activation_checkpointing activation_checkpoint gradient_checkpointing checkpointing ac "
    "recompute_granularity recompute_activations",
    "parallel.bucket_elements": "bucket_size bucket_cap_mb ddp_bucket_size",
    "parallel.gpus_per_host": "nproc_per_node gpus_per_node devices_per_node",
    "train.steps": "max_steps num_steps n_steps total_steps training_steps train_steps iters max_iters train_iters "
    "iterations epochs num_epochs max_epochs num_train_epochs",
    "train.global_batch": "bs batch batch_size gbs global_bs global_batch_size total_batch_size train_batch_size "
    "gradient_accumulation gradient_accumulation_steps grad_accum accumulate_grad_batches",
    "train.micro_batch": "bs batch batch_size mbs micro_bs micro_batch_size micro_batchsize local_batch_size "
    "device_batch_size per_device_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu",
    "train.precision": "dtype bf16 fp16 fp32 amp mixed_precision torch_dtype params_dtype param_dtype",
    "train.linear_precision": "fp8 float8 quantization",
    "train.seed": "random_seed manual_seed",
    "train.name": "run_name exp_name experiment experiment_name",
    "train.runs": "output_dir out_dir save_dir output_folder dump_folder",
    "train.log_interval": "log_every log_every_n_steps log_steps logging_steps log_freq",
    "train.eval_interval": "eval_every eval_steps evaluation_interval val_interval val_check_interval",
    "train.eval_samples": "eval_iters eval_batches limit_val_batches",
    "train.device": "accelerator",
    "train.lora": "peft adapter adapters use_lora",
    "kernels.mode": "compile torch_compile use_compile inductor",
    "kernels.graphs": "cuda_graph cuda_graphs cudagraphs enable_cuda_graph",
    "kernels.deterministic": "deterministic_mode use_deterministic_algorithms",
    "kernels.attention": "attn_implementation attn_backend flash_attention use_flash_attn sdpa",
    "train.threads": "num_threads omp_num_threads",
    "checkpoint.interval": "save_every save_interval save_steps save_freq ckpt_interval checkpoint_interval",
    "checkpoint.keep": "save_total_limit keep_last keep_latest_k max_to_keep",
    "checkpoint.resume": "load resume_from resume_from_checkpoint auto_resume",
    "checkpoint.location": "ckpt_dir ckpt_path checkpoint_dir checkpoint_folder checkpoint_path",
    "checkpoint.background": "async_save async_mode async_checkpoint",
    "observe.wandb": "wandb_project use_wandb",
    "observe.tensorboard": "tensorboard_dir enable_tensorboard",
    "resilience.nodes": "nnodes num_nodes",
    "rendezvous.group_timeout": "nccl_timeout distributed_timeout distributed_timeout_minutes",
}
_SECTION_ALIASES = {
    "train": "training trainer job",
    "lr": "scheduler lr_scheduler learning_rate",
    "optimizer": "optim",
    "parallel": "parallelism",
    "data": "dataset dataloader",
    "checkpoint": "ckpt",
    "observe": "logging metrics log",
}
# Least similarity (difflib, 0 to 1) of a suggestion. A search over all sections has more chance hits and needs more.
_MIN_SIMILARITY_IN_SECTION = 0.6
_MIN_SIMILARITY_IN_ALL = 0.8


@cache
def _map_aliases_to_keys() -> Mapping[str, list[str]]:
    """Return our keys by the name that they have in other trainers; several keys may have the same."""
    keys: dict[str, list[str]] = {}
    for key, aliases in _ALIASES.items():
        for alias in aliases.split():
            keys.setdefault(alias, []).append(key)
    return keys


def is_alias(name: str) -> bool:
    """Return whether a setting has this name in other trainers."""
    return name in _map_aliases_to_keys()


def list_keys(section: str) -> list[str]:
    """Return the keys of a section, none for an unknown section."""
    field = Config.model_fields.get(section)
    if field is not None:
        return list(getattr(field.annotation, "model_fields", {}))
    return []


def find_field(section: str, key: str) -> FieldInfo | None:
    """Return the pydantic field of a setting, or None if the setting does not exist."""
    field = Config.model_fields.get(section)
    if field is not None:
        return getattr(field.annotation, "model_fields", {}).get(key)
    return None


def suggest_keys(name: str, section: str = "") -> list[str]:
    """Return the settings, as section.key, that the user most likely means by an unknown key.

    Args:
        name: the unknown key.
        section: the section in which the user wrote it; "" if unknown.
    """
    name = name.lower().replace("-", "_")
    section_keys = list_keys(section)
    if is_alias(name):
        keys = _map_aliases_to_keys()[name]
        # Prefer keys of the section that the user wrote.
        names = [key.partition(".")[2] for key in keys]
        suggestions = [f"{section}.{name}" for name in names if name in section_keys]
        return suggestions or keys
    settings: dict[str, list[str]] = {}
    for section_name in Config.model_fields:
        for key in list_keys(section_name):
            settings.setdefault(key, []).append(f"{section_name}.{key}")
    if name in settings:
        return settings[name]
    matches = difflib.get_close_matches(name, section_keys, n=1, cutoff=_MIN_SIMILARITY_IN_SECTION)
    if matches:
        return [f"{section}.{matches[0]}"]
    candidates = settings | dict(_map_aliases_to_keys())
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=_MIN_SIMILARITY_IN_ALL)
    if matches:
        return candidates[matches[0]]
    return []


def suggest_for_section(name: str, table: Any) -> list[str]:
    """Return suggestions for an unknown section: settings that resemble the keys in its `table`, or else a section."""
    aliases = {alias: section for section, names in _SECTION_ALIASES.items() for alias in names.split()}
    matches = difflib.get_close_matches(name, list(Config.model_fields), n=1, cutoff=_MIN_SIMILARITY_IN_SECTION)
    if name in aliases:
        section = aliases[name]
    elif matches:
        section = matches[0]
    else:
        section = ""
    suggestions: list[str] = []
    unknown_keys = list(table) if isinstance(table, Mapping) else []
    for key in unknown_keys:
        if key in list_keys(section):
            suggestions.append(f"{section}.{key}")
        else:
            suggestions += suggest_keys(str(key), section)
    if not suggestions and section:
        return [f"[{section}]"]
    return list(dict.fromkeys(suggestions))


def format_question(names: list[str]) -> str:
    """Return the suggestions as a question, empty if there are none."""
    if names:
        return f"did you mean {' or '.join(names[:3])}?"
    return ""
