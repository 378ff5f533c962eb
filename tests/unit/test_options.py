"""Every keyword of attach, out of range: SpecError names the keyword, the value, and what it may"
" be."""

import inspect
import math
import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import agentcomm
from agentcomm import _core
from agentcomm._options import Options

BLOCK = "it must be a power of two in 32..4096"
CHUNK = 'it must be "auto" or a number of dense bytes in 4096..67108864'
SECONDS = "it must be None or seconds above 0 and below 1e+08"

# keyword: [(value, what the message says)]
WRONG = {
    "spec": [
        ("int9", "'int9' in spec 'int9' is no codec; there are raw, fp16, bf16, fp8, int8, int4"),
        ("int8[block=100]", f"block=100 is out of range; {BLOCK}"),
        (None, "a spec is a text such as 'int8' or a codec object, not NoneType None"),
    ],
    "chunk_nbytes": [
        (4095, f"chunk_nbytes=4095 is out of range; {CHUNK}"),
        ((64 << 20) + 1, f"chunk_nbytes=67108865 is out of range; {CHUNK}"),
        (0, f"chunk_nbytes=0 is out of range; {CHUNK}"),
        (-1, f"chunk_nbytes=-1 is out of range; {CHUNK}"),
        (1e6, f"chunk_nbytes=1000000.0 is out of range; {CHUNK}"),
        (True, f"chunk_nbytes=True is out of range; {CHUNK}"),
        ("1M", f"chunk_nbytes='1M' is out of range; {CHUNK}"),
        (None, f"chunk_nbytes=None is out of range; {CHUNK}"),
    ],
    "feedback": [
        ("yes", 'feedback=\'yes\' is unknown; it must be True, False, "auto" or "bf16"'),
        (None, 'feedback=None is unknown; it must be True, False, "auto" or "bf16"'),
        (2, 'feedback=2 is unknown; it must be True, False, "auto" or "bf16"'),
        (1, 'feedback=1 is unknown; it must be True, False, "auto" or "bf16"'),
    ],
    "rules": [
        (
            {"*": "int7"},
            "'int7' in spec 'int7' is no codec; there are raw, fp16, bf16, fp8, int8, int4",
        ),
        ({"*": 8}, "a spec is a text such as 'int8' or a codec object, not int 8"),
        ({"*.bias": "raw", "*": "int8[block=1]"}, f"block=1 is out of range; {BLOCK}"),
    ],
    "min_compress_nelems": [
        (
            -1,
            "min_compress_nelems=-1 is out of range; it must be a whole number in"
            " 0..4611686018427387904",
        ),
        (1.5, "min_compress_nelems=1.5 is a float; it must be a whole number"),
        ("many", "min_compress_nelems='many' is a str; it must be a whole number"),
        (True, "min_compress_nelems=True is a bool; it must be a whole number"),
    ],
    "warmup_nrounds": [
        (-1, "warmup_nrounds=-1 is out of range; it must be a whole number in 0..2147483648"),
        (
            2**31 + 1,
            "warmup_nrounds=2147483649 is out of range; it must be a whole number in 0..2147483648",
        ),
        (0.5, "warmup_nrounds=0.5 is a float; it must be a whole number"),
        (None, "warmup_nrounds=None is a NoneType; it must be a whole number"),
    ],
    "rounding": [
        ("up", "rounding='up' is unknown; it must be 'nearest' or 'stochastic'"),
        (1, "rounding=1 is unknown; it must be 'nearest' or 'stochastic'"),
        ("", "rounding='' is unknown; it must be 'nearest' or 'stochastic'"),
    ],
    "seed": [
        (-1, "seed=-1 is out of range; it must be a whole number in 0..4294967295"),
        (2**32, "seed=4294967296 is out of range; it must be a whole number in 0..4294967295"),
        (None, "seed=None is a NoneType; it must be a whole number in 0..4294967295"),
        ("0", "seed='0' is a str; it must be a whole number in 0..4294967295"),
    ],
    "timeout_s": [
        (0, f"timeout_s=0 is out of range; {SECONDS}"),
        (-3.0, f"timeout_s=-3.0 is out of range; {SECONDS}"),
        (math.nan, f"timeout_s=nan is out of range; {SECONDS}"),
        (math.inf, f"timeout_s=inf is out of range; {SECONDS}"),
        (1e8, f"timeout_s=100000000.0 is out of range; {SECONDS}"),
        ("30", f"timeout_s='30' is out of range; {SECONDS}"),
        (True, f"timeout_s=True is out of range; {SECONDS}"),
    ],
    "name": [
        (7, "name=7 is no text; it must be None or a text"),
    ],
}
CASES = [
    pytest.param(keyword, value, message, id=f"{keyword}={value!r}")
    for keyword, cases in WRONG.items()
    for value, message in cases
]

