"""Builds the native extension: LibTorch's stable ABI and Python's limited API, so one binary serves torch >= 2.11."""

import platform
from glob import glob

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ABI_TARGET = (2, 11)  # the oldest torch whose runtime may load what is built here
PY_LIMITED_API = "cp311"  # torch defines Py_LIMITED_API itself

sources = ["csrc/module.cpp", *sorted(glob("csrc/cpu/*.cpp"))]
define_macros = [
    ("TORCH_TARGET_VERSION", f"0x{ABI_TARGET[0]:02x}{ABI_TARGET[1]:02x}000000000000"),
    ("SPECDEC_ABI_TARGET", ".".join(map(str, ABI_TARGET))),
]
# Neither flag touches a result: errno and floating-point traps only keep loops from being vectorised.
flags = ["-O3", "-std=c++20", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall", "-Wextra"]
if platform.system() == "Windows":
    raise SystemExit("specdec builds on Linux and macOS; Windows is not supported")

setup(
    ext_modules=[
        CppExtension(
            "specdec_kernels._C",
            sources,
            define_macros=define_macros,
            extra_compile_args=flags,
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True)},
    options={"bdist_wheel": {"py_limited_api": PY_LIMITED_API}},
)
