#!/usr/bin/env python3
"""libraries.py FOLDER: links libnvrtc.so, libcublas.so and libcublasLt.so of CUDA 13 in FOLDER; prints the folders they and libnccl.so.2 lie
in, for LD_LIBRARY_PATH. PyTorch's wheels come before a toolkit. Loads no PyTorch, which takes seconds."""

import sys
from pathlib import Path

TOOLKITS = ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"]
# Where drivers of containers lie, if the loader does not know them.
DRIVERS = ["/usr/local/nvidia/lib64", "/usr/local/nvidia/lib"]


def folders():
    for site in sys.path:
        if (Path(site) / "torch").is_dir():
            yield from sorted((Path(site) / "nvidia").glob("*/lib"))
            yield Path(site) / "torch/lib"
    yield from map(Path, TOOLKITS)


links, found = Path(sys.argv[1]), []
for name in ["libnvrtc.so", "libcublas.so", "libcublasLt.so"]:
    places = [folder / f"{name}.13" for folder in folders() if (folder / f"{name}.13").exists()]
    if not places:
        print(f"{name}.13 is in none of PyTorch's folders", file=sys.stderr)
        continue
    link = links / name
    link.unlink(missing_ok=True)
    link.symlink_to(places[0])
    found.append(str(places[0].parent))
nccl = [folder for folder in folders() if (folder / "libnccl.so.2").exists()]
found.extend(map(str, nccl[:1]))
print(":".join(dict.fromkeys([*found, *filter(lambda folder: Path(folder).is_dir(), DRIVERS)])))
