"""A DeepSpeed engine around a policy: log-probs, optimizer steps, checkpoints.

The loss of an optimizer step is a sum over sequences divided by a number fixed beforehand, so it does not depend on
how the sequences are cut into micro-batches and processes. DeepSpeed averages gradients over processes; the sum is
therefore multiplied by their number. The learning rate is a pure function of the step, so the step count is all the
scheduler there is to carry.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts import files, policy
from rloo_pipeline.config import JSON
from rloo_pipeline.errors import UserError, translate_disk_full
from rloo_pipeline.runtime import devices, import_shims, ranks
from rloo_pipeline.training import deepspeed_config, formats, policy_model
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rloo_pipeline.training.kernels.lm_head import LossOf

STATE = "state"
CARRIED = "carried.json"


class Engine:
    """A policy in training on this rank."""

    def __init__(self, folder: Path, settings: Settings, seed: int) -> None:
        """Loads the policy in `folder`. Everything random in it (adapter weights, dropout) comes from `seed`.

        Raises:
            UserError: this machine does not train in the policy's number format, or it is not to be loaded.
        """
        deepspeed = libraries()
        formats.refuse(settings.dtype)
        ranks.use_single_process()
        import torch

        from rloo_pipeline.training.logprobs import TokenLogProbs

        deepspeed_config.compile_nothing()
        self.rank = ranks.current()
        self.settings = settings
        self.folder = folder
        torch.manual_seed(seed)
        self.model = _trainable(folder, settings)
        module = TokenLogProbs(self.model, settings.temperature)
        optimizer = torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            lr=settings.schedule.peak,
            betas=settings.adam_betas,
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        deepspeed.init_distributed(dist_backend="nccl" if devices.device_type() == "cuda" else "gloo")
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=deepspeed_config.configuration(
                settings.dtype, settings.zero_stage, settings.max_grad_norm, settings.communication_data_type
            ),
        )
        self.device: torch.device = self.engine.device
        self.saved = False
        """Whether the policy in `folder`, where it was not loaded from there, was saved by this engine."""
        self.zero_stage = deepspeed_config.stage_of(settings.dtype, settings.zero_stage)
        self.step_count = 0
        self.grad_norm = 0.0
        deepspeed_config.clip_plainly(self.engine, settings.max_grad_norm)
        # one process alone would still copy all gradients to and fro to sum them up
        self.engine.enable_backward_allreduce = self.rank.world > 1 or deepspeed_config.sums_by_itself(self.engine)
        self.engine.checkpoint_engine.save = deepspeed_config.save_by_content
        # A state goes with the policy of its manifest, which has the weights; ZeRO 3 and adapters lay them out anew.
        self.weights_in_state = settings.zero_stage == 3 or settings.lora is not None
        if not self.weights_in_state:
            self.engine.module_state_dict = lambda *_, **__: {}
        self._take_back: Callable[[], None] | None = None
        """Where what it holds is in the host's memory, out of a GPU's."""
        devices.hold_gpu(self)

    def logps(self, sequences: Sequences, max_tokens: int, advance: Callable[[int], None]) -> Tensor:
        """Log-probs of completion tokens under the policy as it is, without gradient; the ranks share the work. Where a
        step drops something, so do they, or a ratio would be of two different policies.

        Returns:
            [sequences, longest completion] on the CPU, the same on every rank; 0 behind a completion's end.
        """
        import torch

        found = torch.zeros(len(sequences.prompts), max(map(len, sequences.completions)))
        self.engine.train(self.settings.drops)
        with torch.no_grad():
            for batch in self._own(sequences, range(len(sequences.prompts)), max_tokens):
                pack = sequences.pick(batch or [0]).to(self.device)
                values, mask = pack.unpack(self.engine(pack))
                if batch:
                    found[batch, : mask.shape[1]] = values.cpu()
                advance(len(batch))
        self.engine.train()
        return self.sum_over_ranks(found)

    def _own(self, sequences: Sequences, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
        """This rank's micro-batches, as many on every rank: one alone in a pass would wait for the others for ever."""
        batches = sequences.micro_batches(rows, max_tokens, self.rank.world)
        missing = -len(batches) % self.rank.world
        return [*batches, *([[]] * missing)][self.rank.number :: self.rank.world]

    def step(
        self,
        sequences: Sequences,
        rows: Sequence[int],
        max_tokens: int,
        loss_of: LossOf,
        advance: Callable[[int], None],
    ) -> float:
        """One optimizer step on `rows`, shared out over the ranks; returns its loss, the same on every rank. Where a
        gradient is beyond float16, the step is made again with a smaller scale of the loss, and never left out.

        Args:
            sequences: all of them; the same on every rank.
            rows: the step's.
            max_tokens: of a micro-batch.
            loss_of: the share of some rows in the loss, already divided by the step's denominator.
            advance: told how many sequences were worked through.

        Raises:
            UserError: the gradient is not finite.
        """
        import torch

        def gradients(advance: Callable[[int], None]) -> Tensor:
            """Adds up those of this rank's share of `rows`; returns its share of the loss."""
            total = torch.zeros((), dtype=torch.float64)
            for chosen in self._own(sequences, rows, max_tokens):
                pack = sequences.pick(chosen or rows[:1]).to(self.device)
                loss = self.engine(pack, of_rows(chosen, loss_of))
                self.engine.backward(loss * self.rank.world)
                total += loss.detach().double().cpu()
                advance(len(chosen))
            return total

        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.settings.schedule.rate(self.step_count)
        loss = gradients(advance)
        self.engine.step()
        while not self.engine.was_step_applied() and deepspeed_config.scales_down(self.engine):
            gradients(lambda _: None)
            self.engine.step()
        self.grad_norm = float(self.engine.get_global_grad_norm() or 0.0)
        if not isfinite(self.grad_norm):
            raise UserError(
                f"optimizer step {self.step_count + 1}: the gradient's norm is {self.grad_norm}; look for what is not "
                "finite or very large in what is trained on, or lower the learning rate"
            )
        self.step_count += 1
        return float(self.sum_over_ranks(loss))

    def leave_out_step(self) -> None:
        """Goes on in the learning rate's schedule without an optimizer step: weights and moments stay as they are."""
        self.step_count += 1

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, on the CPU."""
        import torch

        if self.rank.world == 1:
            return values
        moved = values.to(self.device)
        torch.distributed.all_reduce(moved)
        return moved.cpu()

    def save_policy(self, target: Path) -> str:
        """Writes the policy as Hugging Face (or PEFT) files; every rank takes part, the first one writes.

        Returns:
            The policy's digest; "" on ranks that write nothing.
        """
        weights, made = self._weights(), ""
        if self.rank.first:
            with files.atomic_folder(target) as beside:
                if self.settings.lora is None:
                    policy_model.save(self.model, weights, beside, self.folder, alike=self.saved)
                    self.saved = True
                else:
                    self.model.peft_config["default"].base_model_name_or_path = str(policy.base_of(self.folder))
                    self.model.save_pretrained(beside, state_dict=weights)
                made = policy.digest(beside)
        self._barrier()
        return made

    def _weights(self) -> dict[str, Tensor]:
        """The model's weights in its own names, gathered from the ranks where ZeRO 3 has split them."""
        if self.settings.zero_stage == 3:
            state = self.engine._zero3_consolidated_16bit_state_dict() or {}
        else:
            state = self.engine.module.state_dict()
        return {name.removeprefix("model."): tensor.detach().cpu() for name, tensor in state.items()}

    def save_state(self, target: Path, carried: JSON, **about: object) -> None:
        """Writes optimizer, master weights and `carried` with a manifest; every rank takes part. The policy has the
        weights themselves.
        """
        import torch

        place = [str(files.temporary_path(target)) if self.rank.first else ""]
        torch.distributed.broadcast_object_list(place, src=0)
        beside = Path(place[0])
        state = {"step": self.step_count}
        frozen = self.settings.lora is not None
        try:
            with translate_disk_full(target.parent):
                self.engine.save_checkpoint(
                    place[0], tag=STATE, client_state=state, save_latest=False, exclude_frozen_parameters=frozen
                )
                self._barrier()
                if self.rank.first:
                    files.write_json(beside / CARRIED, carried)
                    files.write_manifest(beside, world=self.rank.world, zero_stage=self.zero_stage, **about)
                    files.replace_folder(beside, target)
        finally:
            if self.rank.first:
                shutil.rmtree(beside, ignore_errors=True)
        self._barrier()

    def load_state(self, source: Path, **about: object) -> JSON:
        """Goes on from a saved state, once its manifest shows that it is whole and of this run; returns what was
        carried. The engine was made from the policy that the state was saved with.

        Raises:
            UserError: it was changed, is of something else, or was written by another number of processes or ZeRO
            stage.
        """
        wanted = {"world": self.rank.world, "zero_stage": self.zero_stage, **about}
        found = files.verify_manifest(source)
        for key, value in wanted.items():
            if found.get(key) != value:
                raise UserError(
                    f"{source}: trainer state with {key} {found.get(key)}, this run has {value}; "
                    "go on with the old setting or start the run anew"
                )
        strict = self.weights_in_state and self.settings.lora is None
        _, state = self.engine.load_checkpoint(str(source), tag=STATE, load_module_strict=strict)
        self.step_count = int(state["step"])
        return self.carried(source)

    def carried(self, source: Path) -> JSON:
        """What a saved state carries beside the engine's own."""
        found: JSON = files.read_json(source / CARRIED)
        return found

    def leave_gpu(self) -> None:
        """Takes weights and optimizer to the host's memory, until `enter_gpu`.

        Raises:
            IncompatibleEngine: ZeRO 3 has split the weights.
        """
        if self.device.type != "cpu":
            self.put_aside()

    def put_aside(self) -> None:
        """The same, wherever they are.

        Raises:
            IncompatibleEngine: as `leave_gpu`.
        """
        import torch

        from rloo_pipeline.training import offload

        if self._take_back is None:
            self._take_back = offload.put_aside(self.engine)
            torch.cuda.empty_cache()

    def enter_gpu(self) -> None:
        """Takes back what left."""
        if self._take_back is not None:
            self._take_back()
            self._take_back = None

    def close(self) -> None:
        """Leaves the process group."""
        import torch

        torch.distributed.destroy_process_group()

    def _barrier(self) -> None:
        import torch

        torch.distributed.barrier()


def libraries() -> ModuleType:
    """DeepSpeed, once all is imported that engines are made of: a warm trainer does so as it starts."""
    if devices.device_type() == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = import_shims.import_deepspeed()
    import_shims.prepare_transformers()
    import_module("transformers.modeling_utils")
    return deepspeed


def of_rows(rows: Sequence[int], loss_of: LossOf) -> LossOf:
    """A loss of rows as one of the places in a pack of them; a rank that has nothing left to do has a loss of 0."""

    def found(places: Sequence[int], logps: Tensor, mask: Tensor, entropy: Tensor) -> Tensor:
        return loss_of([rows[place] for place in places], logps, mask, entropy) if rows else 0.0 * logps.sum()

    return found


def _trainable(folder: Path, settings: Settings) -> Any:
    """The model with the parameters to train marked."""
    model = policy_model.load(folder, settings.dtype, settings.trust_remote_code, settings.disable_dropout)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if settings.lora is None:
        return model.train()
    import peft

    if policy.is_adapter(folder):
        return peft.PeftModel.from_pretrained(model, folder, is_trainable=True, autocast_adapter_dtype=False).train()
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings.lora.model_dump())
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False).train()
