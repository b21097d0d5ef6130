"""Builds the native extensions: LibTorch's stable ABI and Python's limited API, so one binary serves torch >= 2.11.

``specdec.drafters._C`` finds what a text repeats, and knows nothing of torch.
Both packages of operations, ``specdec_kernels`` and ``specdec_layers``, have a ``_C`` with the CPU kernels, and a
``_C_cuda`` with the CUDA kernels. That is built where nvcc is and torch has CUDA, or where SPECDEC_CUDA=1 asks for it
(0 leaves it out); it loads on a torch with CUDA only. TORCH_CUDA_ARCH_LIST names its architectures.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from glob import glob
from pathlib import Path

import setuptools
import torch
from setuptools import Extension, setup
from torch.utils import cpp_extension
from torch.utils.cpp_extension import BuildExtension, CppExtension

ABI_TARGET = (2, 11)  # the oldest torch whose runtime may load what is built here
PY_LIMITED_API = "cp311"  # torch defines Py_LIMITED_API itself
PACKAGES = {"specdec_kernels": "csrc", "specdec_layers": "csrc/layers"}  # and where their native code is
# PTX serves later GPUs, which compile it themselves. That of 10.0 serves 11.0 (Thor) too, which older nvcc do not know.
CUDA_ARCHITECTURES = "8.0;8.6;8.9;9.0a;10.0+PTX;12.0"

OLDEST_SETUPTOOLS = 77  # the first that reads the licence of pyproject.toml; older ones answer with a page of errors

if int(setuptools.__version__.split(".")[0]) < OLDEST_SETUPTOOLS:
    raise SystemExit(
        f"specdec needs setuptools >= {OLDEST_SETUPTOOLS} to build: got {setuptools.__version__}; "
        f"pip install -U 'setuptools>={OLDEST_SETUPTOOLS}'"
    )
if platform.system() == "Windows":
    raise SystemExit("specdec builds on Linux and macOS; Windows is not supported")
define_macros = [
    ("TORCH_TARGET_VERSION", f"0x{ABI_TARGET[0]:02x}{ABI_TARGET[1]:02x}000000000000"),
    ("SPECDEC_ABI_TARGET", ".".join(map(str, ABI_TARGET))),
]
# Neither flag touches a result: errno and floating-point traps only keep loops from being vectorised.
flags = ["-O3", "-std=c++20", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall", "-Wextra"]


def cuda_home() -> str | None:
    """Where the CUDA toolkit is whose kernels are to be built; None: they are not."""
    asked = os.environ.get("SPECDEC_CUDA", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"SPECDEC_CUDA: got {asked!r}, allowed: 0 (leave the CUDA kernels out) or 1 (build them)")
    if asked == "0" or not (asked or torch.version.cuda):
        return None
    nvcc = shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin:{os.environ['PATH']}")
    if nvcc is None:
        if asked:
            raise SystemExit("SPECDEC_CUDA=1: nvcc is not there; set CUDA_HOME or PATH")
        print("specdec: nvcc is not there, so the CUDA kernels are left out; Triton's serve")
        return None
    return str(Path(nvcc).resolve().parents[1])


def version_of(compiler: str) -> str:
    """What it says of itself. Ends the build in a line where it is not there."""
    try:
        return subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it ends with {error.returncode}"
        raise SystemExit(
            f"specdec needs a C++20 compiler: {compiler!r} ({why}); install g++ or clang, or set CXX"
        ) from None


def cpu_extension(package: str, folder: str) -> CppExtension:
    sources = [f"{folder}/module.cpp", *glob(f"{folder}/cpu/*.cpp"), *glob("csrc/common/*.cpp")]
    return CppExtension(
        f"{package}._C",
        sorted(sources),
        define_macros=define_macros,
        depends=sorted(glob("csrc/**/*.*", recursive=True)),  # the source distribution has these, CUDA's as well
        extra_compile_args=flags,
        py_limited_api=True,
    )


def cuda_extension(package: str, folder: str, home: str) -> CppExtension:
    cpp_extension.CUDA_HOME = home  # which torch ignores where it has no CUDA itself
    asked = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHITECTURES)
    architectures = ":".join(asked.replace(";", " ").split())  # nvcc would take commas for several macros
    return CppExtension(
        f"{package}._C_cuda",
        [f"{folder}/module_cuda.cpp", *sorted(glob(f"{folder}/cuda/*.cu"))],
        define_macros=[*define_macros, ("USE_CUDA", None), ("SPECDEC_CUDA_ARCHITECTURES", architectures)],
        include_dirs=[f"{home}/include"],
        library_dirs=[f"{home}/lib64", f"{home}/lib"],  # a toolkit of its own, or of pip's packages
        # The runtime is static, so that it loads whatever CUDA torch came with. torch_cuda has the current stream.
        libraries=["cudart_static", "dl", "rt", "pthread", *(["torch_cuda"] if torch.version.cuda else [])],
        extra_compile_args={"cxx": flags, "nvcc": ["-O3", "-std=c++20"]},
        py_limited_api=True,
    )


class KeepObjects(BuildExtension):
    """Keeps objects in build/, also of an editable install, which would compile in a folder of the moment.

    Ninja compiles again what depends on a file or a command that changed. What it does not see is in the folder's name:
    torch, whose headers pip may replace, and the compilers.
    """

    def finalize_options(self) -> None:
        asked = self.build_temp
        super().finalize_options()
        compilers = [cpp_extension.get_cxx_compiler(), *([f"{home}/bin/nvcc"] if home else [])]
        known = [version_of(compiler) for compiler in compilers]
        key = hashlib.sha256(repr((torch.__version__, torch.version.git_version, known)).encode()).hexdigest()[:12]
        self.build_temp = asked or os.path.join("build", f"objects-{key}")


def drafters_extension() -> Extension:
    sources = sorted(glob("csrc/drafters/*.cpp"))
    depends = sorted(glob("csrc/drafters/*.h"))
    return Extension(
        "specdec.drafters._C", sources, depends=depends, extra_compile_args=flags, py_limited_api=True, language="c++"
    )


home = cuda_home()
setup(
    ext_modules=[
        drafters_extension(),
        *(cpu_extension(package, folder) for package, folder in PACKAGES.items()),
        *(cuda_extension(package, folder, home) for package, folder in PACKAGES.items() if home),
    ],
    cmdclass={"build_ext": KeepObjects.with_options(use_ninja=True)},
    options={"bdist_wheel": {"py_limited_api": PY_LIMITED_API}},
)
