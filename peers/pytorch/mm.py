"""The matrix products of the benchmarked decoders: rows x out x in, by torch.mm into memory allocated before.

Forward is one product (`y = x W^T`), backward two (`dW = g^T x`, `dx = g W`); a timed step repeats them until it has
done two GFLOP."""

import common

flags = common.parser(__doc__)
flags.add_argument("--shapes", help="others: 2048x256x256,64x1024x256")
flags = flags.parse_args()
common.enter(flags)

import statistics

import torch

SHAPES = [(2048, 256, 256), (2048, 768, 256), (2048, 1024, 256), (2048, 256, 1024), (2048, 4096, 256),
          (512, 2048, 256), (512, 256, 1024), (1024, 2048, 512), (64, 1024, 256)]
FLOP_PER_STEP = 2_000_000_000

if flags.shapes:
    SHAPES = [tuple(map(int, shape.split("x"))) for shape in flags.shapes.split(",")]

DTYPE = torch.float32 if flags.dtype == "f32" else torch.bfloat16
torch.set_num_threads(flags.threads)
torch.set_default_device(flags.device)
for rows, outer, inner in SHAPES:
    sides = [(rows, inner), (outer, inner), (rows, outer)]
    x, weight, gradient = (torch.rand(side).to(DTYPE) for side in sides)
    d_x, d_weight, y = (torch.empty(side, dtype=DTYPE) for side in sides)
    repeats = max(1, FLOP_PER_STEP // (2 * rows * outer * inner))

    def forward():
        for _ in range(repeats):
            torch.mm(x, weight.t(), out=y)
        common.finished(flags)

    def backward():
        for _ in range(repeats):
            torch.mm(gradient.t(), x, out=d_weight)
            torch.mm(gradient, weight, out=d_x)
        common.finished(flags)

    for direction, products, step in [("fwd", 1, forward), ("bwd", 2, backward)]:
        ms = [ms / repeats for ms in common.timed(step, flags)[0]]
        gflops = 2 * products * rows * outer * inner / statistics.median(ms) / 1e6
        common.emit(f"mm/torch-{torch.__version__}", f"mm {rows}x{outer}x{inner} {flags.dtype} {direction}", rows, ms, [],
                    f"{flags.threads} threads, {gflops:.0f} GFLOP/s", gflops=round(gflops))
