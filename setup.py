"""Compiles the core (`schedlab.core.MODULES`) where that is possible; elsewhere the same files run interpreted.

One library holds all modules, linked from an object each; `schedlab.core` finds them in it. C files and objects stay in
build/core. Nothing that goes wrong here fails an installation, and what is up to date is not made again.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CORE = runpy.run_path(str(ROOT / "src/schedlab/core.py"))
MODULES: tuple[str, ...] = CORE["MODULES"]
BUILD = ROOT / "build" / "core"
OBJECTS = BUILD / str(sysconfig.get_config_var("SOABI"))
DIRECTIVES = {"language_level": 3, "annotation_typing": False}  # C types are those of the .pxd files alone
# Python rounds every product: a fused multiplication and addition would give other digits.
FLAGS = [] if os.name == "nt" else ["-O2", "-g0", "-ffp-contract=off"]


class BuildCore(build_ext):
    def run(self) -> None:
        if self.inplace and not newer(Path(__file__), CORE["library"]()):
            return
        began = time.monotonic()
        print(f"compiling {len(MODULES)} modules of the core …", flush=True)
        try:
            super().run()
        except (Exception, SystemExit) as error:  # there is no compiler, no Python.h or no Cython, or one of them fails
            print(f"schedlab runs interpreted: its core was not compiled ({one_line(error)})", flush=True)
            self.extensions = []
        else:
            print(f"compiled in {time.monotonic() - began:.0f} s: schedlab runs native", flush=True)

    def build_extension(self, extension: Extension) -> None:
        probe = BUILD / "probe.c"
        self.mkpath(str(BUILD))
        probe.write_text("#include <Python.h>\n")
        self.compile(probe)  # before all are translated
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(self.compile, c_files(self.force)))
        path = Path(self.get_ext_fullpath(extension.name))
        self.mkpath(str(path.parent))
        self.compiler.link_shared_object(objects, str(path))

    def compile(self, path: Path) -> str:
        """The object of a C file, made unless there is a newer one."""
        folder = OBJECTS / path.relative_to(BUILD).parent
        made = folder / f"{path.stem}{self.compiler.obj_extension}"
        if self.force or newer(path, made) or newer(Path(__file__), made):
            work = folder / f"{path.stem}.tmp"
            (unfinished,) = self.compiler.compile([os.path.relpath(path)], output_dir=str(work), extra_preargs=FLAGS)
            Path(unfinished).replace(made)
            shutil.rmtree(work)
        return str(made)

    def copy_extensions_to_source(self) -> None:
        """In place of what other sources made, and in one go: a file of this name is whole."""
        library: Path = CORE["library"]()
        (extension,) = self.extensions
        unfinished = library.with_suffix(".tmp")
        shutil.copyfile(Path(self.build_lib, self.get_ext_filename(extension.name)), unfinished)
        for older in CORE["libraries"]():
            older.unlink()
        unfinished.replace(library)


def c_files(force: bool) -> list[Path]:
    from Cython.Build import cythonize

    extensions = [Extension(f"schedlab.{module}", [relative(CORE["source"](module))]) for module in MODULES]
    made = cythonize(
        extensions,
        nthreads=os.cpu_count() or 1,
        build_dir=str(BUILD),
        include_path=["src"],
        compiler_directives=DIRECTIVES,
        force=force,
        quiet=True,
    )
    return [Path(extension.sources[0]).resolve() for extension in made]


def newer(source: Path, made: Path) -> bool:
    return not made.exists() or made.stat().st_mtime < source.stat().st_mtime


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def core() -> list[Extension]:
    """None where they are not wanted: a wheel without them is one for any machine."""
    if os.environ.get(CORE["OFF"]):
        return []
    sources, layouts = ([relative(CORE[kind](module)) for module in MODULES] for kind in ("source", "layout"))
    return [Extension(f"schedlab.{CORE['library']().name.partition('.')[0]}", sources, depends=layouts)]


if __name__ == "__main__":  # processes that translate may import this file
    os.chdir(ROOT)
    setup(ext_modules=core(), cmdclass={"build_ext": BuildCore})
