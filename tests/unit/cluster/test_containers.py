"""The name of the image, and the folders and devices that Apptainer gets."""

import argparse
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, executable, mini, wait_until

from rloo_pipeline.cluster import containers, profiles
from rloo_pipeline.config import Config
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with the files that decide an image's name; the environment is restored after the test."""
    for name in (
        "requirements/cpu.txt",
        "requirements/cuda.txt",
        "containers/rloo-cpu.def",
        "containers/rloo-cuda.def",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home")})
    return tmp_path


def config(**changes) -> Config:
    return Config(**mini(**changes))


def binds() -> list[str]:
    return os.environ["APPTAINER_BIND"].split(",")


def test_other_requirements_or_another_definition_give_another_name(project) -> None:
    first = containers.image(config().container, project)
    assert containers.image(config().container, project) == first
    for name in ("requirements/cpu.txt", "containers/rloo-cpu.def"):
        (project / name).open("a").write("\n# changed\n")
        assert containers.image(config().container, project) != first
    assert containers.image(config(container={"image": "mine.sif"}).container, project) == "mine.sif"


def test_the_name_is_the_one_that_the_build_gives(project) -> None:
    """The build prints the name and stops where the image exists."""
    name = Path(containers._image_name("cpu", ROOT)).name
    images = project / "images"
    images.mkdir()
    (images / name).touch()
    outcome = subprocess.run(
        [ROOT / "containers" / "build"], env={**os.environ, "IMAGES": str(images)}, capture_output=True, text=True
    )
    assert outcome.stdout == f"images: {images / name} is there\n", outcome.stderr


NO_WHEEL = (
    "mkdir -p $IMAGES/.cache/wheels-cpu $IMAGES/.cache/wheels-cuda; "
    "echo 'ERROR: No matching distribution found for torch' >&2; exit 1"
)


@pytest.mark.parametrize(
    ("kind", "pip", "message"),
    [
        ("cpu", NO_WHEEL, "No matching distribution found"),
        ("cuda", NO_WHEEL, "No matching distribution found"),
        ("cpu", "exit 0", "pip took a build of torch for CUDA"),
    ],
)
def test_a_build_whose_wheels_cannot_be_fetched_says_why_and_the_next_one_fetches_again(
    tmp_path, kind, pip, message
) -> None:
    for name, script in (("apptainer", "exit 1"), ("python", f'case "$*" in *download*) {pip} ;; esac')):
        executable(tmp_path, name, script)
    own = {"PYTHON": str(tmp_path / "python"), "IMAGES": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    outcome = subprocess.run(
        [ROOT / "containers" / "build", kind], env=os.environ | own, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 1
    assert message in outcome.stderr
    assert not list((tmp_path / ".cache").glob("wheels-*/.*"))


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Path:
    """The script as a wheel installs it, called from `tmp_path` with an Apptainer that builds an empty image."""
    project = tmp_path / "rloo_pipeline" / "project"
    for name in ("containers", "requirements"):
        shutil.copytree(ROOT / name, project / name)
    shutil.copy(ROOT / "pyproject.toml", project)
    apptainer = """case $1 in build)
        echo "$@" >>$LOG; mkdir $APPTAINER_TMPDIR/build-temp
        while [ -e $LOG.wait ]; do sleep 0.05; done
        for word; do case $word in *.partial) touch $word ;; esac; done ;;
    esac"""
    executable(tmp_path / "bin", "apptainer", apptainer)
    executable(tmp_path / "bin", "debootstrap", "")
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    for name in ("IMAGES", "APPTAINER_TMPDIR", "MIRROR", "BOOTSTRAP"):
        monkeypatch.delenv(name, raising=False)
    return project / "containers" / "build"


@pytest.mark.parametrize(("variables", "folder"), [({}, "images"), ({"IMAGES": "else/where"}, "else/where")])
def test_an_image_built_from_a_wheel_is_in_a_folder_of_the_caller(installed, tmp_path, variables, folder) -> None:
    subprocess.run(["sh", installed, "sandbox"], env=os.environ | variables, check=True)
    assert len(list((tmp_path / folder).glob("rloo-sandbox-*.sif"))) == 1
    assert not list((tmp_path / "scratch").iterdir())


def test_a_build_waits_for_what_a_killed_one_left_running_and_removes_its_files(
    installed, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("BOOTSTRAP", "docker")  # one call of Apptainer
    waiting, log = tmp_path / "log.wait", tmp_path / "log"
    waiting.touch()
    older = tmp_path / "images" / "rloo-sandbox-0.1.0-of_another_list.sif.partial"
    older.parent.mkdir()
    older.touch()
    killed = subprocess.Popen(["sh", installed, "sandbox"], stdout=subprocess.DEVNULL)
    wait_until(lambda: log.exists() and any((tmp_path / "scratch").glob("*/build-temp")))
    killed.kill()
    killed.wait()
    with subprocess.Popen(["sh", installed, "sandbox"], stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout.readline() == "images: waiting for another build of sandbox\n"
        assert len(log.read_text().splitlines()) == 1
        waiting.unlink()
        output = second.stdout.read()
    assert second.returncode == 0, output
    assert len(log.read_text().splitlines()) == 2
    assert [file.suffix for file in older.parent.glob("rloo-*")] == [".sif"]
    # the copy of the sources, which was in use when the first was killed, is small
    assert not [file for file in (tmp_path / "scratch").iterdir() if file.name.startswith("rloo-image-")]


@pytest.mark.parametrize(
    ("system", "sources", "base"),
    [
        ("debian", "deb [signed-by=/a] https://localhost/debian bookworm main", "mirror=https://localhost/debian"),
        ("debian", "Types: deb\nURIs: mirror+file:///etc/apt/mirrors/debian.list", "base=debian:12"),
        ("ubuntu", "deb http://localhost/ubuntu jammy main", "base=debian:12"),
    ],
)
def test_debian_comes_from_the_mirror_of_a_debian_and_of_no_other_system(
    installed, tmp_path, system, sources, base
) -> None:
    (tmp_path / "etc" / "apt").mkdir(parents=True)
    (tmp_path / "etc" / "os-release").write_text(f"ID={system}\n")
    (tmp_path / "etc" / "apt" / "sources.list").write_text(sources + "\n")
    installed.write_text(installed.read_text().replace("/etc/", f"{tmp_path}/etc/"))
    subprocess.run(["sh", installed, "sandbox"], check=True)
    assert f"--build-arg {base} " in (tmp_path / "log").read_text()


def test_a_build_without_enough_room_says_so_first(installed, tmp_path) -> None:
    executable(tmp_path / "bin", "df", "printf 'header\\ndisk 0 0 3000000 0 /\\n'")
    executable(tmp_path / "bin", "python", 'case "$*" in *download*) exit 1 ;; esac')
    environment = os.environ | {"PYTHON": "python"}
    outcome = subprocess.run(["sh", installed, "cuda"], env=environment, capture_output=True, text=True, check=False)
    assert outcome.stderr.splitlines()[:2] == [
        f"images: 3 GB are free for APPTAINER_TMPDIR in {tmp_path}/scratch, and a first build for cuda needs 16 GB",
        f"images: 3 GB are free for IMAGES in {tmp_path}/images, and a first build for cuda needs 12 GB",
    ]


def test_pip_keeps_what_it_fetched_with_the_images_and_nothing_at_home(installed, tmp_path) -> None:
    executable(tmp_path / "bin", "python", 'case "$*" in *download*) echo "$TMPDIR $*" >$LOG; exit 1 ;; esac')
    subprocess.run(["sh", installed, "cuda"], env=os.environ | {"PYTHON": "bin/python"}, check=False)
    folder = tmp_path / "images" / ".cache" / "pip-cuda"
    assert f"--cache-dir {folder} " in (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text().startswith(f"{folder}/tmp ")


def test_the_image_for_gpus_is_preferred_if_it_is_built_or_the_machine_has_a_gpu(project, monkeypatch) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    assert containers.image(config().container, project).startswith("images/rloo-cuda-0.1.0-")
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    assert containers.image(config().container, project).startswith("images/rloo-cpu-0.1.0-")
    cuda = containers._image_name("cuda", project)
    (project / "images").mkdir()
    (project / cuda).touch()
    assert containers.image(config().container, project) == cuda


def test_a_missing_image_gives_a_one_line_error(project) -> None:
    containers.require("docker://example/image")
    with pytest.raises(UserError, match=r"none.sif: no such image on .*rloo images cuda.*container.image"):
        containers.require("none.sif")


def test_caches_are_outside_the_working_folder_and_bound(project) -> None:
    containers.prepare(config(), "images/x.sif")
    kernels = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "HUMMING_TMP_DIR")
    for name in ("XDG_CACHE_HOME", "HF_HOME", "VLLM_CACHE_ROOT", *kernels):
        folder = os.environ[name]
        assert Path(folder).is_dir()
        assert folder in binds()
        assert folder.startswith(str(project / "home" / ".cache"))


def test_parts_of_the_hubs_cache_that_the_user_keeps_elsewhere_are_bound(project, tmp_path_factory) -> None:
    hub, datasets = tmp_path_factory.mktemp("scratch") / "hub", project / "datasets"
    os.environ |= {"HF_HUB_CACHE": str(hub), "HF_DATASETS_CACHE": "datasets", "HF_XET_CACHE": ""}
    containers.prepare(config(), "images/x.sif")
    assert (os.environ["HF_HUB_CACHE"], os.environ["HF_DATASETS_CACHE"]) == (str(hub), str(datasets))
    assert {str(hub), str(datasets)} < {*binds()}
    assert hub.is_dir()


def test_certificates_of_the_host_are_bound_if_they_exist(project, tmp_path_factory) -> None:
    certificates = tmp_path_factory.mktemp("pki") / "ca-bundle.crt"
    os.environ |= {"SSL_CERT_FILE": str(certificates), "REQUESTS_CA_BUNDLE": ""}
    containers.prepare(config(), "images/x.sif")
    assert str(certificates) not in binds()
    certificates.touch()
    (project / "own.crt").touch()
    os.environ["REQUESTS_CA_BUNDLE"] = "own.crt"  # Apptainer starts nothing with a relative bind
    containers.prepare(config(), "images/x.sif")
    assert {str(certificates), str(project / "own.crt")} < {*binds()}


def test_what_engines_compile_is_kept_for_an_image_on_a_kind_of_card(project, monkeypatch) -> None:
    def folders(card: str, text: str, **variables: str) -> dict[str, str]:
        monkeypatch.setattr(devices, "card", lambda: card)
        (project / "x.sif").write_text(text)
        os.environ.update(variables)
        containers.prepare(config(), "x.sif")
        return {name: os.environ[name] for name in containers.COMPILED}

    first = folders("NVIDIA H200", "one")
    assert folders("NVIDIA H200", "one") == first
    assert all(folder.endswith(f"-NVIDIA-H200/{containers.COMPILED[name]}") for name, folder in first.items())
    others = [folders("NVIDIA H100 80GB HBM3", "one"), folders("NVIDIA H200", "another")]
    assert all(len({one[name] for one in (first, *others)}) == 3 for name in first), "though a job inherits another's"
    chosen = str(project / "mine")
    assert folders("NVIDIA H200", "one", TRITON_CACHE_DIR=chosen) == first | {"TRITON_CACHE_DIR": chosen}


def test_folders_in_the_configuration_are_bound(project, tmp_path_factory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    for name in ("model", "data", "more", "scratch", "rewards", "tasks"):
        (outside / name).mkdir()
    (outside / "rewards" / "mine.py").write_text("def mine(completions):\n    return [0.0] * len(completions)\n")
    (outside / "data" / "train.jsonl").touch()
    (project / "results").symlink_to(outside / "scratch")
    configuration = config(
        model={"build": None, "build_options": {}, "name_or_path": str(outside / "model")},
        data_dir=str(outside / "data"),
        container={"binds": [str(outside / "more")]},
        rewards=[{"function": f"{outside}/rewards/mine.py:mine", "name": "answer"}],
        evaluation={"harness": {"tasks": ["mine"], "include_path": str(outside / "tasks")}},
    )
    os.environ["APPTAINER_BIND"] = "/site"
    containers.prepare(configuration, "images/x.sif")
    assert {"/site", *(str(folder) for folder in outside.iterdir())} <= set(binds())
    before = binds()
    containers.prepare(configuration, "images/x.sif")
    assert binds() == before, "a job prepares again what it inherits"


@pytest.mark.parametrize("name", ["lr=1e-6,seed=1", "run:1"])
def test_a_path_that_apptainer_cannot_bind_is_refused(project, tmp_path_factory, name) -> None:
    odd = tmp_path_factory.mktemp("models") / name
    odd.mkdir()
    with pytest.raises(UserError, match=f"^{odd}: Apptainer cannot bind a path with a comma or a colon"):
        containers.prepare(config(model={"build": None, "name_or_path": str(odd)}), "images/x.sif")
    with pytest.raises(UserError, match=f"^{odd}/x.sif: Apptainer cannot bind a path"):
        containers.prepare(config(), f"{odd}/x.sif")
    (odd / "ca.crt").touch()
    os.environ["SSL_CERT_FILE"] = f"{odd}/ca.crt"
    with pytest.raises(UserError, match=f"^{odd}/ca.crt: Apptainer cannot bind a path"):
        containers.prepare(config(), "images/x.sif")


@pytest.mark.parametrize(
    ("name", "in_job", "refused"),
    [
        ("APPTAINER_BINDPATH", False, True),
        ("SINGULARITY_BINDPATH", True, True),
        ("APPTAINER_BIND", False, True),
        ("APPTAINER_BIND", True, False),  # `prepare` leaves it out
    ],
)
def test_a_folder_that_the_users_shell_has_apptainer_bind_must_exist(project, name, in_job, refused) -> None:
    os.environ |= {name: f"{project}:/mnt:ro,/no/such:/data", "SINGULARITY_BIND": str(project)}
    if not refused:
        containers.refuse_missing_binds(in_job)
        return
    with pytest.raises(UserError, match=rf"^{name} names /no/such, which .* does not have; take it out"):
        containers.refuse_missing_binds(in_job)


@pytest.mark.parametrize(
    ("variables", "arguments", "named"),
    [
        ({}, "--bind /data --cleanenv", "--apptainer-args has --cleanenv"),
        ({}, "-e", "--apptainer-args has -e"),
        ({}, "--containall", "--apptainer-args has --containall"),
        ({}, "-C", "--apptainer-args has -C"),
        ({}, "-ce", "--apptainer-args has -ce"),
        ({}, "--cleanenv=true", "--apptainer-args has --cleanenv=true"),
        ({"APPTAINER_CLEANENV": "1"}, "", "APPTAINER_CLEANENV is set"),
        ({"SINGULARITY_CONTAINALL": "true"}, "", "SINGULARITY_CONTAINALL is set"),
    ],
)
def test_apptainer_must_pass_the_environment_on(project, variables, arguments, named) -> None:
    """Without it, a stage would call an edited reward function and not the run's copy of it."""
    os.environ |= variables
    with pytest.raises(UserError, match=f"^{named}, so stages would not get the environment variables"):
        containers.refuse_clean_environment(arguments)


def test_other_options_of_apptainer_are_taken(project) -> None:
    os.environ |= {"APPTAINER_CLEANENV": "false"}
    containers.refuse_clean_environment("--bind '/a b' --contain -c --nv --cleanenv=false")
    containers.refuse_clean_environment("")


@pytest.mark.parametrize("in_job", [False, True])
def test_binds_may_have_spaces_and_several_options(project, in_job) -> None:
    """Apptainer takes both."""
    wanted = [f"{project}:/data", f"{project}:/other:ro,rw", f"{project}:/image:image-src=/a,id=1", str(project / "..")]
    os.environ |= {"APPTAINER_BIND": ", ".join(wanted) + ",", "APPTAINER_BINDPATH": f"{project}, {project}:/mnt:ro, rw"}
    containers.refuse_missing_binds(in_job)
    containers.prepare(config(), "images/x.sif", in_job)
    assert os.environ["APPTAINER_BIND"].startswith(",".join(wanted) + ",")


def test_what_singularity_bound_is_bound_too(project) -> None:
    """Apptainer does not read SINGULARITY_BIND beside APPTAINER_BIND."""
    os.environ["SINGULARITY_BIND"] = "/site"
    containers.prepare(config(), "images/x.sif")
    assert "/site" in binds()


def test_what_links_lead_to_is_bound(project, tmp_path_factory) -> None:
    """Of a run on a scratch file system, of a snapshot in the Hub's cache, and of what Snakemake's cache keeps."""
    outside = tmp_path_factory.mktemp("outside").resolve()
    snapshot, blob = outside / "hub" / "snapshots" / "abc", outside / "hub" / "blobs" / "123"
    targets = (outside / name for name in ("run", "policies", "cache"))
    for folder in (snapshot, blob.parent, project / "results" / "mini", *targets):
        folder.mkdir(parents=True)
    blob.touch()
    (snapshot / "config.json").symlink_to("../../blobs/123")
    (outside / "alias").symlink_to(outside / "run")
    (project / "results" / "other").symlink_to(outside / "alias")
    (project / "results" / "mini" / "policies").symlink_to(outside / "policies")
    os.environ["SNAKEMAKE_OUTPUT_CACHE"] = str(outside / "cache")
    containers.prepare(
        config(model={"build": None, "build_options": {}, "name_or_path": str(snapshot)}), "images/x.sif"
    )
    led_to = {snapshot, blob.parent, *(outside / name for name in ("run", "alias", "policies", "cache"))}
    assert {str(folder) for folder in led_to} <= set(binds())


def test_a_scratch_folder_of_another_node_is_left_out(project, tmp_path) -> None:
    os.environ["TMPDIR"] = str(tmp_path / "of-the-login-node")
    containers.prepare(config(), "images/x.sif")
    assert "TMPDIR" not in os.environ
    assert not any("of-the-login-node" in bind for bind in binds())


@pytest.mark.parametrize("tmpdir", [None, "/tmp"])
def test_a_job_does_not_bind_what_only_the_node_of_its_snakemake_has(project, tmp_path, tmpdir) -> None:
    """TMPDIR may be a folder of the SLURM job, and SLURM may set another one in each job."""
    of_controller = tmp_path / "job-1"
    of_controller.mkdir()
    os.environ |= {"TMPDIR": str(of_controller), "APPTAINER_BIND": "/of-other-nodes"}
    containers.prepare(config(), "images/x.sif")
    assert {str(of_controller), "/of-other-nodes"} <= set(binds())
    of_controller.rmdir()
    if tmpdir:
        os.environ["TMPDIR"] = tmpdir
    containers.prepare(config(), "images/x.sif", in_job=True)
    assert not {str(of_controller), "/of-other-nodes"} & set(binds())
    assert str(project / "home" / ".cache") in binds()


def test_gpus_are_requested_only_on_machines_with_gpus(project) -> None:
    containers.prepare(config(), "images/x.sif")
    assert ("APPTAINER_NV" in os.environ) == Path("/dev/nvidiactl").exists()


def test_an_image_outside_of_the_working_folder_is_bound(project, tmp_path_factory) -> None:
    real = tmp_path_factory.mktemp("images") / "x.sif"
    real.touch()
    containers.prepare(config(), "docker://example/image")
    assert not any("example" in bind for bind in binds())
    containers.prepare(config(), str(real))
    assert f"{real}:{real}:ro" in binds()


def test_an_image_for_another_machine_has_a_name_of_its_own(project, monkeypatch) -> None:
    name = containers.image(config().container, project)
    monkeypatch.setattr(containers.os, "uname", lambda: argparse.Namespace(machine="aarch64"))
    assert containers.image(config().container, project) == name.replace(".sif", "-aarch64.sif")


def test_profiles_are_linked_without_touching_those_of_the_user(tmp_path) -> None:
    links = list(profiles.install(ROOT / "profiles", tmp_path / "snakemake"))
    assert {link.name for link in (tmp_path / "snakemake").iterdir()} == {"allocation", "slurm"}
    assert len(links) == len(list(profiles.install(ROOT / "profiles", tmp_path / "snakemake"))), "again, the same"
    (tmp_path / "own" / "slurm").mkdir(parents=True)
    with pytest.raises(UserError, match="slurm: a profile of yours has this name"):
        list(profiles.install(ROOT / "profiles", tmp_path / "own"))
    with pytest.raises(UserError, match="no profiles here"):
        list(profiles.install(tmp_path / "nothing", tmp_path / "own"))
