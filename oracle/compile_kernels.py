"""Compiles every CUDA kernel by NVRTC, without a GPU: python3 oracle/compile_kernels.py [FILE.cu ...]

Needs libnvrtc, as the wheel nvidia-cuda-nvrtc has it. Prints a line for each file and architecture; exit status 1 if
one of them does not compile.
"""

import ctypes
import glob
import importlib.util
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent.parent / "crates/tensor/src/gpu/kernels"
ARCHITECTURES = ["sm_80", "sm_90"]


def load_nvrtc():
    wheels = importlib.util.find_spec("nvidia")
    folders = list(wheels.submodule_search_locations) if wheels else []
    found = [name for folder in folders for name in glob.glob(f"{folder}/*/lib/libnvrtc.so.*")]
    return ctypes.CDLL((found or ["libnvrtc.so"])[0])


def compile(nvrtc, source, headers, architecture):
    """NVRTC's complaint, or nothing."""
    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*(path.read_bytes() for path in headers))
    names = (ctypes.c_char_p * len(headers))(*(path.name.encode() for path in headers))
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts, names
    )
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"--fmad=false"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode() or f"error {failed}" if failed else ""


def main():
    nvrtc = load_nvrtc()
    sources = [pathlib.Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.cu"))
    headers = [FOLDER / "common.cuh", FOLDER / "host.h"]
    failed = False
    for source in sources:
        for architecture in ARCHITECTURES:
            complaint = compile(nvrtc, source, headers, architecture)
            print(f"{source.name} {architecture}: {complaint or 'compiled'}")
            failed |= bool(complaint)
    sys.exit(failed)


if __name__ == "__main__":
    main()
