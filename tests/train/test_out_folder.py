"""A folder that cannot be written is refused before a process is started."""

import pytest

from shardwright.errors import ConfigError
from shardwright.train.config import TrainConfig
from shardwright.train.run_folder import choose_folder


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
