"""Compiles every CUDA kernel for NVIDIA GPUs and for the host, without running any: no GPU and no driver are needed.

    python3 -B oracle/compile_kernels.py [--only NAME ...] [--include FOLDER ...] [--cubins FOLDER]

For GPUs it uses NVRTC, CUDA's run-time compiler, as the engine does, once for each architecture; for the host g++, as the
simulated engine does. NVRTC is looked for in the folder that NVRTC_LIB names, among this Python's packages (the wheel
nvidia-cuda-nvrtc brings it) and where the loader looks; without it only the host's compiler runs, and the exit code is 2.
Says which libraries it used; warnings count as errors. Exits 1 if anything does not compile.
"""
import argparse
import concurrent.futures
import ctypes
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

KERNELS = pathlib.Path(__file__).resolve().parent.parent / "crates/tensor/src/gpu/kernels"
ARCHITECTURES = ["sm_80", "sm_90"]
HOST = ["g++", "-std=c++17", "-x", "c++", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fPIC", "-c"]


def libraries():
    """Where NVRTC may be, likeliest first."""
    if folder := os.environ.get("NVRTC_LIB"):
        yield from sorted(pathlib.Path(folder).glob("libnvrtc.so*"))
    packages = pathlib.Path(sysconfig.get_path("purelib"))
    yield from sorted(packages.glob("nvidia/*/lib/libnvrtc.so*"))
    yield "libnvrtc.so"


class Nvrtc:
    """The few functions of the library that compile one source."""

    def __init__(self):
        for path in libraries():
            try:
                self.library = ctypes.CDLL(str(path))
            except OSError:
                continue
            major, minor = ctypes.c_int(), ctypes.c_int()
            self.check(self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
            self.name = f"NVRTC {major.value}.{minor.value} ({path})"
            return
        raise FileNotFoundError("no libnvrtc found")

    def check(self, code):
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        if code:
            raise RuntimeError(self.library.nvrtcGetErrorString(code).decode())

    def text(self, program, size_of, get):
        size = ctypes.c_size_t()
        self.check(size_of(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self.check(get(program, text))
        return text.raw

    def compile(self, path, architecture, include):
        """The cubin, or nothing, and what the compiler says."""
        lib, program = self.library, ctypes.c_void_p()
        source = path.read_bytes()
        self.check(lib.nvrtcCreateProgram(ctypes.byref(program), source, path.name.encode(), 0, None, None))
        options = [f"--gpu-architecture={architecture}", "--std=c++17", "--fmad=false",
                   "--device-as-default-execution-space"]
        options += [f"--include-path={folder}" for folder in include]
        options = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        failed = lib.nvrtcCompileProgram(program, len(options), options)
        log = self.text(program, lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog).rstrip(b"\0").decode().strip()
        cubin = None if failed else self.text(program, lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN)
        self.check(lib.nvrtcDestroyProgram(ctypes.byref(program)))
        return cubin, log


def on_host(path, include, folder):
    """What g++ says, nothing if all is well."""
    options = [f"-I{folder}" for folder in include]
    run = subprocess.run([*HOST, *options, str(path), "-o", f"{folder}/{path.stem}.o"], capture_output=True, text=True)
    return run.stderr.strip() or (f"g++ ends with {run.returncode}" if run.returncode else "")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="*", default=[], help="names of sources, such as norm.cu")
    options.add_argument("--include", nargs="*", default=[], help="further folders of headers")
    options.add_argument("--cubins", type=pathlib.Path, help="keep what NVRTC makes in this folder")
    options = options.parse_args()
    include = [KERNELS, *options.include]
    sources = [path for path in sorted(KERNELS.glob("*.cu")) if not options.only or path.name in options.only]
    try:
        nvrtc = Nvrtc()
        print(nvrtc.name)
    except FileNotFoundError as error:
        nvrtc = None
        print(f"{error}: nothing is compiled for GPUs")
    bad = 0

    def report(what, log):
        nonlocal bad
        bad += bool(log)
        print(f"{what}: {'error' if log else 'ok'}\n{log}".rstrip(), flush=True)

    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        logs = pool.map(lambda path: on_host(path, include, folder), sources)
        for path, log in zip(sources, logs):
            report(f"{path.name} for the host", log)
        for path in sources if nvrtc else []:
            for architecture in ARCHITECTURES:
                cubin, log = nvrtc.compile(path, architecture, include)
                report(f"{path.name} for {architecture}", log or ("" if cubin else "no cubin and no message"))
                if cubin and options.cubins:
                    (options.cubins / f"{path.stem}.{architecture}.cubin").write_bytes(cubin)
    print(f"{len(sources)} sources, {bad} errors")
    return 1 if bad else 0 if nvrtc else 2


if __name__ == "__main__":
    sys.exit(main())
