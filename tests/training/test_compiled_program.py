"""What the compiled update holds on one of eight devices: read off the program, as values cannot show it.

The sizes of the model are chosen so that a dimension tells what it is of. Dimensions are compared as multisets: the
compiler transposes as it likes.
"""

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

BLOCKS, RUN, D, F, V, T, ROWS = 6, 3, 80, 112, 264, 128, 8
KEY_HEADS, VALUE_HEADS, VALUE_SIZE, WIDTH = 4, 8, 20, 5
CHUNK = 16  # tokens whose logits may exist at one time
MESHES = ((1, 2, 4), (2, 2, 2), (1, 8, 1))

COMPILE = f"""
import sys
import jax
jax.config.update("jax_disable_most_optimizations", True)  # of machine code; the program is partitioned all the same
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.sharding import make_mesh, param_shardings
from reterm_jax.policy.spec import abstract_params, param_specs
from reterm_jax.training.optimizer import OptimizerConfig, make_optimizer
from reterm_jax.training.state import abstract_state
from reterm_jax.training.steps import StepConfig, make_rl_step

config = QwenConfig(
    "qwen3_5", {V}, {D}, {F}, {(RUN + 1) * BLOCKS}, 8, 4, 16,
    (("linear_attention",) * {RUN} + ("full_attention",)) * {BLOCKS},
    partial_rotary_factor=0.25, compute_dtype="float32", remat="full", chunk_size=16, attention_block={T},
    linear_num_key_heads={KEY_HEADS}, linear_num_value_heads={VALUE_HEADS}, linear_key_head_dim=12,
    linear_value_head_dim={VALUE_SIZE}, linear_conv_kernel_dim={WIDTH},
)
optimizer = make_optimizer(OptimizerConfig("adamw", 1e-3, weight_decay=0.1), param_specs(config), 10)
for sizes in {MESHES}:
    mesh = make_mesh(*sizes)
    shardings = param_shardings(config, mesh)
    step = make_rl_step(config, StepConfig(micro_rows={ROWS}, logprob_chunk={CHUNK}), optimizer, mesh, shardings)
    state = abstract_state(abstract_params(config), optimizer, mesh, shardings)
    text = step.lower(state, rows={2 * ROWS}, length={T}).compile().as_text()
    open(sys.argv[1] + "/" + "x".join(map(str, sizes)), "w").write(text)
"""

Dims = tuple[int, ...]


@dataclass
class Program:
    """A compiled program by computation: its instructions as text, and the shapes of what they make."""

    text: str
    fsdp: int
    tensor: int
    rows: int
    lines: dict[str, list[str]] = field(default_factory=dict)
    entry: str = ""

    def __post_init__(self) -> None:
        name = ""
        for line in self.text.splitlines():
            if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                name = header[1]
                self.lines[name] = []
                self.entry = name if line.startswith("ENTRY") else self.entry
            elif " = " in line:
                self.lines[name].append(line)

    def arrays(self) -> set[Dims]:
        """Dimensions of everything that an instruction makes."""
        return {dims for lines in self.lines.values() for line in lines for dims in made(line)}

    def loops(self) -> Iterator[tuple[bool, str, set[Dims]]]:
        """Of those that carry the stacked weights of the MLP: is it the loop over micro-batches, its body, and what it
        carries. The others are the loops over layers."""
        for name, lines in self.lines.items():
            for line in lines:
                if " while(" in line and ordered(BLOCKS, D // self.fsdp, F // self.tensor) in map(sort, made(line)):
                    yield name == self.entry, re.search(r"body=%?([\w.\-]+)", line)[1], made(line)

    def within(self, computation: str) -> set[str]:
        """The computation and all that it calls."""
        found, todo = set(), [computation]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += [x for line in self.lines[name] for x in re.findall(r"[\w.\-]+", line) if x in self.lines]
        return found


def made(line: str) -> set[Dims]:
    """Dimensions of the arrays that an instruction makes."""
    result = re.split(r" (?:[\w\-]+)\(", line.split(" = ", 1)[1], maxsplit=1)[0]
    return {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]", result)}


def sort(dims: Dims) -> Dims:
    """Without dimensions of one, in order of size."""
    return tuple(sorted(x for x in dims if x != 1))


def ordered(*dims: int) -> Dims:
    return sort(dims)


@pytest.fixture(scope="module")
def texts(tmp_path_factory, simulated):
    out = tmp_path_factory.mktemp("programs")
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(out)], env=simulated(8), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {mesh: (out / "x".join(map(str, mesh))).read_text() for mesh in MESHES}


