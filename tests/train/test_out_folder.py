"""A folder that cannot be written is refused before a process is started."""

from pathlib import Path

import pytest

from shardwright.errors import CheckpointError, ConfigError
from shardwright.train.config import TrainConfig
from shardwright.train.metrics import MetricsFile, StepRecord
from shardwright.train.run_folder import RunFolder, choose_folder


def test_an_out_below_a_file_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(
        ConfigError, match=r"cannot be written: Not a directory at .*; name a folder"
    ) as error:
        choose_folder(TrainConfig.parse(out=tmp_path / "file" / "run"))
    assert "\n" not in str(error.value)


def test_looking_leaves_nothing_behind(tmp_path):
    choose_folder(TrainConfig.parse(out=tmp_path / "runs" / "new"))
    assert not list(tmp_path.iterdir())


def test_what_can_be_no_folder_is_refused_before_a_process_is_started(tmp_path):
    with pytest.raises(ConfigError, match="memory://x is an address"):
        TrainConfig.parse(out="memory://x")
    assert TrainConfig.parse(out=f"file://{tmp_path}/run").out == tmp_path / "run"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="link is a link to what is not there"):
        choose_folder(TrainConfig.parse(out=tmp_path / "link"))


def test_a_second_run_in_a_folder_is_refused_until_the_first_one_ends(tmp_path):
    first, second = (RunFolder(tmp_path / "run", writes=True) for _ in range(2))
    first.lock()
    with pytest.raises(CheckpointError, match="being written by another process"):
        second.lock()
    first.close()
    second.lock()
    second.close()


def test_a_folder_that_may_not_be_looked_into_is_refused_in_one_line(tmp_path, monkeypatch):
    def refuse(path):  # as the system does, but for root
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_symlink", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written: Permission denied at .*; name a folder that"):
        choose_folder(TrainConfig.parse(out=tmp_path / "run"))


def test_a_run_that_another_has_overtaken_in_its_folder_writes_nothing(tmp_path):
    first, second = (RunFolder(tmp_path / "run", writes=True) for _ in range(2))
    first.lock()
    first.open(TrainConfig.parse(seed=1), 0)
    first.close()
    second.lock()
    with pytest.raises(ConfigError, match=r"File exists at .*metrics.jsonl; mend that, then --resume"):
        second.open(TrainConfig.parse(seed=2), 0)
    assert '"seed": 1' in (tmp_path / "run" / "config.json").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_what_the_disk_refuses_of_a_run_is_one_line(tmp_path):
    folder = RunFolder(tmp_path, writes=True)
    (tmp_path / "sample.txt").mkdir()
    with pytest.raises(ConfigError, match="cannot be written: Is a directory at"):
        folder.write("sample.txt", "text")
    (tmp_path / "loss.png").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"cannot be written: Is a directory at .*loss.png"):
        folder.draw()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: Not a directory at"):
        RunFolder(tmp_path / "file" / "run", writes=True).lock()
    with Path("/dev/full").open("w") as full:
        folder._metrics = MetricsFile(tmp_path / "metrics.jsonl", full)
        with pytest.raises(ConfigError, match="No space left on device"):
            folder.log(StepRecord(1, 1.0, None, 0.5, 1e-3, 2.0, 100.0, 10, 1.0))
        folder.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_was_removed_under_a_run_is_noticed(tmp_path, replaced):
    folder = RunFolder(tmp_path / "run", writes=True)
    folder.lock()
    folder.check()
    folder.path.rename(tmp_path / "elsewhere")
    if replaced:
        folder.path.mkdir()
    with pytest.raises(CheckpointError, match="was removed or renamed while the run goes on"):
        folder.check()
    folder.close()
