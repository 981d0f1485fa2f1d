"""What executor and workers are started with."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from executor.engines.base import EngineInfo
from serve.children import Children
from serve.config import Config
from tests.recordings.build_tokenizers import byte_level

INFO = EngineInfo("replay", 300, 500, ())


def test_everybody_has_an_address_in_the_directory() -> None:
    children = Children(Config(num_serve_frontends=2), Path("/run/t"))
    assert children.frontends == ["ipc:///run/t/frontend-0", "ipc:///run/t/frontend-1"]
    assert (children.executor, children.worker(3)) == ("ipc:///run/t/executor", "ipc:///run/t/worker-3")


def test_the_replay_engine_takes_its_vocabulary_from_the_tokenizer_unless_it_has_one() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|end|>")
    own = Children(Config(engine="replay"), Path()).engine_args(None, tokenizer)["config"]
    assert own == {"vocab_size": len(tokenizer), "special_token_ids": tokenizer.all_special_ids}
    given = Children(Config(engine="replay", engine_config={"vocab_size": 7}), Path()).engine_args(None, tokenizer)
    assert given["config"] == own | {"vocab_size": 7}


def test_a_workers_config_has_the_table_of_post_processors_that_it_is_given() -> None:
    children = Children(Config(num_postprocess_workers=2, stream_interval=3), Path("/run/t"))
    config = children.worker_config(INFO, "there", "serve.post_processors:POST_PROCESSORS", "records")
    assert config["postproc"]["post_processors"] == "serve.post_processors:POST_PROCESSORS"
    assert (config["executor"], config["frontends"]) == (children.executor, children.frontends)
    assert (config["postproc"]["vocab_size"], config["stream_interval"], config["record_dir"]) == (300, 3, "records")
    assert children.worker_config(INFO, "there")["postproc"]["post_processors"].startswith("postproc_workers.deltas:")