@pytest.fixture(params=MESHES, ids=str)
def program(request, texts) -> Program:
    data, fsdp, tensor = request.param
    return Program(texts[request.param], fsdp, tensor, ROWS // (data * fsdp))


def test_no_logits_of_a_batch(program):
    local = {V, V // program.tensor}
    tokens = {math.prod(dims) // x for dims in program.arrays() for x in local & set(dims)}
    assert max(tokens) < program.rows * T
    assert CHUNK // ROWS * program.rows in tokens  # the logits of a slice are there: the test sees logits


def test_weights_are_gathered_for_one_layer_at_a_time(program):
    # The output projection of a DeltaNet layer is gathered as the matrix that it is used as.
    heads = VALUE_HEADS // program.tensor
    layer = {ordered(D, F // program.tensor), ordered(D, heads * VALUE_SIZE)}
    forms = layer | {ordered(D, heads, VALUE_SIZE)}
    stacked = {ordered(n, *dims) for n in (RUN, BLOCKS) for dims in forms} | {ordered(BLOCKS, D, F)}
    assert not stacked & set(map(sort, program.arrays()))
    gathers = {
        (name, sort(dims))
        for name, lines in program.lines.items()
        for line in lines
        if re.search(r" all-gather(-start)?\(", line)
        for dims in made(line)
    }
    inside = {name for outer, body, _ in program.loops() if not outer for name in program.within(body)}
    assert {dims for name, dims in gathers if name in inside} >= layer
    assert not {dims for name, dims in gathers if name not in inside} & forms


def test_gradients_lie_where_their_parameters_lie(program):
    """What the loop over micro-batches carries: parameters, gradients, batch; nothing of the size of a whole weight."""
    [carried] = [carried for outer, _, carried in program.loops() if outer]
    carried = set(map(sort, carried))
    assert ordered(V // program.tensor, D // program.fsdp) in carried
    assert ordered(BLOCKS, D // program.fsdp, F // program.tensor) in carried
    whole = {ordered(v, D) for v in (V, V // program.tensor)} | {
        ordered(BLOCKS, D, f) for f in (F, F // program.tensor)
    }
    assert not whole & carried


def test_heads_and_convolution_of_delta_net_are_cut_over_tensor(program):
    heads = VALUE_HEADS // program.tensor
    arrays = program.arrays()
    assert ordered(program.rows, T, heads, VALUE_SIZE) in set(map(sort, arrays))
    assert max(math.prod(dims) // VALUE_SIZE for dims in arrays if VALUE_SIZE in dims) <= (
        program.rows * (T + WIDTH - 1) * heads
    )
    weights = {sort(dims) for dims in arrays if WIDTH in dims and VALUE_SIZE in dims}
    assert ordered(BLOCKS, heads, VALUE_SIZE, WIDTH) in weights
    assert all(math.prod(dims) <= BLOCKS * heads * VALUE_SIZE * WIDTH for dims in weights)


def test_no_device_has_the_rows_of_others(program):
    rows_and_features = {ordered(ROWS, T, d) for d in (D, D // program.fsdp, F, F // program.tensor)}
    assert not rows_and_features & set(map(sort, program.arrays()))


def test_what_layers_keep_is_cut_over_rows_and_tokens(program):
    carried = {sort(dims) for outer, _, carried in program.loops() if not outer for dims in carried}
    # Of rows without a dimension of time there is nothing to see: weights are what has BLOCKS and D alone.
    kept = {dims for dims in carried if {BLOCKS, D, T // program.tensor} <= set(dims) or {BLOCKS, D, T} <= set(dims)}
    input_of_a_layer = program.rows, T // program.tensor, D
    assert kept == {ordered(BLOCKS, *input_of_a_layer), ordered(BLOCKS, RUN, *input_of_a_layer)}
