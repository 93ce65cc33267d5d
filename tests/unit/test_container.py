"""The container of the ranks: its command line, what must be there, and which image it was."""

import hashlib
import json
import os

import pytest

from rechpc.config import ContainerConfig, ContainerRuntime
from rechpc.errors import ConfigError
from rechpc.host import container

WRAPPER = ["sh", "-c", 'trap "" USR2 TERM; exec "$@"', "sh", "env"]


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "i.sif"
    path.write_bytes(b"image")
    return path


def apptainer(image, *binds):
    return ContainerConfig(runtime=ContainerRuntime.apptainer, image=str(image), binds=list(binds))


def test_without_a_container_the_command_runs_behind_a_shell_that_ignores_the_signals_of_a_job():
    argv = container.argv(ContainerConfig(), ["python", "x"], env={"B": "2", "A": "1,1"}, binds=["/r"], gpu=True)
    assert argv == [*WRAPPER, "A=1,1", "B=2", "python", "x"]


def test_apptainer_gets_a_clean_environment_the_gpus_and_every_bind():
    image = ContainerConfig(runtime=ContainerRuntime.apptainer, image="/i.sif", binds=["/opt/x:/y:ro"])
    argv = container.argv(image, ["python"], env={"A": "1"}, binds=["/r"], gpu=True)
    outer = ["apptainer", "exec", "--cleanenv", "--rocm", "--bind=/r", "--bind=/opt/x:/y:ro", "/i.sif"]
    assert argv == [*outer, *WRAPPER, "A=1", "python"]
    assert "--rocm" not in container.argv(image, ["python"], env={}, binds=[], gpu=False)


def test_an_image_that_is_not_there_is_named_with_the_way_to_get_one(tmp_path):
    with pytest.raises(ConfigError, match=r"container.image=.*/i.sif: no such file; build one with containers/build"):
        container.check(apptainer(tmp_path / "i.sif"))


def test_the_source_of_a_bind_that_is_not_there_is_named(image, tmp_path):
    there, missing = f"{tmp_path}:/data:ro", f"{tmp_path}/gone:/gone"
    with pytest.raises(ConfigError, match=f"container.binds: {missing}: {tmp_path}/gone does not exist"):
        container.check(apptainer(image, there, missing))
    container.check(apptainer(image, there))


def test_without_a_container_nothing_need_be_there():
    container.check(ContainerConfig(image="/nowhere/i.sif", binds=["/nowhere"]))
    container.check_runtime(ContainerConfig())


@pytest.mark.parametrize(("age_s", "believed"), [(0, True), (-5, True), (5, False)])
def test_the_digest_beside_an_image_is_believed_unless_the_image_is_newer(image, age_s, believed):
    beside = image.with_name("i.sif.sha256")
    beside.write_text("0123abcd  i.sif\n")
    written_at_s = image.stat().st_mtime
    os.utime(image, (written_at_s, written_at_s))
    os.utime(beside, (written_at_s - age_s, written_at_s - age_s))
    found = container.identify(image)
    assert (found.path, found.size_bytes) == (str(image), 5)
    assert found.sha256 == ("0123abcd" if believed else hashlib.sha256(b"image").hexdigest())


def test_an_image_without_a_digest_beside_it_is_read(image):
    assert container.identify(image).sha256 == hashlib.sha256(b"image").hexdigest()


FACTS = {
    "base": "rocm/primus:v26.8",
    "archs": ["gfx942", "gfx950"],
    "versions": {"torch": "2.14.0+rocm10.1.0", "torchrec": "1.8.0"},
    "fbgemm": "2026.10.8",
    "rocm": "10.1.0",
}


def test_versions_of_an_image_that_do_not_belong_together_are_warned_of(image):
    image.with_name("i.sif.json").write_text(json.dumps(FACTS))
    line = container.warning(apptainer(image))
    assert line.startswith(f"container.image={image}: versions: TorchRec 1.8.0 is not that of torch 2.14; nearest ")
    good = FACTS | {"versions": FACTS["versions"] | {"torchrec": "1.9.2"}}
    image.with_name("i.sif.json").write_text(json.dumps(good))
    assert container.warning(apptainer(image)) is None
    assert container.warning(ContainerConfig()) is None


def test_what_an_image_is_comes_from_beside_it_or_from_inside_where_it_is_newer(image, commands):
    assert container.facts(image) is None  # no apptainer, nothing beside it
    commands(apptainer=f"echo '{json.dumps({'asked': 'inside'})}'")
    assert container.facts(image) == {"asked": "inside"}
    image.with_name("i.sif.json").write_text(json.dumps({"asked": "beside"}))
    assert container.facts(image) == {"asked": "beside"}
    os.utime(image, (2e9, 2e9))
    assert container.facts(image) == {"asked": "inside"}
