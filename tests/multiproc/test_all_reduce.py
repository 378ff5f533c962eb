"""``agentcomm.all_reduce``, and through it the numbers and shapes that codecs must survive."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from codec_cases import step_error
from ranks import run_ranks, run_ranks_raising
from toys import CODECS, SPARSE, ZERO_STAYS, all_equal, digest

import agentcomm
from agentcomm.collectives import reducer_stats


def reduced(rank, nranks, codec, tensors_of_ranks, op):
    tensors = [tensor.clone() for tensor in tensors_of_ranks[rank]]
    for tensor in tensors:
        assert agentcomm.all_reduce(tensor, codec, op=op) is None
    return tensors


def reduce_over(nranks, codec, make, op="mean"):
    """Return (per rank and tensor the result, inputs). make(rank) gives a rank's tensors."""
    inputs = [make(rank) for rank in range(nranks)]
    results = run_ranks(nranks, reduced, codec, inputs, op)
    assert all_equal([[digest([tensor]) for tensor in tensors] for tensors in results])
    return results[0], inputs


def check_within(codec, result, parts, scale=None):
    """Compare with the exact mean of ``parts``, for one block of values of normal size."""
    nranks = len(parts)
    mean = sum(part.double() for part in parts) / nranks
    largest = scale or max(part.double().abs().max().item() for part in parts)
    # n contributions, each divided by n, and the owner's encoding of the mean; n + 1 roundings of
    # the sum in fp32; 2^-24 relative for the scale itself.
    bound = largest * (2 * step_error(codec) + (nranks + 3) * 2.0**-24)
    assert (result.double() - mean).abs().max() <= bound


# ---- the interface -------------------------------------------------------------------------------


@pytest.mark.parametrize("nranks", [1, 2, 3, 5])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_ops(codec, nranks, op):
    def make(rank):
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(n, generator=generator) for n in (1, 255, 5_000, 100_000)]

    results, inputs = reduce_over(nranks, codec, make, op)
    for i, result in enumerate(results):
        parts = [tensors[i] for tensors in inputs]
        if nranks == 1:
            assert torch.equal(result, parts[0])
        else:
            check_within(codec, result / (nranks if op == "sum" else 1), parts)


def overlapping(rank, nranks, codec):
    tensors = [torch.full((size, 3), float(rank + i)) for i, size in enumerate((5, 70_000, 1, 900))]
    works = [agentcomm.all_reduce(tensor, codec, async_op=True) for tensor in tensors]
    for i in (2, 0, 3, 1):
        assert works[i].wait() is True
        assert works[i].is_completed()
        assert works[i].result() is tensors[i]
        assert works[i].get_future().wait() is tensors[i]
    rounds = reducer_stats().rounds
    again = agentcomm.all_reduce(tensors[0], codec, async_op=True)
    again.wait()
    assert reducer_stats().rounds == (rounds + 1 if nranks > 1 else 0)
    return digest(tensors), [tensor.unique().tolist() for tensor in tensors]


@pytest.mark.parametrize("nranks", [1, 3])
def test_several_in_flight(nranks):
    results = run_ranks(nranks, overlapping, "raw")
    assert all_equal(results)
    middle = (nranks - 1) / 2
    assert results[0][1] == [[middle + i] for i in range(4)]