RIGHT = {
    "spec": ["raw", "int8[block=32]", agentcomm.Int8(64, "stochastic"), agentcomm.Fp16()],
    "chunk_nbytes": ["auto", 4096, 5000, 64 << 20],
    "feedback": [True, False, "auto"],
    "rules": [{}, {"*": "fp16"}, {"*bias": agentcomm.Raw()}],
    "min_compress_nelems": [0, 1 << 40],
    "warmup_nrounds": [0, 1000],
    "rounding": [None, "nearest", "stochastic"],
    "seed": [0, 2**32 - 1],
    "timeout_s": [None, 1, 0.5, 1e7],
    "name": [None, "generator"],
}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """A DDP in a group of one rank: attach needs nobody else."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DistributedDataParallel(torch.nn.Linear(3, 2))
    dist.destroy_process_group()


def test_no_keyword_is_forgotten():
    keywords = set(inspect.signature(agentcomm.attach).parameters) - {"ddp", "group"}
    assert keywords == set(WRONG) == set(RIGHT)
    assert keywords == set(Options.__dataclass_fields__)


@pytest.mark.parametrize(("keyword", "value", "message"), CASES)
def test_attach_refuses(ddp, keyword, value, message):
    with pytest.raises(agentcomm.SpecError, match=re.escape(message)):
        agentcomm.attach(ddp, **{keyword: value})
    assert not ddp._comm_hooks


@pytest.mark.parametrize(("keyword", "value", "message"), CASES)
def test_hook_state_refuses_at_once(keyword, value, message):
    """Not in the first backward pass, when it is too late to see where it came from."""
    with pytest.raises(agentcomm.SpecError, match=re.escape(message)):
        agentcomm.HookState(**{keyword: value}, module=torch.nn.Linear(3, 2))


@pytest.mark.parametrize("keyword", RIGHT)
def test_what_is_in_range_is_taken(keyword):
    for value in RIGHT[keyword]:
        state = agentcomm.HookState(**{keyword: value}, module=torch.nn.Linear(3, 2))
        assert getattr(state.options, keyword) == value


def test_unknown_keyword():
    with pytest.raises(TypeError, match="chunk_bytes"):
        agentcomm.HookState(chunk_bytes=3)


def test_feedback_with_a_lossless_codec():
    with pytest.raises(
        agentcomm.SpecError,
        match=r'feedback=True with the lossless codec raw.*leave feedback at "auto"',
    ):
        agentcomm.HookState("raw", feedback=True)
    for feedback in (False, "auto"):
        assert (
            agentcomm.HookState("raw", feedback=feedback).options.lane(agentcomm.Raw())[1] is False
        )


@pytest.mark.parametrize(
    ("feedback", "spec", "kept"),
    [
        ("auto", "int8", True),
        ("auto", "fp16", False),
        ("auto", "bf16", False),
        ("auto", "topk:0.01", True),
        ("bf16", "int8", True),
        ("bf16", "fp16", False),
        (True, "fp16", True),
        (False, "int8", False),
    ],
)
def test_feedback_auto_is_what_suits_the_codec(feedback, spec, kept):
    options = Options(spec, feedback=feedback)
    lane = options.lane(options.codec())
    assert lane[:3] == (agentcomm.specs.parse(spec).to_tuple(), kept, feedback == "bf16")
    assert lane[3:] == (False, 0.0)


def test_lanes_of_sparse_codecs():
    options = Options("topk:0.01+int8[scope=tensor,momentum=0.9]")
    assert options.lane(options.codec())[1:] == (True, False, True, 0.9)


def test_rounding_reaches_the_rules():
    options = Options("int8", rounding="stochastic", rules={"a": "int8[block=32]", "b": "fp16"})
    assert str(options.codec()) == "int8[rounding=stochastic]"
    assert {pattern: str(codec) for pattern, codec in options.rule_codecs().items()} == {
        "a": "int8[block=32,rounding=stochastic]",
        "b": "fp16",
    }


def test_pattern_that_matches_nothing_lists_near_names(ddp):
    with pytest.raises(
        agentcomm.SpecError, match=r"pattern 'weights' in rules matches no parameter .*'weight'"
    ):
        agentcomm.attach(ddp, rules={"weights": "raw"})
    with pytest.raises(
        agentcomm.SpecError,
        match="pattern 'zzz' in rules matches no parameter; there are weight, bias",
    ):
        agentcomm.attach(ddp, rules={"zzz": "raw"})


def test_rules_need_names():
    with pytest.raises(
        agentcomm.StateError, match=r"pass module= to HookState, or use agentcomm\.attach"
    ):
        agentcomm.HookState(rules={"*": "raw"})


def test_group_of_another_ddp(ddp):
    other = dist.new_group([0])
    with pytest.raises(
        agentcomm.StateError,
        match=re.escape("group= has ranks [0], but the DDP was built on another group, with ranks"),
    ):
        agentcomm.attach(ddp, group=other)
    dist.destroy_process_group(other)


def test_what_is_no_ddp():
    with pytest.raises(
        TypeError, match="attach takes a DistributedDataParallel module, not Linear; wrap the model"
    ):
        agentcomm.attach(torch.nn.Linear(3, 2))


def test_limits_are_the_core_s():
    assert 1 << _core.CHUNK_LOG2_MIN == 4096
    assert 1 << _core.CHUNK_LOG2_MAX == 64 << 20


def test_every_option_is_compared_or_local():
    """Two ranks with different settings find out, unless the option is a rank's own business."""
    local = {"chunk_nbytes", "timeout_s", "rounding"}  # rounding shows in the specs
    config = Options().config()
    assert set(RIGHT) - local <= set(config)
    stochastic = Options(rounding="stochastic").config()
    assert stochastic != config
