"""The Triton form without a GPU: right in the interpreter, and compiled for sm_90 within the registers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from strop.kernels.linear_logprob import linear_logprob

triton = pytest.importorskip("triton")
HERE = Path(__file__).resolve().parent


@pytest.mark.slow
def test_the_interpreter_agrees_with_log_softmax():
    cases = HERE / "interpreted_linear_logprob.py"
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", cases],
        capture_output=True, text=True, cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"^\d+ passed", run.stdout, re.MULTILINE), run.stdout


def compiled_for_sm_90(dtype, flags):
    """The kernel as a launch would have it compiled."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from strop.kernels import linear_logprob_triton as ours

    kernel = ours._softmax_parts
    blocks = (ours.BLOCK_TOKENS_ROWS if flags[2] else ours.BLOCK_TOKENS, ours.BLOCK_VOCAB, ours.BLOCK_HIDDEN)
    names = [name for name in kernel.arg_names if name.isupper()]
    constants = dict(zip(names, (*map(bool, flags), *blocks), strict=True))
    # States and matrix lie row by row, and a row's length is a multiple of 16.
    constants |= {"stride_hh": 1, "stride_wh": 1}
    pointers = {"hidden": dtype, "weight": dtype, "bias": dtype, "targets": "i64"}
    pointers |= dict.fromkeys(
        ("inverse", "largest", "totals", "shifted", "target_logits", "rows", "entropy_rows"), "fp32"
    )
    signature = {
        name: "constexpr" if name in constants else f"*{pointers[name]}" if name in pointers else "i32"
        for name in kernel.arg_names
    }
    aligned = [*pointers, "size", "stride_ht", "stride_wv"]
    return triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
            attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": ours.NUM_WARPS, "num_stages": ours.NUM_STAGES},
    )


def usage(cubin, folder):
    """What the assembler gave the kernel, by cuobjdump's names."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


# bias, entropy, rows, rows of the entropy
FLAGS = [(0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 1, 1, 0), (0, 1, 1, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize(("dtype", "flags"), [*(("bf16", flags) for flags in FLAGS), ("fp16", FLAGS[-1])])
def test_it_compiles_for_sm_90_without_spilling(dtype, flags, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    compiled = compiled_for_sm_90(dtype, flags)
    found = usage(compiled.asm["cubin"], tmp_path)
    assert found["STACK"] == found["LOCAL"] == 0  # where spilled registers would lie
    assert 0 < found["REG"] < 255
    assert compiled.metadata.shared <= 227 * 1024
    assert "wgmma" in compiled.asm["ptx"]


def test_the_dispatcher():
    hidden, weight, targets = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.long)
    blocked = linear_logprob(hidden, weight, targets, form="blocked")
    assert torch.equal(linear_logprob(hidden, weight, targets)[0], blocked[0])
    with pytest.raises(ValueError, match="float64"):
        linear_logprob(hidden.double(), weight.double(), targets, form="triton")
    with pytest.raises(ValueError, match="none of auto, blocked, triton"):
        linear_logprob(hidden, weight, targets, form="cuda")