def more_than_the_queue_holds(rank, nranks):
    tensors = [torch.full((300,), float(rank + i)) for i in range(200)]
    works = [agentcomm.all_reduce(tensor, "raw", async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    return [tensor.unique().tolist() for tensor in tensors]


def test_more_in_flight_than_the_queue_holds():
    for result in run_ranks(2, more_than_the_queue_holds):
        assert result == [[0.5 + i] for i in range(200)]


def many_kinds(rank, nranks):
    for nelems, codec, dtype in itertools.product(
        (1, 1000, 3), CODECS, (torch.float32, torch.bfloat16, torch.float64)
    ):
        for _ in range(2):
            tensor = torch.ones(nelems, dtype=dtype)
            agentcomm.all_reduce(tensor, codec)
            assert tensor[tensor != 0].eq(1).all()
            assert tensor.all() or (codec in SPARSE and tensor.any())


def test_many_kinds_of_tensors():
    run_ranks(2, many_kinds)


def wrong_calls(rank, nranks):
    wrong = {
        "op='max' is unknown": lambda: agentcomm.all_reduce(torch.ones(3), op="max"),
        "'int9' in spec 'int9' is no codec": lambda: agentcomm.all_reduce(torch.ones(3), "int9"),
        "timeout_s=-1 is out of range": lambda: agentcomm.all_reduce(torch.ones(3), timeout_s=-1),
        "not dense and contiguous": lambda: agentcomm.all_reduce(torch.ones(3, 4).t()),
        "dtype torch.int64 is not supported": lambda: agentcomm.all_reduce(torch.ones(3).long()),
    }
    for text, call in wrong.items():
        with pytest.raises(agentcomm.SpecError) as caught:
            call()
        assert text in str(caught.value)
    tensor = torch.full((3,), float(rank))  # nothing has been sent so far
    agentcomm.all_reduce(tensor)
    return tensor.tolist()


def test_wrong_calls_raise_on_the_calling_rank():
    assert run_ranks(2, wrong_calls) == [[0.5] * 3] * 2


DTYPES = [torch.float32, torch.float64]
DIFFERENT = {
    "spec": lambda rank: (torch.ones(5_000), "int8" if rank == 1 else "fp16", "mean"),
    "options": lambda rank: (torch.ones(50_000), f"int8[block={64 << (rank == 1)}]", "mean"),
    "size": lambda rank: (torch.ones(5_000 + (rank == 1)), "int8", "mean"),
    "dtype": lambda rank: (torch.ones(5_000).to(DTYPES[rank == 1]), "raw", "mean"),
    "much larger": lambda rank: (torch.ones(5_000 if rank == 1 else 5_000_000), "raw", "mean"),
}


def differing(rank, nranks, what):
    tensor, codec, op = DIFFERENT[what](rank)
    agentcomm.all_reduce(tensor, codec, op=op)


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_told(what, nranks):
    outcomes = run_ranks_raising(nranks, differing, what)
    assert [outcome.error for outcome in outcomes] == ["MismatchError"] * nranks
    if nranks == 3:  # with two there is no telling who is wrong
        assert "rank 1" in outcomes[0].text
        assert "rank 1" in outcomes[2].text


def on_a_subgroup(rank, nranks):
    group = dist.new_group([0, 2])
    tensor = torch.full((10,), float(rank))
    if rank == 1:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        assert agentcomm.all_reduce(tensor, group=group) is None
        assert agentcomm.all_reduce(tensor, group=group, async_op=True) is None
    else:
        agentcomm.all_reduce(tensor, "raw", group=group)
    mine = torch.full((10,), float(rank))
    agentcomm.all_reduce(mine, "raw")
    return tensor[0].item(), mine[0].item()


def test_group_and_non_member():
    assert run_ranks(3, on_a_subgroup) == [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)]


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("codec", ["raw", "fp16"])
def test_pc_030_mean_is_exact(codec, nranks):
    def make(rank):
        return [torch.full((n,), float(rank + 1)) for n in (1, 7, 300, 40_000)]

    results, _ = reduce_over(nranks, codec, make)
    assert [result.unique().tolist() for result in results] == [[(nranks + 1) / 2]] * 4


def test_pc_018_fp16_sum_does_not_overflow():
    results, _ = reduce_over(4, "fp16", lambda rank: [torch.full((n,), 4e4) for n in (10, 50_000)])
    assert [result.unique().tolist() for result in results] == [[4e4], [4e4]]


@pytest.mark.parametrize("nelems", [10, 50_000])
def test_pc_018_fp16_shows_an_overflow_of_one_rank(nelems):
    def make(rank):
        tensor = torch.ones(nelems)
        tensor[3] = 1e5 if rank == 1 else 1.0
        return [tensor]

    (result,), _ = reduce_over(4, "fp16", make)
    assert result[3] == math.inf
    assert result[torch.arange(nelems) != 3].unique().tolist() == [1.0]


@pytest.mark.parametrize("codec", ["raw", "bf16", "int8"])
def test_pc_018_others_have_the_range_of_float32(codec):
    (result,), inputs = reduce_over(4, codec, lambda rank: [torch.full((600,), 3e38 - rank * 1e37)])
    assert result.isfinite().all()
    check_within(codec, result, [tensors[0] for tensors in inputs])


def blocks(rank):
    """Blocks of 256 that are all of one kind, with what each may become."""
    one_hot = torch.zeros(256)
    one_hot[100] = 3.0
    return {
        "zero": torch.zeros(256),
        "negative zero": torch.full((256,), -0.0),
        "constant": torch.full((256,), -0.37),
        "one hot": one_hot,
        "subnormal": torch.full((256,), 1e-40),
        "smallest": torch.full((256,), 1.4e-45),
        "huge": torch.linspace(-1, 1, 256) * 3e38,
        "tiny and normal": torch.linspace(1e-38, 1e-30, 256),
    }


@pytest.mark.parametrize("nranks", [2, 3, 5])
@pytest.mark.parametrize("codec", CODECS)
def test_pc_023_special_blocks(codec, nranks):
    repeats = 40  # enough to be sharded on 3 and 5 ranks

    def make(rank):
        return [torch.cat([block for block in blocks(rank).values() for _ in range(repeats)])]

    (result,), _ = reduce_over(nranks, codec, make)
    if codec == "fp16":  # overflows by definition
        assert result[6 * repeats * 256 : 7 * repeats * 256].isinf().any()
        result = torch.where(result.isinf(), 0, result)
    assert result.isfinite().all()
    parts = result.view(len(blocks(0)), repeats, 256)
    for part, (name, block) in zip(parts, blocks(0).items(), strict=True):
        if name == "huge" and codec == "fp16":
            continue
        largest = block.abs().max().item()
        # fp16 and bf16 have an absolute step near zero; so has the mean in fp32, which is the sum
        # of n numbers divided by n, each of which may be subnormal.
        floor = {"fp16": 2.0**-25, "bf16": 2.0**-134}.get(codec, 0.0) * 2 + 2 * nranks * 2.0**-149
        bound = largest * (2 * step_error(codec) + (nranks + 3) * 2.0**-24) + floor
        assert (part.double() - block.double()).abs().max() <= bound, name
        if largest == 0:
            assert part.eq(0).all(), name
        if name == "one hot" and codec in ZERO_STAYS:
            assert not part[:, block == 0].any()
            if not codec.startswith("randk"):  # which draws some
                assert part[:, block != 0].all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_pc_020_non_finite_on_one_rank(codec, nranks, value):
    def make(rank):
        tensors = [torch.ones(1000), torch.ones(100_000)]
        for tensor in tensors:
            tensor[777] = value if rank == 1 else 1.0
        return tensors

    results, _ = reduce_over(nranks, codec, make)
    for result in results:
        bad = ~result.isfinite()
        if codec.startswith("randk"):  # if it draws the element, its block of drawn ones goes too
            assert bad[777] or result[777] == 0
            assert bad[777] == bad.any()
            assert bad.sum() <= 256
            continue
        assert bad[777]
        # The rest of the block may go with it, other blocks not.
        assert result[:768].isfinite().all()
        assert result[1024:].isfinite().all()


# ---- sizes and types -----------------------------------------------------------------------------

SHAPES = [(), (1,), (0, 4), (1, 7), (7, 1), (3, 0, 2), (2, 3, 4), (8, 4, 3, 3), (1, 65_537)]


@pytest.mark.parametrize("nranks", [2, 3, 5])
@pytest.mark.parametrize("codec", CODECS)
def test_pc_041_shapes(codec, nranks):
    def make(rank):
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(shape, generator=generator) for shape in SHAPES]

    results, inputs = reduce_over(nranks, codec, make)
    for i, (shape, result) in enumerate(zip(SHAPES, results, strict=True)):
        assert result.shape == shape
        if result.numel():
            check_within(codec, result, [tensors[i] for tensors in inputs])


