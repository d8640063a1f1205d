import json
from pathlib import Path

import pytest

from ds_stream.config import load_config, parse_config
from rings import tiny_config

CONFIGS = sorted((Path(__file__).parent.parent / "ds_configs").glob("*.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_load_resolve_and_can_be_fed_back(path: Path):
    config = load_config(path)
    for num_stages in (1, 2, 4):
        resolved = config.resolve(num_stages)
        again = parse_config(json.loads(resolved.to_json()))
        assert again == resolved
        assert again.resolve(num_stages) == resolved


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"batch": {"max_row": 2}}, r"stream\.batch\.max_row: not a key; did you mean max_rows"),
        ({"vido": {}}, r"stream\.vido: not a key; did you mean video"),
        ({"batch": {"max_rows": "two"}}, r'stream\.batch\.max_rows: .*integer, got "two"'),
        ({"batch": {"max_rows": True}}, r"stream\.batch\.max_rows: .*integer, got true"),
        ({"batch": {"max_rows": 0}}, r"stream\.batch\.max_rows: .*greater than or equal to 1, got 0"),
        ({"batch": {"max_rows": "auto"}}, r'stream\.batch\.max_rows: .*integer, got "auto"'),
        ({"video": {"width": 200}}, r"stream\.video\.width: .*multiple of 16, got 200"),
        ({"noise": {"steps": []}}, r"stream\.noise\.steps: .*at least 1 item"),
        ({"noise": {"steps": [200, 700]}}, r"stream\.noise: steps must fall strictly"),
        ({"noise": {"steps": [1001, 3]}}, r"stream\.noise: steps must fall strictly and lie in 1\.\.1000"),
        ({"context": {"lead": 3}}, r"stream\.context\.lead is 3 but a chunk has 3 passes; give a lead from 0 to 2"),
        (
            {"context": {"num_latent_frames_per_chunk": 3}},
            r"stream\.context\.num_window_latent_frames is 2 but a chunk alone has 3",
        ),
        (
            {"stages": {"partition": [0, 3, 6]}},
            r"stream\.stages\.partition \[0, 3, 6\] covers 6 layers but the model has 11 \(.*\); .* from 0 to 11",
        ),
        ({"stages": {"partition": [0, 4, 4, 11]}}, r"must rise strictly"),
        ({"slo": {"chunk_latency_ms": 0}}, r"stream\.slo\.chunk_latency_ms: input should be greater than 0, got 0"),
        ({"live": {"when_full": "drop"}}, r"stream\.live\.when_full: input should be 'block' or 'drop_oldest'"),
        ({"stages": {"partition": "uniform"}}, r"stream\.stages\.partition"),
        ({"model": {"in_channels": 36}}, r"stream\.model\.in_channels is 36; give 16 .* or 32 \(with the source's"),
        ({"model": {"out_channels": 8}}, r"stream\.model\.out_channels is 8 but vae\.z_dim is 16"),
        (
            {"context": {"adaptive_sinks": True, "num_sink_latent_frames": 0}},
            r"stream\.context\.adaptive_sinks is on but context\.num_sink_latent_frames is 0",
        ),
        (
            {"noise": {"motion_aware": True, "motion_range": 0.9}},
            r"stream\.noise: motion_range 0\.9 must be below strength 0\.8",
        ),
        (
            {"model": {"loras": [{"path": "x", "scal": 2.0}]}},
            r"stream\.model\.loras\.0\.scal: not a key; did you mean scale",
        ),
        ({"vae": {"z_dim": 8}}, r"latent_mean has 16 entries but z_dim is 8"),
    ],
)
def test_a_mistake_is_one_error_that_names_the_key(sections: dict, message: str):
    with pytest.raises(ValueError, match=message):
        tiny_config(**sections)


def test_a_misspelt_deepspeed_key_is_an_error_too():
    with pytest.raises(ValueError, match=r"steps_per_prnt: not a key here; did you mean steps_per_print"):
        parse_config({"steps_per_prnt": 1, "stream": {}})


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ValueError, match=r"(?s)widht.*max_row"):
        tiny_config(batch={"max_row": 1}, video={"widht": 1})


def test_overrides_reach_their_key(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(tiny_config().to_json())
    config = load_config(path, ("stream.batch.max_rows=3", "stream.context.sink_positions=absolute"))
    assert config.stream.batch.max_rows == 3
    assert config.stream.context.sink_positions == "absolute"
    with pytest.raises(ValueError, match=r"--set nonsense: write key=value"):
        load_config(path, ("nonsense",))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[]", "must hold a JSON object"), (None, "cannot read config")]
)
def test_an_unreadable_file_is_one_error(tmp_path: Path, text: str | None, message: str):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(path)


def test_more_stages_than_layers_is_an_error():
    with pytest.raises(ValueError, match=r"6 ranks were started but the model has 3 blocks.*--num_gpus 5"):
        tiny_config().resolve(6)


def test_a_partition_for_other_ranks_is_an_error():
    config = tiny_config(stages={"partition": [0, 4, 11]})
    with pytest.raises(ValueError, match=r"has 2 stages but 4 ranks were started; start 2 ranks"):
        config.resolve(4)
