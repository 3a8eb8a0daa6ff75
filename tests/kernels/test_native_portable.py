"""The C kernels as other CPUs get them: compiled without this one's best instructions, or for instructions that it does
not have, which are emulated then, they still agree."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from kernels.attention import cpu, reference
from kernels.linear import pack_tiles
from kernels.native.build import CannotBuild, Compiler, compile_library, find_compiler
from kernels.native.library import CMatrix, open_library, with_signatures
from kernels.native_linear import ProductTeam
from outrider import env
from tests.kernels.attention_cases import Piece, make_case, random_tree
from tests.kernels.test_attention import RNG, by_definition, run
from tests.kernels.test_quantize import FORMATS, activations_of, by_c, values_of

IS_X86 = platform.machine() in {"x86_64", "AMD64"}
EMULATED = Path(__file__).parent / "emulated"
AVX512 = ["-O1", "-D__AVX512F__", "-D__AVX512BW__", "-D__AVX512VL__", f"-I{EMULATED / 'avx512'}", "-Wno-psabi"]
BUILDS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-march=x86-64-v4"],
    "avx512-emulated": AVX512,
    "avx512-dots-emulated": [*AVX512, "-D__AVX512VNNI__", "-D__AVX512BF16__"],
    "avx-vnni-emulated": ["-O1", "-mavx2", "-mfma", "-D__AVXVNNI__", f"-I{EMULATED / 'avx_vnni'}"],
}
NEEDED = {"avx2": " avx2", "avx512": " avx512vl", "avx-vnni-emulated": " avx2"}
IN_ITS_PLACE = {  # CPUs that need not emulate
    "avx512-emulated": " avx512vl",
    "avx512-dots-emulated": " avx512_bf16",
    "avx-vnni-emulated": " avx_vnni",
}
PIECES = [Piece(300, 9, random_tree(RNG, 9)), Piece(250, 12), Piece(40, 1)]


def why_not(build: str) -> str | None:
    """Why a build is not for this CPU, if so."""
    words = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    if NEEDED.get(build, "") not in words:
        return f"this CPU has no{NEEDED[build]}"
    real = IN_ITS_PLACE.get(build)
    if real is None or real not in words or (build == "avx512-dots-emulated" and " amx_tile" in words):
        return None
    return f"this CPU has{real}, which other tests run"


def knows(compiler: Compiler, flags: list[str]) -> bool:
    """Whether the compiler has these instructions: what else fails is a fault of the kernels'."""
    command = [compiler.path, *flags, "-fsyntax-only", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module", params=BUILDS if IS_X86 else ["baseline"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if (reason := why_not(request.param)) is not None:
        pytest.skip(reason)
    try:
        compiler = find_compiler()
    except CannotBuild as error:
        pytest.skip(str(error))
    if not knows(compiler, BUILDS[request.param]):
        pytest.skip(f"{compiler.path} is too old for {request.param}")
    compiler = replace(compiler, instructions=tuple(BUILDS[request.param]))
    target = compile_library(compiler, tmp_path_factory.mktemp("build"), request.param)
    return with_signatures(ctypes.CDLL(str(target)))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 3e-6), (torch.bfloat16, 0.02)])
def test_attention(library: ctypes.CDLL, dtype: torch.dtype, atol: float) -> None:
    case = make_case(PIECES, heads=9, kv_heads=3, head_dim=64, dtype=dtype)
    out = run(partial(cpu.attention, library=library), case)
    torch.testing.assert_close(out, run(reference.attention, case), atol=atol, rtol=0.01)
    torch.testing.assert_close(out.double(), by_definition(case), atol=atol, rtol=0.01)


def check_products(library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Rows of any number give what the product is, and the same as among all."""
    (rows, k), n, wide = x.shape, len(weight), x.dtype is torch.float32
    packed, together = pack_tiles(weight), torch.empty(rows, n)
    matrix = CMatrix(packed.data_ptr(), None, n, k, weight.dtype is torch.float32)
    team = ProductTeam(library, 1)
    team.multiply(matrix, x, together, wide=wide, narrow=not wide)
    torch.testing.assert_close(together, (x.double() @ weight.double().T).float(), atol=1e-4, rtol=0)
    for count in range(1, rows):
        alone = torch.empty(count, n)
        team.multiply(matrix, x[:count], alone, wide=wide, narrow=not wide)
        assert torch.equal(alone, together[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn((30, 200), generator=generator), torch.randn((70, 200), generator=generator)
    check_products(library, x, weight.to(dtype))


def test_products_of_narrow_rows(library: ctypes.CDLL) -> None:
    if not library.outrider_has_bf16_dot():
        pytest.skip("rows are fp32 where there are no bf16 products")
    generator = torch.Generator().manual_seed(4)
    x, weight = torch.randn((40, 192), generator=generator), torch.randn((70, 192), generator=generator)
    check_products(library, x.bfloat16(), weight.bfloat16())


@pytest.mark.parametrize("method", FORMATS)
def test_quantised_products(library: ctypes.CDLL, method: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn((20, 208), generator=generator), torch.randn((70, 208), generator=generator)
    together = by_c(library, method, x, weight)
    expected = (activations_of(method, x) @ values_of(method, weight).T).float()
    torch.testing.assert_close(together, expected, atol=5e-3, rtol=0)
    for count in range(1, 20):
        assert torch.equal(by_c(library, method, x[:count].contiguous(), weight), together[:count])


def test_whole_numbers_come_out_the_same_with_other_instructions(library: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn((45, 576), generator=generator), torch.randn((70, 576), generator=generator)
    here = open_library(env.home() / "kernels")
    assert torch.equal(by_c(library, "int8_dynamic", x, weight), by_c(here, "int8_dynamic", x, weight))
