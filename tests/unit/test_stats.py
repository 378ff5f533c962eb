"""Stats: totals that print as a table and go to loggers as plain numbers."""

import dataclasses
import json

import pytest

import agentcomm
from agentcomm.stats import BucketStats, Stats

STATS = Stats(
    rounds=7,
    buckets=14,
    dense_nbytes=4_000_000,
    wire_nbytes=1_000_000,
    encode_s=0.25,
    wait_s=1.5,
    decode_s=0.125,
    residual_norm=3.25,
    sparse_nbytes=12,
    chunk_nbytes=1 << 20,
    per_bucket=(
        BucketStats(0, 7, 3_000_000, 750_000, 0.2, 1.0, 0.1),
        BucketStats(1, 7, 1_000_000, 250_000, 0.05, 0.5, 0.025),
    ),
)


class Writer:
    """Has what TensorBoard's SummaryWriter has."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, scalar_value, global_step):
        assert tag not in self.scalars
        self.scalars[tag] = (scalar_value, global_step)


def test_ratio():
    assert STATS.ratio == 4.0
    assert Stats().ratio == 1.0
    assert Stats(dense_nbytes=100).ratio == 1.0  # nothing was sent: a world of one rank


def test_frozen():
    for value in (STATS, STATS.per_bucket[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.rounds = 3


def test_to_dict_is_plain_numbers():
    numbers = STATS.to_dict()
    assert json.loads(json.dumps(numbers))["ratio"] == 4.0
    assert {field.name for field in dataclasses.fields(Stats)} | {"ratio"} == set(numbers)
    assert numbers["per_bucket"][1] == {
        "index": 1,
        "rounds": 7,
        "dense_nbytes": 1_000_000,
        "wire_nbytes": 250_000,
        "encode_s": 0.05,
        "wait_s": 0.5,
        "decode_s": 0.025,
    }


def test_table():
    head, first, second, total, norm = str(STATS).splitlines()
    assert head.split() == "bucket rounds dense MB sent MB ratio encode s wait s decode s".split()
    assert first.split() == ["0", "7", "3.000", "0.750", "4.00", "0.200", "1.000", "0.100"]
    assert second.split() == ["1", "7", "1.000", "0.250", "4.00", "0.050", "0.500", "0.025"]
    assert total.split() == ["all", "7", "4.000", "1.000", "4.00", "0.250", "1.500", "0.125"]
    assert norm == "residual norm 3.25"
    assert len({len(line) for line in (head, first, second, total)}) == 1


def test_table_of_nothing():
    _, total, norm = str(Stats()).splitlines()
    assert total.split() == ["all", "0", "0.000", "0.000", "1.00", "0.000", "0.000", "0.000"]
    assert norm == "residual norm 0"


def test_log_writes_every_total():
    writer = Writer()
    STATS.log(writer, 42)
    assert writer.scalars["agentcomm/ratio"] == (4.0, 42)
    assert writer.scalars["agentcomm/wire_nbytes"] == (1_000_000, 42)
    names = {field.name for field in dataclasses.fields(Stats)} - {"per_bucket"} | {"ratio"}
    assert set(writer.scalars) == {f"agentcomm/{name}" for name in names}
    assert {step for _, step in writer.scalars.values()} == {42}


def test_log_with_a_prefix():
    writer = Writer()
    Stats().log(writer, 0, prefix="net/")
    assert all(tag.startswith("net/") for tag in writer.scalars)


def test_names_are_public():
    assert agentcomm.Stats is Stats
    assert agentcomm.BucketStats is BucketStats
