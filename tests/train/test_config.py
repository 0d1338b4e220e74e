"""Settings are refused before a process starts, in one line that says what, why and what to do."""

from __future__ import annotations

import pytest

from shardwright.errors import ConfigError
from shardwright.train.config import TrainConfig
from shardwright.train.launch_checks import check_devices


def refusal(given_ranks=None, **settings) -> str:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.parse(**settings).check(given_ranks)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_dp_shard_takes_the_rest_of_the_world():
    config = TrainConfig.parse(world=12, dp_replicate=2, tp=2).check()
    assert (config.world, config.dp_shard, config.batch_ranks) == (12, 3, 6)


def test_without_a_world_the_degrees_make_it():
    assert TrainConfig.parse(dp_replicate=2, cp_replicate=3).check().world == 6
    assert TrainConfig.parse().check().world == 1


def test_without_micro_batches_there_are_about_two_for_each_stage():
    assert TrainConfig.parse(pp=2).check().micro_batches == 4
    assert TrainConfig.parse(pp=3, batch_size=10).check().micro_batches == 5
    assert TrainConfig.parse().check().micro_batches is None


def test_torchrun_gives_the_world():
    config = TrainConfig.parse(dp_replicate=2).check(given_ranks=8)
    assert (config.world, config.dp_shard) == (8, 4)


def test_a_world_other_than_torchruns_is_refused():
    assert "8 ranks are running" in refusal(given_ranks=8, world=4)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"world": 4, "dp_replicate": 3}, "multiply to 3, which does not divide --world 4"),
        ({"world": 4, "dp_replicate": 2, "dp_shard": 1}, "multiply to 2, not to --world 4"),
        ({"world": 4, "ep": 3}, "--ep 3 does not divide the 4 data and context parallel ranks"),
        ({"world": 4, "tp": 2, "ep": 4}, "choose --ep from 1, 2"),
        ({"world": 3, "ep": 3}, "--experts 8 cannot be shared out evenly over --ep 3"),
        ({"top_k": 9}, "--top-k 9 is more than the --experts 8"),
        ({"tp": 8}, "--tp 8 does not divide the 4 attention heads"),
        ({"hidden": 100}, "multiple of 8"),
        ({"verify": True, "dtype": "bfloat16"}, "--verify compares to float32 rounding"),
        ({"verify": True, "resume": "newest", "out": "x"}, "--verify trains from the first step"),
        ({"resume": "newest"}, "add --out"),
        ({"data": "/no/such/file"}, "--data /no/such/file does not exist"),
        ({"data": ""}, "--data '' cannot be used"),
        ({"out": ""}, "--out '' cannot be used"),
        ({"out": "\udcff"}, r"--out '\udcff' cannot be used: its name is not of UTF-8"),
        ({"out": ".", "resume": ""}, "--resume '' cannot be used"),
        ({"data": "x" * 300}, "cannot be read: File name too long; name a file"),
        ({"data": "/dev/null"}, "--data /dev/null is a pipe or a device"),
        ({"steps": -1}, "--steps -1 cannot be used"),
        ({"world": 0}, "--world 0 cannot be used"),
        ({"lr": float("nan")}, "--lr nan cannot be used"),
        ({"timeout": 0}, "--timeout 0 cannot be used"),
        ({"dtype": "float16"}, "--dtype 'float16' cannot be used"),
        ({"dp_shart": 2}, "--dp-shart is not a setting"),
        ({"world": 6, "pp": 4}, "--pp 4 --dp-replicate 1 --cp-replicate 1 --tp 1 multiply to 4"),
        ({"pp": 4}, "--pp 4 has more stages than the model's 3 layers"),
        ({"pp": 2, "dp_replicate": 3}, "--batch-size 32 does not share out evenly over the 3 ranks"),
        ({"pp": 2, "micro_batches": 5}, "--micro-batches 5 do not divide the 32 sequences of a rank"),
        ({"pp": 2, "dp_shard": 32}, "--pp 2 needs as many micro-batches, and a rank's 1 sequences make 1"),
        ({"micro_batches": 2}, "--micro-batches are what a pipeline runs: add --pp"),
        ({"sp": True}, "--sp cuts what the ranks of --tp hold between attentions"),
        ({"cp": 3}, "--cp 3 cut a sequence into 6 parts, which do not divide --seq-len 128"),
        ({"cp": 2, "tp": 2, "sp": True, "seq_len": 100}, "--cp 2 --tp 2 cut a sequence into 8 parts"),
        ({"cp": 2, "ep": 4}, "--ep 4 does not divide the 2 data and context parallel ranks"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(settings, says):
    assert says in refusal(**settings)


def test_all_wrong_fields_are_named_at_once():
    message = refusal(world=-1, lr=0, top_k="many")
    assert all(flag in message for flag in ("--world", "--lr", "--top-k"))


def test_an_empty_file_and_an_empty_folder_are_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    assert "holds no text" in refusal(data=tmp_path / "empty.txt")
    assert "holds no text" in refusal(data=tmp_path)
    (tmp_path / "empty.txt").write_text("short")
    assert "5 bytes of text are too few" in refusal(data=tmp_path)


def test_more_ranks_than_memory_holds_are_refused():
    with pytest.raises(ConfigError, match="--world 1000000 starts as many processes"):
        check_devices(TrainConfig.parse(world=1_000_000))


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        TrainConfig.parse().steps = 3
