"""warmstart: the staged model → policy 0, as it is or trained on demonstrations first (stage `sft`)."""

from __future__ import annotations

from pathlib import Path

from rloo_pipeline.artifacts import policy
from rloo_pipeline.artifacts.files import atomic_folder, folder_files, link_or_copy, read_json
from rloo_pipeline.config import Config
from rloo_pipeline.runtime.progress import say
from rloo_pipeline.training import model_support, self_check
from rloo_pipeline.training.sft import sft


def trains(config: Config, trial: Path | None) -> bool:
    """Whether SFT is run: always where there are demonstrations, or as the trial of the model as it is asks for it."""
    if config.warmstart.sft is None:
        return False
    return trial is None or bool(read_json(trial)["asks_for_sft"])


def warmstart(config: Config, assets: Path, prompts: Path, trial: Path | None, output: Path) -> None:
    """Writes policy 0 into `output`; where SFT is asked for, every rank takes part.

    Args:
        config: of the stage.
        assets, prompts: what these stages wrote.
        trial: checks of the model as it is, where `warmstart.train` is `auto`.
        output: the policy.

    Raises:
        UserError: the model is not whole or cannot be trained; no demonstrations are left.
    """
    model = Path(read_json(assets / "assets.json")["model"]["path"])
    model_support.refuse_run(config, model)
    if trial is not None and config.warmstart.sft is not None:
        asking = read_json(trial)["asks_for_sft"]
        say(f"SFT is asked for by {', '.join(asking)}" if asking else "no check asks for SFT")
    if config.warmstart.sft is not None and trains(config, trial):
        sft(config, config.warmstart.sft, assets, prompts, output)
        return
    policy.check(model)
    found = self_check.of(model, config.model.trust_remote_code)
    policy.load_tokenizer(model, config.model.trust_remote_code)
    with atomic_folder(output) as beside:
        for file in folder_files(model):
            if file.suffix not in policy.PICKLES:
                link_or_copy(file, beside / file.relative_to(model))
        (beside / self_check.RECORD).unlink(missing_ok=True)  # which may be a link to the model's
        found.write(beside)
    say(f"policy 0 is {model} as it is")
