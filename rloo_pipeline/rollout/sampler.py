"""vLLM as a function from (prompt ids, seed) to completion ids and their log-probs.

Each request has a seed of its own, so a completion does not depend on what else is in the batch; on GPUs but for
rounding, which differs with the batch's size. Log-probs are those of the distribution that was sampled from
(`processed_logprobs`: temperature and truncation applied), in the engine's dtype, which is set explicitly; both go into
the footer of what is written. Token ids pass through as they come; nothing is tokenized here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rloo_pipeline.artifacts import model_dims, policy
from rloo_pipeline.artifacts.files import read_json
from rloo_pipeline.artifacts.model_dims import Shape
from rloo_pipeline.config import Dtype
from rloo_pipeline.errors import IncompatibleEngine, UserError
from rloo_pipeline.rollout import proof
from rloo_pipeline.rollout.completions import Completion, Request, SamplingConfig, completion_of, params_of
from rloo_pipeline.runtime import devices, import_shims
from rloo_pipeline.runtime.progress import counting
from rloo_pipeline.workers import engine_cache

if TYPE_CHECKING:
    from vllm import LLM

LOGPROBS_MODE = "processed_logprobs"
AT_ONCE = 256
"""Sequences that are sampled at once on CPUs, at most."""
BLOCK = 128
"""Tokens of a block of the KV cache there."""


class Engine(NamedTuple):
    """What vLLM is started with."""

    dtype: Dtype
    trust_remote_code: bool
    gpu_memory_utilization: float
    kv_cache_gib: int
    tensor_parallel_size: int


class Sampler:
    """A vLLM engine with one policy in it."""

    def __init__(self, folder: Path, engine: Engine, max_model_len: int, seed: int) -> None:
        """Loads the policy (a full model, or an adapter with its base).

        Raises:
            UserError: the policy is not whole, or prompt and completion do not fit the model's context.
        """
        policy.check(folder)
        base = policy.base_of(folder)
        policy.check(base)
        self.digest = policy.digest(folder)
        self.max_model_len = _context(base, max_model_len)
        tokenizer = policy.load_tokenizer(base, engine.trust_remote_code)
        self.stop_ids = policy.stop_ids(base, tokenizer)
        self.vocabulary = len(tokenizer)
        adapter: dict[str, Any] = {}
        if policy.is_adapter(folder):
            adapter = {"enable_lora": True, "max_lora_rank": rank_at_least(read_json(folder / policy.ADAPTER)["r"])}
        self.cache_bytes = cache_bytes(_shape(base), engine.dtype, engine.kv_cache_gib, self.max_model_len)
        self.settings = {
            "model": str(base),
            "dtype": engine.dtype,
            "logprobs_mode": LOGPROBS_MODE,
            "max_model_len": self.max_model_len,
            "seed": seed & 0x7FFFFFFF,
            "trust_remote_code": engine.trust_remote_code,
            "tensor_parallel_size": engine.tensor_parallel_size,
            "gpu_memory_utilization": engine.gpu_memory_utilization,
            "generation_config": "vllm",
            **adapter,
        }
        if engine_cache.is_on() and _on_gpu():
            self.settings["enable_sleep_mode"] = True
        self.asleep = False
        """Whether the engine's weights are in the host's memory, and its cache nowhere."""
        self.proven = False
        """Whether a swap of this engine's weights has been proven right."""
        self.lora = _lora_request(folder, 1) if adapter else None
        self.seconds = 0.0
        """What the last sampling took."""
        self.llm: LLM | None = self._engine()
        devices.hold_gpu(self)

    def _engine(self) -> LLM:
        vllm = import_shims.vllm()
        on_cpu: dict[str, Any] = {
            "enforce_eager": True,
            # A prompt split over two steps has its random generator set back, and a CPU's cannot be.
            "enable_chunked_prefill": False,
            "max_num_seqs": AT_ONCE,
            "kv_cache_memory_bytes": self.cache_bytes,
        }
        engine: LLM = vllm.LLM(**({} if _on_gpu() else on_cpu), **self.settings)
        return engine

    def swap(self, folder: Path, max_model_len: int) -> None:
        """Takes the weights of another policy of the same kind, as if the engine had been started with it. What it
        holds already, told by the policy's digest, is not read again.

        Raises:
            IncompatibleEngine: the engine was made for a shorter context, does not let go of its cache, or does not
            compute with the weights that it was given.
        """
        if max_model_len > self.max_model_len:
            raise IncompatibleEngine(f"a context of {self.max_model_len} tokens")
        self._wake()
        policy.check(folder)
        digest = policy.digest(folder)
        self.settings["model"] = str(policy.base_of(folder))
        if self.llm is None:
            self.lora = None if self.lora is None else _lora_request(folder, 1)
        elif digest != self.digest:
            self.digest = ""
            self._load(self.llm, folder)
        if self.llm is not None:
            _forget_prompts(self.llm)
        self.digest = digest

    def _load(self, llm: LLM, folder: Path) -> None:
        """Has the engine take the policy in `folder`, and prove that it did."""
        prompts = proof.prompts_of(self.vocabulary, _block(llm), self.max_model_len)
        proof.ask(llm, prompts, self.lora)
        if self.lora is not None:  # vLLM goes on serving the old adapter under an id that it knows
            old = self.lora.lora_int_id
            llm.llm_engine.remove_lora(old)
            self.lora = _lora_request(folder, old + 1)
        else:
            llm.apply_model(_unpack)
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            llm.apply_model(_repack)
        _forget_prompts(llm)
        said = proof.ask(llm, prompts, self.lora)
        proof.check_cache(said)
        if not self.proven or proof.is_cheap(folder):
            settings = self.settings
            proof.check_weights(said, folder, settings["dtype"], settings["trust_remote_code"], prompts)
            self.proven = True

    def leave_gpu(self) -> None:
        """Lets the engine of a worker sleep, and ends any other; the next completion wakes or starts it again."""
        import gc

        if self.llm is None or self.asleep:
            return
        if "enable_sleep_mode" in self.settings:
            self.llm.sleep(level=1)
            self.asleep = True
            return
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        if _on_gpu():
            import torch

            torch.cuda.empty_cache()

    def sample(self, requests: Sequence[Request], decoding: SamplingConfig, what: str) -> list[Completion]:
        """One completion a request, in the order of the requests; `what` is counted on the progress line."""
        from vllm import TokensPrompt

        began = time.monotonic()
        self.llm = self.llm or self._engine()
        self._wake()
        prompts = [TokensPrompt(prompt_token_ids=request.prompt_ids) for request in requests]
        params = [params_of(request, decoding, self.stop_ids) for request in requests]
        names = self.llm.enqueue(prompts, params, lora_request=self.lora, use_tqdm=False)
        places = {name.partition("-")[0]: place for place, name in enumerate(names)}
        engine, done = self.llm.llm_engine, dict[int, Completion]()
        with counting(what, len(requests)) as counter:
            while len(done) < len(requests):
                finished = [output for output in engine.step() if output.finished]
                for output in finished:
                    place = places[output.request_id]
                    done[place] = completion_of(engine.get_tokenizer(), params[place], output)
                counter.advance(len(finished))
        self.seconds = time.monotonic() - began
        return [done[place] for place in range(len(requests))]

    def _wake(self) -> None:
        if self.asleep and self.llm is not None:
            self.llm.wake_up()
        self.asleep = False


