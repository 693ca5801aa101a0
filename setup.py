"""What pyproject.toml cannot say: where Homebrew has headers, what the index shows of README.md.

And a wheel without the core: pip wheel . --config-settings=--build-option=--pure
"""

import os
import re
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
# Of brew itself, Apple silicon, Intel. No compiler looks into the first two by itself.
BREW = (os.environ.get("HOMEBREW_PREFIX"), "/opt/homebrew", "/usr/local")
KEGS = ("opt/jpeg-turbo", "opt/xxhash", "")  # a keg may be there without links from the prefix


class BuildCore(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # a header that was installed since is no reason for it to build anew
        if sys.platform == "darwin":
            kegs = [Path(prefix, keg) for prefix in BREW if prefix for keg in KEGS]
            for folder, found in (("include", self.include_dirs), ("lib", self.library_dirs)):
                found += [str(keg / folder) for keg in kegs if (keg / folder).is_dir()]


class BuildWheel(bdist_wheel):
    user_options: ClassVar = [*bdist_wheel.user_options, ("pure", None, "leave the core out")]
    boolean_options: ClassVar = [*bdist_wheel.boolean_options, "pure"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.pure = False

    def finalize_options(self) -> None:
        if self.pure:
            self.distribution.ext_modules = []
        super().finalize_options()


def readme() -> str:
    """README.md, whose links into the tree would lead nowhere on the package index.

    With `Documentation` in [project.urls], the site of tools/docs, they lead there. Without, they
    become the names of files, which the source distribution has.
    """
    urls = (HERE / "pyproject.toml").read_text("utf-8").partition("[project.urls]")[2]
    given = re.search(r'^Documentation = "(.+)"', urls.partition("\n[")[0], re.MULTILINE)

    def link(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        if given:
            page = re.sub(r"^docs/(.*)\.md\b", r"\1.html", target)
            page = re.sub(r"^docs/", "_images/", page)  # where Sphinx puts a picture
            return f"{image}[{text}]({given[1].rstrip('/')}/{page})"
        path = target.partition("#")[0]
        return path if text == path else f"{text} ({path})"

    text = (HERE / "README.md").read_text("utf-8")
    text = re.sub(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", link, text)
    if not given:
        text += (
            "\nThe files that are named here are in the source distribution: "
            "`pip download --no-deps --no-binary shardio-torch shardio-torch`.\n"
        )
    return text


setup(
    cmdclass={"build_ext": BuildCore, "bdist_wheel": BuildWheel},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
