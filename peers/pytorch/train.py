"""Training steps of a model that returns its loss: AdamW, batches from the stream, one rank or several."""

import torch
import torch.distributed as dist

import common

ROWS, SEQ, VOCAB = 16, 128, 4096


def label(flags):
    """What a workload's name calls the type: both ways to bf16 are measured against ours."""
    return "f32" if flags.dtype == "f32" else "bf16"


def run(model, system, workload, flags, rank=0, processes=1, notes="", rows=ROWS, seq=SEQ):
    """Times steps of `model(tokens) -> loss`; under several processes each takes its share of the rows."""
    threads = max(1, flags.threads // processes)
    model = model.to(flags.device)
    parameters = sum(p.numel() for p in model.parameters())
    if flags.dtype == "bf16":
        model = model.bfloat16()
    if processes > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    steps = flags.warmup + flags.steps
    tokens = torch.tensor(common.stream(steps * rows * seq)).view(steps, rows, seq).to(flags.device)
    share = rows // processes
    batches = iter(tokens[:, rank * share:(rank + 1) * share].contiguous())

    def step():
        batch = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(flags.device, torch.bfloat16, enabled=flags.dtype == "autocast"):
            loss = model(batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    ms, losses = common.timed(step, flags)
    peak = common.peak_rss_mb()
    if processes > 1:
        everyone = [None] * processes
        dist.all_gather_object(everyone, (peak, losses))
        peak = sum(peak for peak, _ in everyone)
        losses = [sum(step) / processes for step in zip(*(losses for _, losses in everyone))]
    if rank == 0:
        sizes = f"{parameters / 1e6:.1f}M params, {processes} x {threads} threads, fused AdamW"
        more = {"live_mb": torch.cuda.max_memory_allocated() >> 20} if flags.device == "cuda" else {}
        common.emit(system, workload, rows * seq, ms, losses, ", ".join(filter(None, [sizes, notes])), peak, **more)
    if processes > 1:
        dist.destroy_process_group()