def _forget_prompts(llm: LLM) -> None:
    """Empties the cache of prompts' keys and values.

    Raises:
        IncompatibleEngine: the engine does not let go of it.
    """
    if not llm.reset_prefix_cache():
        raise IncompatibleEngine("a cache in use")


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _context(folder: Path, needed: int) -> int:
    """A context for at least `needed` tokens, with room for somewhat longer prompts of a later stage.

    Raises:
        UserError: prompts and completions together exceed what the model was made for.
    """
    context = model_dims.context(read_json(folder / "config.json"))
    if context is not None and needed > context:
        raise UserError(
            f"{folder}: the longest prompt and max_completion_length make {needed} tokens, the model's context is "
            f"{context}; lower dataset.max_prompt_length or rollout.max_completion_length"
        )
    roomy = -(-needed // 64) * 64
    return roomy if context is None else min(roomy, context)


def cache_bytes(shape: Shape | None, dtype: Dtype, most_gib: int, longest: int) -> int:
    """Size of the KV cache on CPUs, all of which vLLM fills with zeros when it starts: what the sequences at once take
    where all are `longest`, and a quarter more for prompts that several of them have.

    Args:
        shape: of the model, None where it is not known.
        dtype: of the model.
        most_gib: GiB that it may have.
        longest: tokens of a prompt and its completion.
    """
    most = most_gib * 2**30
    if shape is None:
        return most
    tokens = AT_ONCE * -(-longest // BLOCK) * BLOCK
    return min(most, tokens * shape.cached(dtype) * 5 // 4)


def _shape(folder: Path) -> Shape | None:
    try:
        return model_dims.read(folder)
    except UserError:  # no transformer that this program knows the sizes of
        return None


def rank_at_least(rank: int) -> int:
    """The smallest of vLLM's allowed LoRA ranks that holds this one."""
    return next(allowed for allowed in (1, 8, 16, 32, 64, 128, 256, 320, 512) if allowed >= rank)


SAID_TO_ENGINE = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""Keys of a model's configuration that an engine does not go by: it is told the number format."""


def kind_of(folder: Path, trust_remote_code: bool) -> str:
    """What policies have in common that one engine can hold one after the other: the model's configuration, defaults
    filled in, and for an adapter its base and its own settings.
    """
    if policy.is_adapter(folder):
        settings = read_json(folder / policy.ADAPTER)
        in_order = {key: sorted(value) if isinstance(value, list) else value for key, value in settings.items()}
        return json.dumps([str(policy.base_of(folder).resolve()), in_order], sort_keys=True)
    import_shims.before_transformers()
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).to_dict()
    return json.dumps(_without(config, SAID_TO_ENGINE), sort_keys=True, default=str)


def _without(config: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """A configuration without some keys, those of its parts included."""
    return {
        key: _without(value, keys) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in keys
    }


def _block(llm: LLM) -> int:
    """Tokens of a block of the KV cache."""
    return int(llm.llm_engine.vllm_config.cache_config.block_size)


def _unpack(model: Any) -> None:
    """Has experts be packed anew when weights are reloaded: on CPUs vLLM does so with the first ones only, and would
    then compute with the others as if they were packed.
    """
    if _on_gpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack(model: Any) -> None:
    """Makes the packed copy of the vocabulary projection anew; where it is tied, reloading leaves the old one."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _lora_request(folder: Path, number: int) -> Any:
    """The adapter, under a number that this engine has not seen."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"{folder.name}-{number}", number, str(folder))
