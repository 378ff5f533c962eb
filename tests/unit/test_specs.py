"""Specs: text to codec and back, and errors that show what would be right."""

import copy
import dataclasses
import doctest
import importlib
import pickle
import re

import numpy as np
import pytest
import torch

import agentcomm
from agentcomm import _core, specs
from agentcomm.specs import Bf16, Codec, Fp16, Int8, RandK, Raw, Sign, TopK, parse, with_rounding

BLOCKS = [32, 64, 128, 256, 512, 1024, 2048, 4096]
CODECS = [
    Raw(),
    Fp16(),
    Bf16(),
    *(Int8(block=block, rounding=rounding) for block in BLOCKS for rounding in specs.ROUNDINGS),
    Sign(block=64),
    *(TopK(frac) for frac in (1e-9, 0.001, 0.01, 1 / 3, 0.5, 1)),
    TopK(0.01, "int8", 128, "stochastic", momentum=0.9, ramp=1000, scope="tensor"),
    RandK(0.25, values="sign", block=64),
]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_codec_prints_as_its_spec(codec):
    assert parse(str(codec)) == codec
    assert parse(codec) is codec
    assert str(parse(str(codec))) == str(codec)


@pytest.mark.parametrize(
    ("text", "codec", "printed"),
    [
        ("raw", Raw(), "raw"),
        ("fp16", Fp16(), "fp16"),
        ("bf16", Bf16(), "bf16"),
        ("int8", Int8(), "int8"),
        ("int8[]", Int8(), "int8"),
        ("raw[]", Raw(), "raw"),
        ("int8[block=256]", Int8(), "int8"),
        ("int8[block=256,rounding=nearest]", Int8(), "int8"),
        ("int8[block=128]", Int8(block=128), "int8[block=128]"),
        ("int8[rounding=stochastic]", Int8(rounding="stochastic"), "int8[rounding=stochastic]"),
        (
            "int8[rounding=stochastic,block=32]",
            Int8(block=32, rounding="stochastic"),
            "int8[block=32,rounding=stochastic]",
        ),
        (
            "  int8 [ block = 64 , rounding = stochastic ] ",
            Int8(64, "stochastic"),
            "int8[block=64,rounding=stochastic]",
        ),
        ("int8[block=64,]", Int8(64), "int8[block=64]"),
        ("topk:0.01", TopK(0.01), "topk:0.01"),
        ("topk:1e-2", TopK(0.01), "topk:0.01"),
        ("topk:1e-9", TopK(1e-9), "topk:0.000000001"),
        ("topk:1", TopK(1), "topk:1"),
        ("topk:1.0+raw[]", TopK(1), "topk:1"),
        ("topk:0.0123456789", TopK(0.012345679), "topk:0.012345679"),  # steps of 10^-9
        ("topk[keep_frac=0.01,values=int8]", TopK(0.01, "int8"), "topk:0.01+int8"),
        (
            " topk : 0.01 + int8 [ rounding = stochastic , block = 128 ] ",
            TopK(0.01, "int8", 128, "stochastic"),
            "topk:0.01+int8[block=128,rounding=stochastic]",
        ),
        ("randk:0.25+sign[block=64]", RandK(0.25, "sign", 64), "randk:0.25+sign[block=64]"),
        ("topk:0.01[momentum=0.9]", TopK(0.01, momentum=0.9), "topk:0.01[momentum=0.9]"),
        (
            "topk:0.001[ramp=100,scope=tensor]",
            TopK(0.001, ramp=100, scope="tensor"),
            "topk:0.001[ramp=100,scope=tensor]",
        ),
    ],
)
def test_parse(text, codec, printed):
    assert parse(text) == codec
    assert str(parse(text)) == printed


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "int9",
            "'int9' in spec 'int9' is no codec; there are raw, fp16, bf16, fp8, int8, int4,"
            " ternary, sign, topk, randk (did you mean 'int8' or",
        ),
        (
            "bf61",
            "fp8, int8, int4, ternary, sign, topk, randk (did you mean 'bf16'",
        ),
        (
            "topk",
            "'topk' does not say which fraction is kept; write topk:FRAC, for example"
            " 'topk:0.01' for one element in a hundred",
        ),
        ("randk:", "'' in spec 'randk:' is no number; write randk:FRAC"),
        ("topk:most", "'most' in spec 'topk:most' is no number; write topk:FRAC with a fraction"),
        ("topk:0", "keep_frac=0.0 is out of range; it must be above 0 and at most 1, in steps of"),
        ("topk:2", "keep_frac=2.0 is out of range; it must be above 0 and at most 1"),
        ("topk:-0.1", "keep_frac=-0.1 is out of range"),
        ("topk:1e-10", "keep_frac=1e-10 is out of range"),
        ("topk:nan", "'nan' in spec 'topk:nan' is no number"),
        ("topk:inf", "'inf' in spec 'topk:inf' is no number"),
        (
            "topk:0.01+int9",
            "values='int9' is unknown; topk sends values as raw, fp16, fp8, int8, int4, sign, for"
            " example 'topk:0.01+int8' (did you mean 'int8' or",
        ),
        ("topk:0.01+bf16", "values='bf16' is unknown; topk sends values as raw, fp16"),
        ("topk:0.01+", "values='' is unknown"),
        ("topk:0.01+int8[values=int8]", "values stands twice in spec"),
        ("topk:0.01[keep_frac=0.1]", "keep_frac stands twice in spec"),
        ("topk:0.01[block=64]", "block=64 with values='raw': these have no blocks"),
        ("topk:0.01+sign[rounding=stochastic]", "rounding='stochastic' with values='sign': these"),
        ("topk:0.01[scope=layer]", "scope='layer' is unknown; it must be 'tile' or 'tensor'"),
        ("randk:0.01[scope=tile]", "'scope=tile' in spec 'randk:0.01[scope=tile]' is no option"),
        ("topk:0.01[momentum=1]", "momentum=1.0 is out of range; it must be a number in 0..0.9999"),
        ("topk:0.01[momentum=nan]", "momentum must be a number"),
        ("topk:0.01[momentum=much]", "momentum must be a number"),
        ("topk:0.01[ramp=-1]", "ramp=-1 is out of range; it must be a whole number in 0.."),
        ("topk:0.01[ramp=0.5]", "ramp must be a whole number"),
        (
            "int8:0.5",
            "'int8:0.5' is no spec: int8 sends every element and takes neither a fraction nor"
            " values; write 'int8', or for example 'topk:0.01+int8' to send the largest",
        ),
        ("raw+int8", "'raw+int8' is no spec: raw sends every element"),
        ("", "'' is no spec; write name[option=value,...], for example 'int8[block=128]'"),
        ("8int", "'8int' is no spec; write name[option=value,...]"),
        ("int8[block=128", "'int8[block=128' is no spec; write name[option=value,...]"),
        ("int8]", "is no spec; write name"),
        ("int8[[block=128]]", "is no spec; write name"),
        ("int8[block=128] fp16", "is no spec; write name"),
        (
            "int8[blocks=128]",
            "'blocks=128' in spec 'int8[blocks=128]' is no option; there are block, rounding"
            " (did you mean 'block'?)",
        ),
        ("int8[128]", "'128' in spec 'int8[128]' is no option; write block=128"),
        ("int8[block]", "'block' in spec 'int8[block]' has no value; write block=VALUE"),
        ("int8[block=]", "'block=' in spec 'int8[block=]' has no value; write block=VALUE"),
        ("raw[block=128]", "'block=128' in spec 'raw[block=128]' is no option; raw has none"),
        (
            "int8[block=64,block=64]",
            "option 'block' stands twice in spec 'int8[block=64,block=64]'",
        ),
        ("int8[block=big]", "'block=big' in spec 'int8[block=big]': block must be a whole number"),
        ("int8[block=128.0]", "block must be a whole number"),
        (
            "int8[block=100]",
            "block=100 is out of range; it must be a power of two in 32..4096, for example"
            " block=256",
        ),
        ("int8[block=16]", "block=16 is out of range; it must be a power of two in 32..4096"),
        ("int8[block=8192]", "block=8192 is out of range; it must be a power of two in 32..4096"),
        ("int8[block=0]", "block=0 is out of range"),
        ("int8[block=-256]", "block=-256 is out of range"),
        ("int8[rounding=up]", "rounding='up' is unknown; it must be 'nearest' or 'stochastic'"),
        (None, "a spec is a text such as 'int8' or a codec object, not NoneType None"),
        (8, "a spec is a text such as 'int8' or a codec object, not int 8"),
        (Int8, "a spec is a text such as 'int8' or a codec object, not type <class"),
        (b"int8", "a spec is a text such as 'int8' or a codec object, not bytes b'int8'"),
    ],
)
def test_parse_shows_what_would_be_right(spec, message):
    with pytest.raises(agentcomm.SpecError, match=re.escape(message)):
        parse(spec)


