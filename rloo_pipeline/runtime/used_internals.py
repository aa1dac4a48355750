"""Internals of other libraries that the package replaces, overrides or calls.

For each distribution and module: names, with their parameters without annotations and defaults. `guard` compares them
if a patch release of the pinned version is installed. tools/internals.csv says where each is used, and why.
"""

USED: dict[str, dict[str, dict[str, str]]] = {
    "snakemake": {
        "snakemake.caching.local": {
            "OutputFileCache.check_writeable": "(self, cachefile)",
            "OutputFileCache.fetch": "(self, job)",
            "OutputFileCache.get_outputfiles_and_cachefiles": "(self, job)",
            "OutputFileCache.set_permissions": "(self, entry)",
            "OutputFileCache.store": "(self, job)",
        },
        "snakemake.common": {"get_function_params": "(func)", "overwrite_function_params": "(func, params)"},
        "snakemake.dag": {"DAG.bfs": "(self, direction, *jobs, stop)"},
        "snakemake.io": {"remove": "(file, remove_non_empty_dir, only_local)"},
        "snakemake.jobs": {"Job.log_info": "(self, indent, printshellcmd)"},
        "snakemake.path_modifier": {"PathModifier.modify": "(self, path, property)"},
        "snakemake.persistence.file": {"FilePersistence._io_read": "(self, subject, id)"},
        "snakemake.scheduling.job_scheduler": {
            "JobScheduler.exit_gracefully": "(self, *args)",
            "JobScheduler.schedule": "(self)",
        },
    },
    "snakemake-executor-plugin-slurm": {
        "snakemake_executor_plugin_slurm": {
            "Executor._report_job_error_threadsafe": "(self, job_info, msg)",
            "Executor._report_job_submission_threadsafe": "(self, job_info)",
            "Executor._submit_array_jobs": "(self, jobs)",
            "Executor._submit_job": "(self, job)",
            "Executor.cancel": "(self)",
            "Executor.cancel_jobs": "(self, active_jobs)",
            "Executor.check_active_jobs": "(self, active_jobs)",
            "Executor.get_account_arg": "(self, job)",
            "Executor.get_partition_arg": "(self, job)",
            "Executor.get_status_command": "(self)",
            "Executor.run_array_jobs": "(self, jobs)",
            "Executor.run_job": "(self, job)",
            "Executor.run_jobs": "(self, jobs)",
            "get_submit_command": "(job, params, settings, failed_nodes, array_job)",
            "set_gres_string": "(job)",
            "validate_or_get_slurm_job_id": "(job_id, output)",
            "validate_slurm_extra": "(job)",
        }
    },
    "transformers": {
        "transformers": {
            "PreTrainedModel.get_expanded_tied_weights_keys": "(self, all_submodels)",
            "Qwen2_5_VLProcessor.get_attributes": "()",
            "Qwen3VLProcessor.get_attributes": "()",
        },
        "transformers.core_model_loading": {"revert_weight_conversion": "(model, state_dict)"},
        "transformers.utils.import_utils": {
            "is_scipy_available": "()",
            "is_sklearn_available": "()",
            "is_torchvision_available": "()",
            "is_torchvision_v2_available": "()",
        },
    },
    "deepspeed": {
        "deepspeed": {
            "DeepSpeedEngine._copy_recovery_script": "(self, save_path)",
            "DeepSpeedEngine.clip_fp32_gradients": "(self)",
            "DeepSpeedEngine.module_state_dict": "(self, destination, prefix, keep_vars, exclude_frozen_parameters)",
            "DeepSpeedEngine.zero_optimization_partition_gradients": "(self)",
        },
        "deepspeed.ops.op_builder": {"AsyncIOBuilder.load": "(self, verbose)"},
        "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": {
            "TorchCheckpointEngine.load": "(self, path, map_location)",
            "TorchCheckpointEngine.makedirs": "(self, path, exist_ok)",
            "TorchCheckpointEngine.save": "(self, state_dict, path)",
        },
        "deepspeed.runtime.fp16.loss_scaler": {"LossScaler": "(scale)"},
        "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper": {
            "PartitionedOptimizerSwapper.release_swap_buffers": "(self, parameter)",
            "PartitionedOptimizerSwapper.swap_in_optimizer_state": "(self, parameter, async_parameter)",
        },
        "deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper": {
            "PipelinedOptimizerSwapper.release_swap_buffers": "(self, parameter)"
        },
        "deepspeed.runtime.zero.stage3": {
            "DeepSpeedZeroOptimizer_Stage3._partition_all_parameters": "(*args, **kwargs)",
            "DeepSpeedZeroOptimizer_Stage3._post_step": "(*args, **kwargs)",
            "DeepSpeedZeroOptimizer_Stage3._prepare_sub_group": "(*args, **kwargs)",
            "DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters": "(*args, **kwargs)",
            "DeepSpeedZeroOptimizer_Stage3._release_sub_group": "(*args, **kwargs)",
            "DeepSpeedZeroOptimizer_Stage3._swappable_optimizer_subgroup": "(self, sub_group_id)",
        },
        "deepspeed.utils.tensor_fragment": {"fragment_address": "(numel, start)"},
    },
    "liger-kernel": {
        "liger_kernel.transformers.monkey_patch": {"_apply_liger_kernel_to_instance": "(model, **kwargs)"}
    },
    "vllm": {
        "vllm.config": {"set_current_vllm_config": "(vllm_config, check_compile, prefix)"},
        "vllm.lora.model_manager": {
            "LoRAModelManager._get_lora_layer_weights": "(self, lora_model, module_name)",
            "LoRAModelManager.get_adapter": "(self, adapter_id)",
        },
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": {
            "select_unquantized_moe_backend": "(moe_config)"
        },
        "vllm.model_executor.layers.rotary_embedding.base": {
            "RotaryEmbedding.forward_cpu": "(self, positions, query, key)"
        },
        "vllm.model_executor.layers.vocab_parallel_embedding": {
            "UnquantizedEmbeddingMethod.process_weights_after_loading": "(self, layer)"
        },
        "vllm.sampling_params": {
            "SamplingParams.update_from_tokenizer": "(self, tokenizer)",
            "SamplingParams.verify": "(self, model_config, speculative_config, structured_outputs_config, tokenizer)",
        },
        "vllm.tokenizers.hf": {"get_cached_tokenizer": "(tokenizer)"},
        "vllm.v1.attention.backends.cpu_attn": {
            "CPUAttentionMetadataBuilder.build": "(self, common_prefix_len, common_attn_metadata, fast_build)"
        },
        "vllm.v1.core.sched.async_scheduler": {
            "AsyncScheduler.update_from_output": "(self, scheduler_output, model_runner_output)"
        },
        "vllm.v1.core.sched.scheduler": {
            "Scheduler.update_from_output": "(self, scheduler_output, model_runner_output)"
        },
        "vllm.v1.engine.core": {"EngineCoreProc.run_engine_core": "(*args, dp_rank, local_dp_rank, **kwargs)"},
        "vllm.v1.engine.core_client": {
            "EngineCoreClient.shutdown": "(self, timeout)",
            "SyncMPClient.call_utility": "(self, method, *args)",
        },
        "vllm.v1.engine.detokenizer": {
            "IncrementalDetokenizer.from_new_request": "(tokenizer, request)",
            "IncrementalDetokenizer.update": "(self, new_token_ids, stop_terminated)",
        },
        "vllm.v1.engine.llm_engine": {
            "LLMEngine.add_lora": "(self, lora_request)",
            "LLMEngine.remove_lora": "(self, lora_id)",
            "LLMEngine.reset_encoder_cache": "(self)",
            "LLMEngine.step": "(self)",
        },
        "vllm.v1.executor.multiproc_executor": {"WorkerProc.worker_main": "(*args, **kwargs)"},
        "vllm.v1.sample.sampler": {"batched_count_greater_than": "(x, values)"},
    },
}