@pytest.mark.parametrize("codec", CODECS)
def test_pc_032_fewer_elements_than_ranks(codec):
    def make(rank):
        return [torch.linspace(1, 2, n) * (rank + 1) for n in (1, 2, 3, 4)]

    results, inputs = reduce_over(5, codec, make)
    for i, result in enumerate(results):
        check_within(codec, result, [tensors[i] for tensors in inputs])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_pc_036_dtypes(codec, nranks, dtype):
    def make(rank):
        generator = torch.Generator().manual_seed(rank)
        return [torch.randn(n, generator=generator).to(dtype) for n in (3, 70_000)]

    results, inputs = reduce_over(nranks, codec, make)
    step = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-53}[dtype]
    for i, result in enumerate(results):
        parts = [tensors[i] for tensors in inputs]
        assert result.dtype == dtype
        if codec == "raw" and dtype == torch.float64:  # not through float32
            mean = sum(parts) / nranks
            assert (result - mean).abs().max() <= (nranks + 3) * step * 5
            continue
        mean = sum(part.double() for part in parts) / nranks
        largest = max(part.double().abs().max().item() for part in parts)
        # raw has the dtype's own step in the second phase; the result is rounded to it once more.
        half = max(step_error(codec), step if codec == "raw" else 0.0)
        bound = largest * (2 * half + step + (nranks + 3) * 2.0**-24)
        assert (result.double() - mean).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pc_035_values_beyond_65536(dtype):
    def make(rank):
        tensor = torch.zeros(100_000)
        tensor[70_000::999] = float(rank + 1)
        return [tensor.to(dtype)]

    (result,), inputs = reduce_over(2, "int8", make)
    assert torch.equal(result != 0, inputs[0][0] != 0)
    # 1.5, made of 1 and 2 with an error of half a step each; rounded to the dtype.
    assert (result[70_000::999] - 1.5).abs().max() <= 1.5 * (0.5 / 127 + 2.0**-8)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("codec", CODECS)
def test_pc_038_complex(codec, dtype):
    def make(rank):
        return [torch.full((300,), complex(1.0, rank), dtype=dtype)]

    (result,), inputs = reduce_over(3, codec, make)
    parts = [torch.view_as_real(tensors[0]) for tensors in inputs]
    check_within(codec, torch.view_as_real(result), parts)
    if codec in SPARSE:  # of topk, ranks keep different elements
        assert result.imag.any()
    else:
        assert result.imag.min() > 0.98
