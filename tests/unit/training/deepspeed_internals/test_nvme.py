"""The folder of an update on a disk of the node, and what that disk and the node must allow."""

import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch
from helpers import mini

from rloo_pipeline.before_run import node_checks
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import scratch
from rloo_pipeline.training.deepspeed_internals import nvme


def test_the_folder_of_a_living_process_stays_and_that_of_a_killed_one_is_removed(tmp_path) -> None:
    mine = nvme.new_folder(str(tmp_path), 0)
    left = tmp_path / "rloo-offload-left"
    left.mkdir()
    (left / "weights.swp").touch()
    (tmp_path / f"{scratch.LOCK}{left.name}").write_text(socket.gethostname())
    other = nvme.new_folder(str(tmp_path), 0)
    assert mine.is_dir()
    assert not left.exists()
    scratch.remove()
    assert not mine.exists()
    assert not other.exists()


def test_a_folder_may_name_variables_and_must_be_on_the_node(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SCRATCH_OF_JOB", str(tmp_path))
    assert nvme.new_folder("$SCRATCH_OF_JOB", 0).parent == tmp_path
    with pytest.raises(UserError, match=r"nvme_path: \$NO_SUCH is not a folder on this node"):
        nvme.new_folder("$NO_SUCH", 0)


@pytest.mark.parametrize("file_system", ["tmpfs", "ext4"])
def test_a_folder_for_temporary_files_in_memory_is_refused_where_no_other_is_named(
    tmp_path, monkeypatch, file_system
) -> None:
    device = tmp_path.stat().st_dev
    mount = f"36 35 {os.major(device)}:{os.minor(device)} / /tmp rw,noatime shared:1 - {file_system} none rw"
    (tmp_path / "mountinfo").write_text(f"22 1 0:99 / / rw - tmpfs none rw\n{mount}\n")
    monkeypatch.setattr(nvme, "MOUNTS", tmp_path / "mountinfo")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = Config(**mini(deepspeed={"zero_stage": 3, "offload": {"optimizer": "nvme"}}))
    (finding,) = node_checks.machine(settings)
    assert nvme.disk(str(tmp_path)) == tmp_path
    assert finding.ok == (file_system == "ext4")
    if not finding.ok:
        assert "is in the memory of this node" in finding.message
        with pytest.raises(UserError, match="is in the memory of this node, so that offloading to it"):
            nvme.new_folder(None, 0)


def test_a_disk_without_space_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"GB free, and .* GB are needed; name a folder on a larger disk"):
        nvme.new_folder(str(tmp_path), 10**18)


def test_a_file_that_is_short_or_cannot_be_written_is_an_error(tmp_path) -> None:
    """DeepSpeed's own access goes on with the content that the buffer happened to have."""
    handle = nvme.Handle()
    buffer = handle.new_cpu_locked_tensor(1000, torch.zeros(1))
    buffer.copy_(torch.arange(1000))
    assert handle.is_pinned(buffer.narrow(0, 7, 10))
    assert not handle.is_pinned(torch.zeros(10))
    assert handle.async_pwrite(buffer.narrow(0, 7, 900), str(tmp_path / "file"), 0) == 0
    assert handle.wait() == 1
    again = handle.new_cpu_locked_tensor(1000, torch.zeros(1, dtype=torch.float32)).zero_()
    handle.async_pread(again.narrow(0, 3, 900), str(tmp_path / "file"), 0)
    assert handle.wait() == 1
    assert torch.equal(again[3:903], buffer[7:907])
    assert not again[:3].any()
    handle.async_pread(again, str(tmp_path / "file"), 0)
    with pytest.raises(UserError, match=r"only 3,600 of 4,000 bytes can be read"):
        handle.wait()
    if Path("/dev/full").exists():
        handle.async_pwrite(again, "/dev/full", 0)
        with pytest.raises(UserError, match="no space left"):
            handle.wait()
    assert handle.free_cpu_locked_tensor(again)
    assert not handle.is_pinned(again)