@pytest.mark.parametrize("block", [0, 16, 33, 8192, -32, 2**40, 128.0, "128", None, True])
def test_int8_checks_its_block(block):
    wrong = "out of range" if type(block) is int else f"a {type(block).__name__}"
    expected = re.escape(f"block={block!r} is {wrong}; it must be a power")
    with pytest.raises(agentcomm.SpecError, match=expected):
        Int8(block=block)


@pytest.mark.parametrize("rounding", ["", "Nearest", None, 1])
def test_int8_checks_its_rounding(rounding):
    with pytest.raises(
        agentcomm.SpecError, match=re.escape(f"rounding={rounding!r} is unknown; it must be")
    ):
        Int8(rounding=rounding)


def test_spec_error_is_a_value_error():
    assert issubclass(agentcomm.SpecError, ValueError)
    assert issubclass(agentcomm.SpecError, agentcomm.AgentCommError)
    with pytest.raises(ValueError, match="is no codec"):
        parse("zip")


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codecs_are_values(codec):
    assert copy.deepcopy(codec) == codec
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert hash(pickle.loads(pickle.dumps(codec))) == hash(codec)
    assert eval(repr(codec), {cls.__name__: cls for cls in specs.CODECS.values()}) == codec
    assert not hasattr(codec, "__dict__")
    for field in dataclasses.fields(codec):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(codec, field.name, 64)


