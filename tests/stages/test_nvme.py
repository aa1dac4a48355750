"""State and weights on a disk of the node: the same bytes as in its memory, and as in a trainer that was resumed."""

import sys
from pathlib import Path

import pytest
import test_optimizers
from test_optimizers import ALL, STATE

from rloo_pipeline.artifacts import manifest
from rloo_pipeline.config import Offload
from rloo_pipeline.demo.character_model import tiny_qwen3
from rloo_pipeline.errors import UserError
from rloo_pipeline.training import nvme, trainer_state
from rloo_pipeline.training.engine import Engine

HEADERS = pytest.mark.skipif(
    not any(Path(folder, "libaio.h").exists() for folder in ("/usr/include", f"{sys.prefix}/include")),
    reason="libaio-dev is not installed",
)
SIZES = {"hidden_size": 256, "layers": 3, "heads": 4, "key_value_heads": 2, "head_dim": 64, "intermediate_size": 2560}
"""DeepSpeed writes what has 1 MB: matrices of the layers in bfloat16, but not those of attention."""
SUB_GROUP = 3_000_000
"""Numbers of a sub-group, so that there are several."""


def build(folder: Path, dtype: str, offload: Offload, disk: Path) -> Engine:
    from deepspeed import zero

    zero.Init.param_id = 0  # counts the weights of a process, as of one engine
    settings = test_optimizers.settings("adamw", dtype, 3, offload)
    keys = {"zero_optimization": {"sub_group_size": SUB_GROUP}}
    return Engine(folder, settings._replace(nvme_path=str(disk), deepspeed_config=keys), 0)


def digest_after(engine: Engine, steps: int, folder: Path) -> tuple[str, str]:
    """Digests of policy and state after optimizer steps; both are written to the folder."""
    test_optimizers.steps(engine, steps)
    engine.save_policy(folder / "policy")
    trainer_state.save(engine, folder / "state", {})
    return manifest.folder_digest(folder / "policy"), manifest.folder_digest(folder / "state")


@HEADERS
@pytest.mark.slow
@pytest.mark.long  # DeepSpeed compiles its access to disks, which takes minutes
@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("dtype", "parameters", "in_memory"),
    [("float32", None, STATE), ("bfloat16", "cpu", ALL), ("bfloat16", "nvme", ALL)],
)
def test_a_run_on_disk_has_the_bytes_of_one_in_memory_and_of_one_that_was_resumed(
    tmp_path, dtype, parameters, in_memory
) -> None:
    model, disk = tmp_path / "model", tmp_path / "disk"
    disk.mkdir()
    tiny_qwen3(model, 0, **SIZES)
    on_disk = Offload(optimizer="nvme", parameters=parameters)
    engine = build(model, dtype, on_disk, disk)
    written = {file.name.rpartition("_")[2] for file in disk.rglob("*.swp")}
    assert "param.tensor.swp" in written if parameters == "nvme" else written and "param.tensor.swp" not in written
    after_3, _ = digest_after(engine, 3, tmp_path / "3")
    resumed = build(tmp_path / "3" / "policy", dtype, on_disk, disk)
    assert trainer_state.load(resumed, tmp_path / "3" / "state") == {}
    assert resumed.step_count == 3
    after_5 = digest_after(engine, 2, tmp_path / "5")
    assert digest_after(resumed, 2, tmp_path / "resumed") == after_5
    memory = build(model, dtype, in_memory, disk)
    assert digest_after(memory, 3, tmp_path / "3 in memory")[0] == after_3
    assert digest_after(memory, 2, tmp_path / "5 in memory")[0] == after_5[0]


def test_what_a_killed_process_left_is_removed_and_that_of_a_living_one_stays(tmp_path) -> None:
    mine = nvme._folder(str(tmp_path))
    left = tmp_path / f"{nvme.PREFIX}left"
    left.mkdir()
    (left / nvme.LOCK).touch()
    (left / "weights.swp").touch()
    nvme._folder(str(tmp_path))
    assert mine.is_dir()
    assert not left.exists()


def test_a_folder_may_name_variables_and_must_be_on_the_node(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SCRATCH_OF_JOB", str(tmp_path))
    assert nvme._folder("$SCRATCH_OF_JOB").parent == tmp_path
    with pytest.raises(UserError, match=r"nvme_path: \$NO_SUCH is no folder on this node"):
        nvme._folder("$NO_SUCH")


def test_a_disk_without_space_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match="GB free, and .* GB are needed; name a folder on a larger disk"):
        nvme._check_space(tmp_path, 10**18)


def test_memory_that_cannot_be_locked_is_named() -> None:
    with pytest.raises(UserError, match="locks .* GB of memory, and this node does not allow it"):
        nvme._check_lockable(1 << 60)