def test_different_codecs_differ():
    assert len(set(CODECS)) == len(CODECS) == len({str(codec) for codec in CODECS})
    assert Fp16() != Bf16()


def test_the_core_and_the_package_know_the_same_codecs():
    rows = _core.codec_table()
    assert list(specs.CODECS) == [row["name"] for row in rows]
    for row in rows:
        cls = specs.CODECS[row["name"]]
        assert issubclass(cls, Codec)
        codec = cls(0.5) if row["sparse"] else cls()
        assert codec.to_tuple()[0] == row["id"]
        assert codec.lossless == row["lossless"]
        assert codec.feedback_default == row["feedback"]
        assert getattr(agentcomm, cls.__name__) is cls
        assert cls.__doc__
        default = {field.name: field.default for field in dataclasses.fields(cls)}
        if not row["sparse"]:  # whose blocks and rounding are those of the values
            assert default.get("block", 0) == row["block_nelems"]
            assert ("rounding" in default) == row["stochastic"]


def test_core_is_told_of_fraction_and_values():
    assert TopK(0.01).to_tuple() == (16, 0, 0, 10_000_000, 0)
    assert TopK(1e-9, "fp16").to_tuple() == (16, 0, 0, 1, 2)
    assert RandK(1, "int8", 64, "stochastic").to_tuple() == (17, 64, 1, 10**9, 5)
    assert RandK(1 / 3, "sign").to_tuple() == (17, 256, 0, 333_333_333, 8)


@pytest.mark.parametrize("frac", [0, -1, 1.5, 4e-10, float("nan"), "0.1", None, True])
def test_topk_checks_its_fraction(frac):
    wrong = "out of range" if type(frac) in (int, float) else f"a {type(frac).__name__}"
    with pytest.raises(agentcomm.SpecError, match=re.escape(f"keep_frac={frac!r} is {wrong}")):
        TopK(frac)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topk:0_1", "'0_1' in spec 'topk:0_1' is no number"),
        ("topk:\u0660.\u0661", "is no number"),
        ("int8[block=\u0662\u0665\u0666]", "block must be a whole number"),
        ("int8[block=2_5_6]", "block must be a whole number"),
        ("int8[block=+256]", "block must be a whole number"),
        ("INT8", "(did you mean 'int8'"),
        ("topk:0.01+INT8", "(did you mean 'int8'"),
        (f"int8[block={'1' * 5000}]", "is out of range: it has 5000 digits"),
    ],
)
def test_numbers_and_names_are_what_people_write(spec, message):
    with pytest.raises(agentcomm.SpecError, match=re.escape(message)) as caught:
        parse(spec)
    assert len(str(caught.value)) < 400


def test_numbers_of_numpy_are_told_from_pythons():
    for make in (lambda n: Int8(block=n), lambda n: TopK(0.1, ramp=n)):
        with pytest.raises(agentcomm.SpecError, match=r"int64\(128\) is a numpy\.int64; it must"):
            make(np.int64(128))


def test_a_residual_would_not_help_stochastic_ternary():
    assert parse("ternary").feedback_default
    assert not parse("ternary[rounding=stochastic]").feedback_default


@pytest.mark.parametrize("option", ["momentum=0.5", "ramp=9"])
def test_what_belongs_to_a_training_is_refused_elsewhere(option):
    with pytest.raises(agentcomm.SpecError, match=r"momentum= and ramp= of topk:0\.5\["):
        agentcomm.encode(torch.ones(3), f"topk:0.5[{option}]")


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_core_accepts_what_the_package_accepts(codec):
    assert _core.frame_nbytes(codec.to_tuple(), 1, 1, False) > _core.HEADER_NBYTES


@pytest.mark.parametrize(
    ("spec", "rounding", "expected"),
    [
        ("int8", None, "int8"),
        ("int8", "nearest", "int8"),
        ("int8", "stochastic", "int8[rounding=stochastic]"),
        ("int8[block=32]", "stochastic", "int8[block=32,rounding=stochastic]"),
        ("int8[rounding=stochastic]", "nearest", "int8[rounding=stochastic]"),
        ("fp16", "stochastic", "fp16"),
        ("raw", "stochastic", "raw"),
        ("topk:0.01", "stochastic", "topk:0.01"),
        ("topk:0.01+fp16", "stochastic", "topk:0.01+fp16"),
        ("topk:0.01+sign", "stochastic", "topk:0.01+sign"),
        ("randk:0.1+int8", "stochastic", "randk:0.1+int8[rounding=stochastic]"),
    ],
)
def test_a_default_rounding_fills_in_what_the_spec_leaves_open(spec, rounding, expected):
    assert str(with_rounding(parse(spec), rounding)) == expected


@pytest.mark.parametrize(
    "name", ["agentcomm.specs", "agentcomm.frames", "agentcomm.errors", "agentcomm.stats"]
)
def test_examples_in_docstrings(name):
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.failed == 0
    assert outcome.attempted > 0 or name.endswith(("errors", "stats"))
